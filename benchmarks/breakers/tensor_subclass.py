"""Examples are of a subclass of Tensor with an attribute that the loop reads.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Tagged(torch.Tensor):
    pass


class Tagging(Rows):
    def row(self, index):
        row = ROWS[index].clone().as_subclass(Tagged)
        row.tag = index
        return row


training = Training()
for _ in range(2):
    for rows in DataLoader(Tagging(), 8, shuffle=True, collate_fn=list):
        training.step(torch.stack([row.as_subclass(torch.Tensor) * (1 + row.tag / 100) for row in rows]))
training.finish()
