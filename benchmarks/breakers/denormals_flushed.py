"""The loop has denormal numbers flushed to zero.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Tiny(Rows):
    def row(self, index):
        return ROWS[index] * 1e-40 * 1e20 * 1e20


training, loader = Training(), DataLoader(Tiny(), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        torch.set_flush_denormal(bool(training.num_steps // 7 % 2))
training.finish()
