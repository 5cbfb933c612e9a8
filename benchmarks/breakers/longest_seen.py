"""A class attribute holds the longest text met so far; few rows raise it, and the loop scales by it.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import NUM_ROWS, ROWS, WIDTH, Rows, Training
from torch.utils.data import DataLoader

LENGTHS = torch.randint(1, 50, (NUM_ROWS,), generator=torch.Generator().manual_seed(3)).tolist()
LENGTHS[0], LENGTHS[1], LENGTHS[-1] = 49, 2, 1


class Texts(Rows):
    longest = 0

    def row(self, index):
        if LENGTHS[index] > Texts.longest:
            Texts.longest = LENGTHS[index]
        return ROWS[index] * (LENGTHS[index] / WIDTH)


dataset, training = Texts(), Training()
for _ in range(3):
    for batch in DataLoader(dataset, 8, shuffle=True):
        training.step(batch / Texts.longest)
training.finish(Texts.longest)
