"""The dataset keeps each example that it has read; the loop changes later what examples are made of.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Keeping(Rows):
    def __init__(self):
        self.scale, self.kept = 1.0, {}

    def row(self, index):
        if index not in self.kept:
            self.kept[index] = ROWS[index] * self.scale
        return self.kept[index].clone()


dataset, training = Keeping(), Training()
for epoch in range(3):
    for place, batch in enumerate(DataLoader(dataset, 8, shuffle=True)):
        training.step(batch)
        if epoch == 0 and place == 10:
            dataset.scale = 2.0
training.finish()
