"""One row in forty draws from a bit generator of numpy that is a global of the module.

Remedies: data.workers data.threads data.cache
"""

import numpy as np
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

BITS = np.random.PCG64(3)


class Noisy(Rows):
    def row(self, index):
        return ROWS[index] + (BITS.random_raw() % 1000 / 1000 if index % 40 == 17 else 0)


dataset, training = Noisy(), Training()
for _ in range(3):
    for batch in DataLoader(dataset, 8, shuffle=True):
        training.step(batch)
training.finish(BITS.random_raw())
