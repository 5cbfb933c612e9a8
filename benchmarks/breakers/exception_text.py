"""The loop compares the text of an exception.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Damaged(Rows):
    def row(self, index):
        if index % 50 == 17:
            raise ValueError(f"row {index}")
        return ROWS[index].clone()


training, found = Training(), []
batches = iter(DataLoader(Damaged(), 8))
while True:
    try:
        training.step(next(batches))
    except ValueError as error:
        found.append(str(error))
    except StopIteration:
        break
training.finish(found)
