"""Settings are looked up by a module's own __getattr__.

Remedies: data.workers data.threads data.cache
"""

import types

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

VALUES = {"scale": 1.0}
settings = types.ModuleType("settings")
settings.__getattr__ = lambda name: VALUES[name]


class Scaled(Rows):
    def row(self, index):
        return ROWS[index] * settings.scale


training, loader = Training(), DataLoader(Scaled(), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        VALUES["scale"] = 1.0 + training.num_steps // 7
training.finish()
