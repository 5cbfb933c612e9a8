"""Two loaders that are read in turn share one generator.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import Rows, Training
from torch.utils.data import DataLoader

generator = torch.Generator().manual_seed(5)
first = DataLoader(Rows(), 8, shuffle=True, generator=generator)
second = DataLoader(Rows(), 16, shuffle=True, generator=generator)
training = Training()
for _ in range(2):
    ahead, behind = iter(first), iter(second)
    for _ in range(8):
        training.step(next(ahead))
        training.step(next(behind))
training.finish(torch.rand((), generator=generator).item())
