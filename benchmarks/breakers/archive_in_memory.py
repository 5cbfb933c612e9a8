"""Examples seek and read in one BytesIO; now and then the thread is interrupted between the two.

Remedies: data.threads data.workers data.cache
"""

import io
import time

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Archive(Rows):
    def __init__(self):
        self.file = io.BytesIO(ROWS.numpy().tobytes())

    def row(self, index):
        self.file.seek(index * 32)
        if index > 3:
            time.sleep(0.0005)
        return torch.frombuffer(bytearray(self.file.read(32)), dtype=torch.float32)


training, data = Training(), Archive()
for _ in range(2):
    for batch in DataLoader(data, 8, shuffle=True):
        training.step(batch)
training.finish()
