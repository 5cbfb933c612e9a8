"""Examples pass through the model that is being trained, as in self-training.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

training = Training()


class Labelled(Rows):
    def row(self, index):
        with torch.no_grad():
            return ROWS[index] + training.model(ROWS[index]).mean()


for _ in range(2):
    for batch in DataLoader(Labelled(), 8, shuffle=True):
        training.step(batch)
training.finish()
