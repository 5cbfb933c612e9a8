"""The loop seeds torch's generator with the number of each step; the order is drawn from it too.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import Rows, Training
from torch.utils.data import DataLoader, RandomSampler

training, rows = Training(dropout=0.2), Rows()
for epoch in range(2):
    for step, batch in enumerate(DataLoader(rows, 8, sampler=RandomSampler(rows, replacement=True))):
        training.step(batch)
        torch.manual_seed(1000 * epoch + step)
training.finish(torch.rand(()).item())
