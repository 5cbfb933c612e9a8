"""One row in forty carries a weight as an attribute of its tensor, which the loop reads.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Weighted(Rows):
    def row(self, index):
        row = ROWS[index].clone()
        if index % 40 == 17:
            row.weight = 2.5
        return row


dataset, training = Weighted(), Training()
for _ in range(3):
    for rows in DataLoader(dataset, 8, shuffle=True, collate_fn=list):
        training.step(torch.stack([row * getattr(row, "weight", 1.0) for row in rows]))
training.finish()
