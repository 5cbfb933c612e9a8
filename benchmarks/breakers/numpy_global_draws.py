"""Examples and the loop draw from numpy's global generator in turn.

Remedies: data.workers data.threads data.cache
"""

import numpy as np
import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Noisy(Rows):
    def row(self, index):
        return ROWS[index] + torch.as_tensor(np.random.standard_normal(8), dtype=torch.float32)


np.random.seed(0)
training = Training()
for batch in DataLoader(Noisy(), 8, shuffle=True):
    training.step(batch * np.random.uniform(0.5, 1.5))
training.finish()
