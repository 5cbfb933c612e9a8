"""The loop appends to the dataset while it is read; the next epoch is longer.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, Training, wait
from torch.utils.data import DataLoader, Dataset


class Growing(Dataset):
    def __init__(self):
        self.rows = list(ROWS[:64].clone())

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        wait()
        return self.rows[index]


training, growing = Training(), Growing()
for _ in range(3):
    for batch in DataLoader(growing, 8, shuffle=True):
        training.step(batch)
        growing.rows.append(torch.full((8,), training.loss))
        growing.rows[0] = growing.rows[-1]
training.finish()
