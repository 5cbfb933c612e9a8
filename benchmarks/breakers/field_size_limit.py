"""The loop sets the longest field that the reader of CSV takes.

Remedies: data.workers data.threads data.cache
"""

import csv

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Lines(Rows):
    def row(self, index):
        line = ",".join(map(repr, ROWS[index].tolist()))
        try:
            return torch.tensor([*map(float, next(csv.reader([line])))])
        except csv.Error:
            return torch.zeros(8)


csv.field_size_limit(100)


training, loader = Training(), DataLoader(Lines(), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        csv.field_size_limit(19 if training.num_steps // 7 % 2 else 100)
training.finish()
