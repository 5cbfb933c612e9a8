"""Examples ask whether gradients are recorded, which the loop switches per batch.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Aware(Rows):
    def row(self, index):
        return ROWS[index] * (1 if torch.is_grad_enabled() else 2)


training = Training()
batches = iter(DataLoader(Aware(), 8, shuffle=True))
for step in range(20):
    with torch.set_grad_enabled(step % 2 == 0):
        batch = next(batches)
    training.step(batch)
training.finish()
