"""The generator hides in a RandomSampler inside a BatchSampler, and the loop draws from it.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import Rows, Training
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

generator = torch.Generator().manual_seed(5)
training, rows = Training(), Rows()
sampler = BatchSampler(RandomSampler(rows, True, 480, generator), 8, False)
for batch in DataLoader(rows, batch_sampler=sampler):
    training.step(batch + torch.randn(8, generator=generator) / 10)
training.finish()
