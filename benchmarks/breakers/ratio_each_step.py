"""The loop changes an attribute of the dataset after every step, as a curriculum does.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Mixed(Rows):
    ratio = 0.0

    def row(self, index):
        return ROWS[index] * (1 + self.ratio)


training, rows = Training(), Mixed()
for step, batch in enumerate(DataLoader(rows, 8, shuffle=True)):
    training.step(batch)
    rows.ratio = step / 20
training.finish()
