"""Transforms are in a set; one goes by a variable that the loop sets.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

SCALE = 1.0


def scaled(row):
    return row * SCALE


class Mixed(Rows):
    def __init__(self, made):
        self.made = made

    def row(self, index):
        return sum(made(ROWS[index]) for made in self.made)


training, loader = Training(), DataLoader(Mixed({scaled}), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        SCALE = 1.0 + training.num_steps // 7
training.finish()
