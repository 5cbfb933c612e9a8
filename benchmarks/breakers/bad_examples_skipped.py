"""A few examples raise, and the loop goes on with the next batch.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Damaged(Rows):
    def row(self, index):
        if index % 50 == 17:
            raise OSError(f"row {index} is damaged")
        return ROWS[index].clone()


training, damaged = Training(), 0
for _ in range(2):
    batches = iter(DataLoader(Damaged(), 8, shuffle=True))
    while True:
        try:
            training.step(next(batches))
        except OSError:
            damaged += 1
        except StopIteration:
            break
training.finish(damaged)
