"""A transform draws from a `random.Random` of its own, and so does the loop.

Remedies: data.workers data.threads data.cache
"""

import random

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Flip:
    def __init__(self):
        self.random = random.Random(4)

    def __call__(self, row):
        return row.flip(0) if self.random.random() < 0.5 else row.clone()


class Flipped(Rows):
    transform = Flip()

    def row(self, index):
        return self.transform(ROWS[index])


training = Training()
for batch in DataLoader(Flipped(), 8, shuffle=True):
    training.step(batch * Flipped.transform.random.random())
training.finish()
