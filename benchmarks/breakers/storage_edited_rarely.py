"""The loop edits one entry in a thousand of a numpy array that the dataset reads from.

Remedies: data.workers data.threads data.cache
"""

import numpy as np
from _training import NUM_ROWS, ROWS, Rows, Training
from torch.utils.data import DataLoader

STORAGE = np.repeat(ROWS.numpy()[:, None], 256, axis=1).copy()


class Stored(Rows):
    storage = STORAGE

    def row(self, index):
        return self.storage[index, 7].copy()


training = Training()
for _ in range(2):
    for step, batch in enumerate(DataLoader(Stored(), 8, shuffle=True)):
        training.step(batch)
        STORAGE[(step * 13) % NUM_ROWS, 7] *= 0.5
training.finish()
