"""Settings are an attribute of a metaclass.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Meta(type):
    scale = 1.0


class Settings(metaclass=Meta):
    pass


class Scaled(Rows):
    def row(self, index):
        return ROWS[index] * Settings.scale


training, loader = Training(), DataLoader(Scaled(), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        Meta.scale = 1.0 + training.num_steps // 7
training.finish()
