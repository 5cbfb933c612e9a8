"""The dataset counts its reads in a global of the module and scales by the count.

Remedies: data.workers data.threads data.cache data.server
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

READS = [0]


class Counted(Rows):
    def row(self, index):
        READS[0] += 1
        return ROWS[index] * (1 + READS[0] // 50 / 10)


training = Training()
for _ in range(2):
    for batch in DataLoader(Counted(), 8, shuffle=True):
        training.step(batch)
training.finish()
