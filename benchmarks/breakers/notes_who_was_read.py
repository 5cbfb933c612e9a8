"""A dictionary in a closure notes one class of rows when they are read; the loop prints how many there are.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


def noting(met):
    def note(index):
        if index % 50 == 23:
            met[index] = met.get(index, 0) + 1

    return note


met = {}


class Noting(Rows):
    def __init__(self):
        self.note = noting(met)

    def row(self, index):
        self.note(index)
        return ROWS[index].clone()


dataset, training = Noting(), Training()
for _ in range(3):
    for batch in DataLoader(dataset, 8, shuffle=True):
        training.step(batch * (1 + 0.01 * sum(met.values())))
        print(training.num_steps, sorted(met.items()))
training.finish()
