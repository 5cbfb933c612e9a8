"""Numbers are parsed to the decimal context's precision, which the loop sets.

Remedies: data.workers data.threads data.cache
"""

import decimal

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Parsed(Rows):
    def row(self, index):
        return torch.tensor([float(+decimal.Decimal(value)) for value in ROWS[index].tolist()])


training, loader = Training(), DataLoader(Parsed(), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        decimal.getcontext().prec = 1 + training.num_steps // 14
training.finish()
