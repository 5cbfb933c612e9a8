"""The loop gives the dataset another class.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Scaled(Rows):
    def row(self, index):
        return ROWS[index] * 1.0


class Harder(Rows):
    def row(self, index):
        return ROWS[index] * 3.0


training, loader = Training(), DataLoader(Scaled(), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        loader.dataset.__class__ = Harder if training.num_steps // 7 % 2 else Scaled
training.finish()
