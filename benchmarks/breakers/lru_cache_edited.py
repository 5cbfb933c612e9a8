"""A memo of the dataset keeps rows that the loop edits in place after delivery.

Remedies: data.workers data.threads data.cache
"""

from functools import cache

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


@cache
def load(index):
    return ROWS[index].clone()


class Memo(Rows):
    def row(self, index):
        return load(index)


training = Training()
for _ in range(3):
    for rows in DataLoader(Memo(), 8, shuffle=True, collate_fn=list):
        training.step(torch.stack(rows))
        rows[0].zero_()
training.finish()
