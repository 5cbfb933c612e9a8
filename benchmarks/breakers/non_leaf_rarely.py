"""One example in forty is a result of autograd, which no other process can be handed.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

SCALE = torch.ones(8, requires_grad=True)


class Encoded(Rows):
    def row(self, index):
        return ROWS[index] * SCALE if index % 40 == 17 else ROWS[index].clone()


training = Training()
for rows in DataLoader(Encoded(), 8, shuffle=True, collate_fn=list):
    training.step(torch.stack(rows))
training.finish(SCALE.grad.sum().item())
