"""Examples look whether a loader worker reads them.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader, get_worker_info


class Aware(Rows):
    def row(self, index):
        return ROWS[index] * (1 if get_worker_info() is None else 2)


training = Training()
for batch in DataLoader(Aware(), 8, shuffle=True):
    training.step(batch)
training.finish()
