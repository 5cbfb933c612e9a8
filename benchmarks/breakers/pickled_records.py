"""Examples are pickled objects whose class goes by an attribute that the loop sets.

Remedies: data.workers data.threads data.cache
"""

import pickle

from _training import NUM_ROWS, ROWS, Rows, Training
from torch.utils.data import DataLoader


class Example:
    scale = 1.0

    def __init__(self, place):
        self.place = place

    def row(self):
        return ROWS[self.place] * self.scale


class Blobs(Rows):
    def __init__(self, blobs):
        self.blobs = blobs

    def row(self, index):
        return pickle.loads(self.blobs[index]).row()


training, loader = Training(), DataLoader(Blobs([pickle.dumps(Example(i)) for i in range(NUM_ROWS)]), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        Example.scale = 1.0 + training.num_steps // 7
training.finish()
