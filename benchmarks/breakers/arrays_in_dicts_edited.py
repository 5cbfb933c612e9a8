"""A list of 400 dicts with an array each; the loop edits some of the arrays in place.

Remedies: data.cache data.workers data.threads
"""

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Records(Rows):
    def __init__(self):
        self.records = [{"x": ROWS[k % 160].numpy().copy(), "id": k} for k in range(400)]

    def __len__(self):
        return 400

    def row(self, index):
        return torch.from_numpy(self.records[index]["x"].copy())


training, data = Training(), Records()
loader = DataLoader(data, 8, shuffle=True)
for _ in range(2):
    for step, batch in enumerate(loader):
        training.step(batch)
        data.records[step * 6 + 1]["x"] *= 0.5
training.finish()
