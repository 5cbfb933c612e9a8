"""One row in forty is a sentinel of the module, which the loop leaves out by its identity.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

SKIP = object()


class Skipping(Rows):
    def row(self, index):
        return SKIP if index % 40 == 17 else ROWS[index].clone()


dataset, training = Skipping(), Training()
for _ in range(3):
    for rows in DataLoader(dataset, 8, shuffle=True, collate_fn=list):
        training.step(torch.stack([row for row in rows if row is not SKIP]))
training.finish()
