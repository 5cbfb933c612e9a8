"""Transforms are the keys of a dictionary, their weights its values; one goes by a variable that the loop sets.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

SCALE = 1.0


def shifted(row):
    return row + 0.1


def scaled(row):
    return row * SCALE


class Mixed(Rows):
    def __init__(self, weights):
        self.weights = weights

    def row(self, index):
        return sum(weight * made(ROWS[index]) for made, weight in self.weights.items())


training, loader = Training(), DataLoader(Mixed({shifted: 0.3, scaled: 0.7}), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        SCALE = 1.0 + training.num_steps // 7
training.finish()
