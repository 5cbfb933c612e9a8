"""The loop tells repeated examples by the identity of the objects.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, Training, wait
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler


class Objects(Dataset):
    def __init__(self):
        self.rows = list(ROWS)

    def __len__(self):
        return 160

    def __getitem__(self, index):
        wait()
        return self.rows[index]


training, seen = Training(), {}
sampler = WeightedRandomSampler(torch.ones(160), 160)
for _ in range(2):
    for rows in DataLoader(Objects(), 8, sampler=sampler, collate_fn=list):
        weights = [1 + seen.setdefault(id(row), [row, 0])[1] for row in rows]
        for row in rows:
            seen[id(row)][1] += 1
        training.step(torch.stack([row / weight for row, weight in zip(rows, weights, strict=True)]))
training.finish()
