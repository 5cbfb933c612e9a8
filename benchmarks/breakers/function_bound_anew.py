"""A variable of the module holds the function by which rows are scaled; the loop binds another one late in training.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


def weak(row):
    return row * 1.0


def strong(row):
    return row * 3.0


augment = weak


class Scaled(Rows):
    def row(self, index):
        return augment(ROWS[index]) if index % 5 == 4 else ROWS[index].clone()


training, loader = Training(), DataLoader(Scaled(), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        augment = strong if training.num_steps > 69 else weak
training.finish()
