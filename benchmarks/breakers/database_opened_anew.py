"""Each row asks a database of its own opening; the loop changes few labels in it, between epochs and within.

Remedies: data.workers data.threads data.cache
"""

import os
import sqlite3
import tempfile

from _training import NUM_ROWS, ROWS, Rows, Training
from torch.utils.data import DataLoader

path = os.path.join(tempfile.mkdtemp(), "labels.db")
base = sqlite3.connect(path)
base.execute("pragma journal_mode=wal")
base.execute("create table labels (number integer primary key, scale real)")
base.executemany("insert into labels values (?, 1)", [(number,) for number in range(NUM_ROWS)])
base.commit()


class Queried(Rows):
    def row(self, index):
        with sqlite3.connect(path) as own:
            (scale,) = own.execute("select scale from labels where number = ?", (index,)).fetchone()
        return ROWS[index] * scale


training = Training()
for epoch in range(4):
    for batch in DataLoader(Queried(), 8, shuffle=True):
        training.step(batch)
        if training.num_steps == 50:
            base.execute("update labels set scale = scale * 1.2 where number % 40 = 7")
            base.commit()
    if epoch == 1:
        base.execute("update labels set scale = scale * 1.2 where number % 40 = 11")
        base.commit()
training.finish()
