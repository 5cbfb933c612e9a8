"""Examples come from an sqlite connection, which belongs to one thread, and the loop updates rows.

Remedies: data.workers data.threads data.cache
"""

import sqlite3

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

base = sqlite3.connect(":memory:")
base.execute("create table rows (number integer primary key, scale real)")
base.executemany("insert into rows values (?, 1)", [(number,) for number in range(160)])


class Queried(Rows):
    def row(self, index):
        (scale,) = base.execute("select scale from rows where number = ?", (index,)).fetchone()
        return ROWS[index] * torch.tensor(scale)


training = Training()
for _ in range(2):
    for step, batch in enumerate(DataLoader(Queried(), 8, shuffle=True)):
        training.step(batch)
        base.execute("update rows set scale = scale * 1.5 where number % 20 = ?", (step,))
training.finish()
