"""The configuration names the function of a module by which rows are scaled.

Remedies: data.workers data.threads data.cache
"""

import types

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

transforms = types.ModuleType("transforms")
exec("STRENGTH = 1.0\ndef scaled(row):\n    return row * STRENGTH", vars(transforms))


class Scaled(Rows):
    def __init__(self, name):
        self.name = name

    def row(self, index):
        return getattr(transforms, self.name)(ROWS[index])


training, loader = Training(), DataLoader(Scaled("scaled"), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        transforms.STRENGTH = 1.0 + training.num_steps // 7
training.finish()
