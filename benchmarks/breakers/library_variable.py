"""Examples go by a number that the script keeps in torch's own module, and sets as it goes.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

torch.progress = 0.0


class Scaled(Rows):
    def row(self, index):
        return ROWS[index] * (1 + torch.progress)


dataset, training = Scaled(), Training()
for _ in range(3):
    for batch in DataLoader(dataset, 8, shuffle=True):
        training.step(batch)
        if training.num_steps % 5 == 0:
            torch.progress = training.num_steps / 100
training.finish()
