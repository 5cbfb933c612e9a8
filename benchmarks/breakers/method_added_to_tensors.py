"""A method that the script adds to tensors goes by a variable.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

SCALE = 1.0
torch.Tensor.scaled = lambda row: row * SCALE


class Scaled(Rows):
    def row(self, index):
        return ROWS[index].scaled()


training, loader = Training(), DataLoader(Scaled(), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        SCALE = 1.0 + training.num_steps // 7
training.finish()
