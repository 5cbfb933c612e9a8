"""The collate function draws only for batches that contain a certain row.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


def noisy(rows):
    batch = torch.stack(rows)
    return batch + torch.randn_like(batch) if any(torch.equal(row, ROWS[77]) for row in rows) else batch


training = Training()
for _ in range(3):
    for batch in DataLoader(Rows(), 8, shuffle=True, collate_fn=noisy):
        training.step(batch)
training.finish()
