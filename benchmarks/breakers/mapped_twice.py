"""A file in memory is mapped for reading by the dataset, and for writing by the loop: its times do not move.

Remedies: data.workers data.threads data.cache
"""

import os
import tempfile

import numpy as np
import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

path = tempfile.mktemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
ROWS.numpy().tofile(path)


class Mapped(Rows):
    def __init__(self):
        self.rows = np.memmap(path, "float32", "r", shape=(160, 8))

    def row(self, index):
        return torch.from_numpy(np.array(self.rows[index]))


training, mapped, written = Training(), Mapped(), np.memmap(path, "float32", "r+", shape=(160, 8))
for _ in range(3):
    for batch in DataLoader(mapped, 8, shuffle=True):
        training.step(batch)
        if training.num_steps % 25 == 0:
            written[40:100] *= 1.1
os.remove(path)
training.finish()
