"""A split reads rows of a large array through an index of its own; the loop changes a few of them after each step.

Remedies: data.workers data.threads data.cache
"""

import numpy as np
import torch
from _training import NUM_ROWS, WIDTH, Rows, Training
from torch.utils.data import DataLoader


class Split(Rows):
    def __init__(self):
        rng = np.random.default_rng(0)
        self.soft = rng.random((40_000, 8 * WIDTH), dtype=np.float32)
        self.index = rng.permutation(40_000)[:NUM_ROWS]

    def row(self, index):
        return torch.from_numpy(self.soft[self.index[index], :WIDTH].copy())


dataset, training, rng = Split(), Training(), np.random.default_rng(1)
for epoch in range(4):
    for batch in DataLoader(dataset, 8, shuffle=True):
        training.step(batch)
        if epoch >= 2:
            dataset.soft[dataset.index[rng.integers(0, NUM_ROWS, 2)]] *= 0.5
training.finish()
