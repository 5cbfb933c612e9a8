"""The dataset counts its reads in an attribute and scales by the count.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Counted(Rows):
    reads = 0

    def row(self, index):
        self.reads += 1
        return ROWS[index] * (1 + self.reads // 50 / 10)


training = Training()
for _ in range(2):
    for batch in DataLoader(Counted(), 8, shuffle=True):
        training.step(batch)
training.finish()
