"""The collate function appends the last row of the batch before.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

carry = [ROWS[0]]


def carried(rows):
    batch = torch.stack([carry[-1], *rows])
    carry.append(rows[-1])
    return batch


training = Training()
for batch in DataLoader(Rows(), 8, shuffle=True, collate_fn=carried):
    training.step(batch)
training.finish()
