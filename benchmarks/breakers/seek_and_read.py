"""Examples seek and read in one open file.

Remedies: data.workers data.threads data.cache
"""

import tempfile

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - open as long as the script runs
file.write(ROWS.numpy().tobytes())


class Filed(Rows):
    def row(self, index):
        file.seek(index * 32)
        return torch.frombuffer(bytearray(file.read(32)), dtype=torch.float32)


training = Training()
for _ in range(2):
    for batch in DataLoader(Filed(), 8, shuffle=True):
        training.step(batch)
training.finish()
