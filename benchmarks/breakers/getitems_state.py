"""`__getitems__` smooths over the batch before, which it keeps in a global.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import NUM_ROWS, ROWS, Training, wait
from torch.utils.data import DataLoader, Dataset

smooth = ROWS[:8].clone()


class Smoothed(Dataset):
    def __len__(self):
        return NUM_ROWS

    def __getitems__(self, indices):
        wait()
        smooth.lerp_(ROWS[torch.tensor(indices)], 0.5)
        return list(smooth.clone())

    def __getitem__(self, index):
        return self.__getitems__([index] * 8)[0]


training = Training()
for batch in DataLoader(Smoothed(), 8, shuffle=True):
    training.step(batch)
training.finish()
