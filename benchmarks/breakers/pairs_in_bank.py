"""Pairs of rows of a large memory bank, which the loop refreshes in place.

Remedies: data.workers data.threads data.cache
"""

import numpy as np
import torch
from _training import NUM_ROWS, Rows, Training
from torch.utils.data import DataLoader

rng = np.random.default_rng(0)
BANK = np.zeros((1_000_000, 64), np.float32)
BANK[:400] = rng.standard_normal((400, 64))
PAIRS = rng.integers(1, 100, (NUM_ROWS, 2))


class Pairs(Rows):
    def __init__(self, bank, pairs):
        self.bank, self.pairs = bank, pairs

    def row(self, index):
        one, other = self.pairs[index]
        return torch.from_numpy((self.bank[one] - self.bank[other])[:8])


training, loader = Training(), DataLoader(Pairs(BANK, PAIRS), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        BANK[1 + 7 * training.num_steps % 100] *= 1 + training.loss
training.finish()
