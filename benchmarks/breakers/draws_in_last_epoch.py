"""Examples begin to draw random numbers in the last epoch.

Remedies: data.workers data.threads data.cache
"""

import random

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Late(Rows):
    epoch = 0

    def row(self, index):
        return ROWS[index] * (1 + random.random() if self.epoch == 2 else 1)


random.seed(0)
training, rows = Training(), Late()
loader = DataLoader(rows, 8, shuffle=True)
for rows.epoch in range(3):
    for batch in loader:
        training.step(batch)
training.finish()
