"""The loop sets a global of the module after every step; examples use it.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

ratio = 0.0


class Mixed(Rows):
    def row(self, index):
        return ROWS[index] * (1 + ratio)


training = Training()
for step, batch in enumerate(DataLoader(Mixed(), 8, shuffle=True)):
    training.step(batch)
    ratio = step / 20
training.finish()
