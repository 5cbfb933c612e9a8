"""The loop stops for good when a row late in the data raises an interrupt; later rows must not count.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

READ = []


class Ending(Rows):
    def row(self, index):
        if index == 111:
            raise KeyboardInterrupt
        READ.append(index)
        return ROWS[index].clone()


training = Training()
try:
    for batch in DataLoader(Ending(), 8):
        training.step(batch)
except KeyboardInterrupt:
    training.loss += 1
training.finish(len(READ))
