"""One row in forty is put on a queue of C; the script empties it after each epoch.

Remedies: data.workers data.threads data.cache
"""

import queue

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

BAD = queue.SimpleQueue()


class Queueing(Rows):
    def row(self, index):
        if index % 40 == 17:
            BAD.put(index)
        return ROWS[index].clone()


dataset, training = Queueing(), Training()
for _ in range(3):
    for batch in DataLoader(dataset, 8, shuffle=True):
        training.step(batch)
    print([BAD.get() for _ in range(BAD.qsize())])
training.finish()
