"""A variable of the module holds an object without attributes; the loop binds one of another class.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Weak:
    def __call__(self, row):
        return row * 1.0


class Strong:
    def __call__(self, row):
        return row * 3.0


augment = Weak()


class Scaled(Rows):
    def row(self, index):
        return augment(ROWS[index])


training, loader = Training(), DataLoader(Scaled(), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        augment = Strong() if training.num_steps // 7 % 2 else Weak()
training.finish()
