"""The loop changes torch's default type in mid-epoch; examples are made with it.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Made(Rows):
    def row(self, index):
        return torch.tensor(ROWS[index].tolist()) / 3


training = Training()
for step, batch in enumerate(DataLoader(Made(), 8, shuffle=True)):
    training.step(batch.float())
    torch.set_default_dtype(torch.float64 if step % 4 == 2 else torch.float32)
training.finish()
