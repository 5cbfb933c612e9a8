"""Examples note their index in a list of the module, and the loop uses how long it is.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

SEEN = []


class Noting(Rows):
    def row(self, index):
        SEEN.append(index)
        return ROWS[index].clone()


training = Training()
for batch in DataLoader(Noting(), 8, shuffle=True):
    training.step(batch * (1 + len(SEEN) / 100))
training.finish(sum(SEEN))
