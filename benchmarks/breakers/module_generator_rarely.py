"""Every seventh example draws from a numpy generator that is a global of the module.

Remedies: data.workers data.threads data.cache
"""

import numpy as np
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

GENERATOR = np.random.default_rng(3)


class Noisy(Rows):
    def row(self, index):
        return ROWS[index] * (GENERATOR.uniform() if index % 7 == 3 else 1)


training = Training()
for _ in range(2):
    for batch in DataLoader(Noisy(), 8, shuffle=True):
        training.step(batch)
training.finish(GENERATOR.uniform())
