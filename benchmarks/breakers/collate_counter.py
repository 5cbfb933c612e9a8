"""The collate function is an object that counts its batches.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import Rows, Training
from torch.utils.data import DataLoader


class Collate:
    num_batches = 0

    def __call__(self, rows):
        self.num_batches += 1
        return torch.stack(rows) * (1 + self.num_batches / 10)


training = Training()
for batch in DataLoader(Rows(), 8, shuffle=True, collate_fn=Collate()):
    training.step(batch)
training.finish()
