"""The weights of a sampler are edited between `iter(loader)` and the first batch.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import NUM_ROWS, Rows, Training
from torch.utils.data import DataLoader, WeightedRandomSampler

training, rows = Training(), Rows()
sampler = WeightedRandomSampler(torch.ones(NUM_ROWS), NUM_ROWS)
loader = DataLoader(rows, 8, sampler=sampler)
for epoch in range(2):
    batches = iter(loader)
    sampler.weights[: 40 * (epoch + 1)] = 0
    for batch in batches:
        training.step(batch)
        sampler.weights[int(training.loss * 1e6) % NUM_ROWS] += 1
training.finish()
