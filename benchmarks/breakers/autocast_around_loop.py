"""Examples are multiplied under the autocast that the loop has switched on.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

MIX = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))


class Mixed(Rows):
    def row(self, index):
        return ROWS[index] @ MIX


training = Training()
with torch.autocast("cpu", torch.bfloat16):
    for batch in DataLoader(Mixed(), 8, shuffle=True):
        training.step(batch.float())
training.finish()
