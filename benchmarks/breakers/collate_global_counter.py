"""The collate function counts its batches in a global of the module.

Remedies: data.workers data.threads data.cache
"""

import itertools

import torch
from _training import Rows, Training
from torch.utils.data import DataLoader

numbers = itertools.count()


def numbered(rows):
    return torch.stack(rows) * (1 + next(numbers) // 8 / 4)


training = Training()
for _ in range(2):
    for batch in DataLoader(Rows(), 8, shuffle=True, collate_fn=numbered):
        training.step(batch)
training.finish()
