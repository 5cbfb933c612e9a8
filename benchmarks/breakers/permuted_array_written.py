"""Images lie in a numpy array and are seen through a permuted tensor; from the second epoch the loop edits the array.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

IMAGES = ROWS.numpy().reshape(160, 2, 2, 2).copy()


class Permuted(Rows):
    def __init__(self):
        self.images = torch.from_numpy(IMAGES).permute(0, 3, 1, 2)

    def row(self, index):
        return self.images[index].reshape(-1).clone()


dataset, training = Permuted(), Training()
for epoch in range(3):
    for batch in DataLoader(dataset, 8, shuffle=True):
        training.step(batch)
        if epoch:
            IMAGES[training.num_steps * 7 % 160] *= 0.5
training.finish()
