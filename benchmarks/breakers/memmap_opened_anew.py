"""Each reading maps a file anew, read-only; the loop writes through a mapping of its own, which leaves no time behind.

Remedies: data.workers data.threads data.cache
"""

import os
import tempfile

import numpy as np
from _training import NUM_ROWS, ROWS, Rows, Training
from torch.utils.data import DataLoader

path = os.path.join(tempfile.mkdtemp(), "weights")


class Weighted(Rows):
    def row(self, index):
        return ROWS[index] * float(np.memmap(path, "float32", "r")[index])


weights = np.memmap(path, "float32", "w+", shape=(NUM_ROWS,))
weights[:] = 1
training = Training()
loader = DataLoader(Weighted(), 8, shuffle=True)
for _ in range(3):
    for batch in loader:
        weights[training.num_steps * 7 % NUM_ROWS] += training.step(batch)
training.finish()
