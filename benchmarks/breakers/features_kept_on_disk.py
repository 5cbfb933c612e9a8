"""Features are kept on disk when an example is read first; some are there already, and each epoch is cut short.

Remedies: data.cache data.workers data.threads
"""

import tempfile
from pathlib import Path

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

FOLDER = Path(tempfile.mkdtemp())


class Features(Rows):
    def row(self, index):
        path = FOLDER / f"{index}.pt"
        if path.exists():
            return torch.load(path)
        feature = ROWS[index] * 2
        torch.save(feature, path)
        return feature


training, data = Training(), Features()
for index in range(30):
    data.row(index)
loader = DataLoader(data, 8, shuffle=True)
for epoch in range(3):
    for step, batch in enumerate(loader):
        training.step(batch)
        if step == 3:
            break
    print(epoch, sorted(int(p.stem) for p in FOLDER.iterdir()))
training.finish()
