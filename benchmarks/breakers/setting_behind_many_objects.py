"""A transform goes by a global variable, and the dataset holds some thousand small objects besides.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

STRENGTH = 1.0


class Part:
    def __init__(self):
        self.first, self.second, self.third = [[1], [2]], [[3], [4]], [[5], [6]]


class Strong:
    def __call__(self, row):
        return row * STRENGTH


class Composed:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, row):
        for transform in self.transforms:
            row = transform(row)
        return row


class Transformed(Rows):
    def __init__(self):
        self.parts = [[Part() for _ in range(8)] for _ in range(120)]
        self.transform = Composed([Strong()])

    def row(self, index):
        return self.transform(ROWS[index].clone())


dataset, training = Transformed(), Training()
for _ in range(3):
    for batch in DataLoader(dataset, 8, shuffle=True):
        training.step(batch)
        if training.num_steps % 25 == 0:
            STRENGTH *= 1.2
training.finish()
