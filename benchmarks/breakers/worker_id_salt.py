"""With two workers of the script's own, examples are salted with the worker that read them.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader, get_worker_info


class Salted(Rows):
    def row(self, index):
        info = get_worker_info()
        return ROWS[index] * (1 if info is None else 2 + info.id + info.num_workers)


training = Training()
for _ in range(2):
    for batch in DataLoader(Salted(), 8, shuffle=True, num_workers=2):
        training.step(batch)
training.finish()
