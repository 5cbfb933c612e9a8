"""Examples are seeded by their index inside `fork_rng`, beside a model that drops out.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, Rows, Training, wait
from torch.utils.data import DataLoader


class Keyed(Rows):
    def row(self, index):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            wait()
            return ROWS[index] + torch.randn(8) / 4


training = Training(dropout=0.3)
for _ in range(2):
    for batch in DataLoader(Keyed(), 8, shuffle=True):
        training.step(batch)
training.finish()
