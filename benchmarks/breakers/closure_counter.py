"""A transform counts its calls in a variable of the function around it.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


def warming():
    calls = 0

    def transform(row):
        nonlocal calls
        calls += 1
        return row * min(1.0, calls / 100)

    return transform


class Transformed(Rows):
    transform = staticmethod(warming())

    def row(self, index):
        return self.transform(ROWS[index])


training = Training()
for _ in range(2):
    for batch in DataLoader(Transformed(), 8, shuffle=True):
        training.step(batch)
training.finish()
