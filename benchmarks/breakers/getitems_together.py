"""`__getitems__` centres the rows of a batch: an example depends on what is read with it.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import NUM_ROWS, ROWS, Training, wait
from torch.utils.data import DataLoader, Dataset


class Centred(Dataset):
    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        return ROWS[index].clone()

    def __getitems__(self, indices):
        wait()
        rows = ROWS[torch.tensor(indices)]
        return list(rows - rows.mean(0))


training = Training()
for _ in range(2):
    for batch in DataLoader(Centred(), 8, shuffle=True):
        training.step(batch)
training.finish()
