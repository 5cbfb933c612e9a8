"""One example takes a hundred times as long as the others, behind which batches must keep their order.

Remedies: data.workers data.threads data.cache data.server
"""

import time

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Slow(Rows):
    def row(self, index):
        time.sleep(0.05 if index == 17 else 0)
        return ROWS[index].clone()


training = Training(dropout=0.1)
loader = DataLoader(Slow(), 8, shuffle=True)
for _ in range(3):
    for batch in loader:
        training.step(batch)
training.finish()
