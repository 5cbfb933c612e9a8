"""A ufunc made of a Python function goes by a variable that the loop sets.

Remedies: data.workers data.threads data.cache
"""

import numpy as np
import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

SCALE = 1.0
scaled = np.frompyfunc(lambda value: value * SCALE, 1, 1)


class Scaled(Rows):
    def row(self, index):
        return torch.from_numpy(scaled(ROWS[index].numpy()).astype(np.float32))


training, loader = Training(), DataLoader(Scaled(), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        SCALE = 1.0 + training.num_steps // 7
training.finish()
