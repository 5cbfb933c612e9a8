"""One row in twenty is mixed with another, by a weight from a distribution of torch; the model drops values out.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Mixed(Rows):
    def row(self, index):
        if index % 20 != 17:
            return ROWS[index].clone()
        weight = torch.distributions.Beta(0.4, 0.4).rsample()
        return weight * ROWS[index] + (1 - weight) * ROWS[index - 1]


training = Training(dropout=0.3)
for _ in range(3):
    for batch in DataLoader(Mixed(), 8, shuffle=True):
        training.step(batch)
training.finish()
