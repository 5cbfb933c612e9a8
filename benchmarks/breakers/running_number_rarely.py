"""One row in forty gets a running number, from an iterator that is a global of the module.

Remedies: data.workers data.threads data.cache
"""

import itertools

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

NUMBERS = itertools.count()


class Numbered(Rows):
    def row(self, index):
        return ROWS[index] + (next(NUMBERS) / 10 if index % 40 == 17 else 0)


dataset, training = Numbered(), Training()
for _ in range(3):
    for batch in DataLoader(dataset, 8, shuffle=True):
        training.step(batch)
training.finish(next(NUMBERS))
