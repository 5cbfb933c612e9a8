"""Rows are read at their place in a file that was opened once; from the second epoch on the loop edits records there.

Remedies: data.workers data.threads data.cache
"""

import os
import tempfile

import torch
from _training import NUM_ROWS, ROWS, Rows, Training
from torch.utils.data import DataLoader

path = os.path.join(tempfile.mkdtemp(), "records")
ROWS.numpy().tofile(path)
descriptor = os.open(path, os.O_RDONLY)


class Records(Rows):
    def row(self, index):
        return torch.frombuffer(bytearray(os.pread(descriptor, 32, 32 * index)), dtype=torch.float32)


training = Training()
loader = DataLoader(Records(), 8, shuffle=True)
for epoch in range(3):
    for batch in loader:
        loss = training.step(batch)
        number = training.num_steps * 7 % NUM_ROWS
        with open(path, "r+b") as file:
            file.seek(32 * number)
            file.write((ROWS[number] * (1 + epoch * loss)).numpy().tobytes())
training.finish()
