"""A setting is put into builtins.

Remedies: data.workers data.threads data.cache
"""

import builtins

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

builtins.SCALE = 1.0


class Scaled(Rows):
    def row(self, index):
        return ROWS[index] * SCALE  # noqa: F821


training, loader = Training(), DataLoader(Scaled(), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        builtins.SCALE = 1.0 + training.num_steps // 7
training.finish()
