"""Examples are transposed or expanded, and the loop looks at strides.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Strided(Rows):
    def row(self, index):
        return ROWS[index].view(2, 4).t() if index % 2 else ROWS[index, :1].expand(4, 2)


training = Training()
for _ in range(2):
    for squares in DataLoader(Strided(), 8, shuffle=True, collate_fn=list):
        training.step(torch.stack([square.reshape(8) * (1 + square.stride()[0]) for square in squares]))
training.finish()
