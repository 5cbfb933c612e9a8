"""One row in forty is noted through a csv writer of the module; the script reads the file after each epoch.

Remedies: data.workers data.threads data.cache
"""

import csv
import tempfile
from pathlib import Path

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

PATH = Path(tempfile.mkdtemp()) / "bad.csv"
BAD = csv.writer(PATH.open("w", buffering=1))


class Noting(Rows):
    def row(self, index):
        if index % 40 == 17:
            BAD.writerow([index, "bad"])
        return ROWS[index].clone()


dataset, training = Noting(), Training()
for _ in range(3):
    for batch in DataLoader(dataset, 8, shuffle=True):
        training.step(batch)
    print(PATH.read_text().split())
training.finish()
