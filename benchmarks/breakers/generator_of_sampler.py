"""The loop draws from the generator of a sampler with replacement, which draws all along.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import Rows, Training
from torch.utils.data import DataLoader, RandomSampler

generator = torch.Generator().manual_seed(5)
training, rows = Training(), Rows()
loader = DataLoader(rows, 8, sampler=RandomSampler(rows, True, 480, generator))
for batch in loader:
    training.step(batch + torch.randn(8, generator=generator) / 10)
training.finish()
