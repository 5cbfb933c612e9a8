"""Each row has a file of its own that native code opens; the loop writes some of them anew.

Remedies: data.workers data.threads data.cache
"""

import tempfile

import torch
from _training import NUM_ROWS, ROWS, WIDTH, Rows, Training
from torch.utils.data import DataLoader

folder = tempfile.mkdtemp()


def write(number, row):
    row.numpy().tofile(f"{folder}/{number}")


class Features(Rows):
    def row(self, index):
        return torch.from_file(f"{folder}/{index}", size=WIDTH).clone()


for number in range(NUM_ROWS):
    write(number, ROWS[number])
training = Training()
loader = DataLoader(Features(), 8, shuffle=True)
for _ in range(3):
    for batch in loader:
        loss = training.step(batch)
        number = training.num_steps * 7 % NUM_ROWS
        write(number, ROWS[number] * (1 + loss))
training.finish()
