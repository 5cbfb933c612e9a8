"""The collate function mixes rows with weights that it draws from torch's generator.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import Rows, Training
from torch.utils.data import DataLoader


def mixup(rows):
    batch, weights = torch.stack(rows), torch.rand(len(rows), 1)
    return weights * batch + (1 - weights) * batch.flip(0)


training = Training(dropout=0.2)
for _ in range(2):
    for batch in DataLoader(Rows(), 8, shuffle=True, collate_fn=mixup):
        training.step(batch)
training.finish()
