"""Rows are scaled by a database that is opened read-only, by a URI; the loop updates it in the last two epochs.

Remedies: data.workers data.threads data.cache
"""

import os
import sqlite3
import tempfile
from contextlib import closing

from _training import NUM_ROWS, ROWS, Rows, Training
from torch.utils.data import DataLoader

path = os.path.join(tempfile.mkdtemp(), "scales.db")


class Scaled(Rows):
    def row(self, index):
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as base:
            (scale,) = base.execute("select scale from scales where number = ?", (index,)).fetchone()
        return ROWS[index] * scale


own = sqlite3.connect(path)
own.execute("create table scales (number integer primary key, scale real)")
own.executemany("insert into scales values (?, 1)", [(number,) for number in range(NUM_ROWS)])
own.commit()
training = Training()
loader = DataLoader(Scaled(), 8, shuffle=True)
for epoch in range(3):
    for batch in loader:
        training.step(batch)
        if epoch:
            own.execute("update scales set scale = scale * 1.05 where number % 5 = ?", (training.num_steps % 5,))
            own.commit()
training.finish()
