"""The loop replaces a method of the dataset's class in mid-epoch.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Patched(Rows):
    pass


training = Training()
for step, batch in enumerate(DataLoader(Patched(), 8, shuffle=True)):
    training.step(batch)
    if step == 7:
        Patched.row = lambda self, index: ROWS[index].flip(0)
training.finish()
