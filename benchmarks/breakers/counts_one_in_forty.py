"""The dataset counts the rows that it cannot decode, one in forty; the loop prints and weighs by the count.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Counting(Rows):
    def __init__(self):
        self.num_bad = 0

    def row(self, index):
        if index % 40 == 17:
            self.num_bad += 1
        return ROWS[index].clone()


dataset, training = Counting(), Training()
for _ in range(4):
    for batch in DataLoader(dataset, 8, shuffle=True):
        training.step(batch * (1 + 0.01 * dataset.num_bad))
    print("bad rows so far", dataset.num_bad)
training.finish()
