"""The loop changes the number of intra-op threads, and examples use it as a number.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

torch.set_num_threads(2)


class Counted(Rows):
    def row(self, index):
        return ROWS[index] * torch.get_num_threads()


training = Training()
for step, batch in enumerate(DataLoader(Counted(), 8, shuffle=True)):
    training.step(batch)
    torch.set_num_threads(1 + step % 3)
training.finish(torch.get_num_threads())
