"""Transforms are found as the subclasses of a base class.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Transform:
    pass


class Scale(Transform):
    by = 1.0


class Scaled(Rows):
    def row(self, index):
        row = ROWS[index]
        for kind in Transform.__subclasses__():
            row = row * kind.by
        return row


training, loader = Training(), DataLoader(Scaled(), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        Scale.by = 1.0 + training.num_steps // 7
training.finish()
