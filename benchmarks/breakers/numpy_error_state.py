"""Examples divide by zero under numpy's error state, which each thread has of its own.

Remedies: data.workers data.threads data.cache
"""

import numpy as np
import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

np.seterr(all="raise")


class Ratios(Rows):
    def row(self, index):
        row = ROWS[index].numpy().copy()
        row[0] = 0 if index % 40 == 17 else 1
        try:
            return torch.as_tensor(row / row[0])
        except FloatingPointError:
            return torch.zeros(8)


training = Training()
for batch in DataLoader(Ratios(), 8, shuffle=True):
    training.step(batch.nan_to_num(5, 5, 5))
training.finish()
