"""The loop draws from the generator that the loader was given.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import Rows, Training
from torch.utils.data import DataLoader

generator = torch.Generator().manual_seed(5)
training = Training()
loader = DataLoader(Rows(), 8, shuffle=True, generator=generator)
for _ in range(3):
    for batch in loader:
        training.step(batch + torch.randn(8, generator=generator) / 10)
training.finish()
