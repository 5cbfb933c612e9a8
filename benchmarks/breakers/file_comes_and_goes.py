"""Examples go by whether a file is there; the loop makes and removes it.

Remedies: data.workers data.threads data.cache
"""

import os
import tempfile

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

FLAG = os.path.join(tempfile.mkdtemp(), "flag")


class Flagged(Rows):
    def row(self, index):
        return ROWS[index] * (2 if os.path.exists(FLAG) else 1)


training, loader = Training(), DataLoader(Flagged(), 8, shuffle=True)
for _ in range(4):
    for step, batch in enumerate(loader):
        training.step(batch)
        if step % 3 == 0:
            os.close(os.open(FLAG, os.O_CREAT | os.O_WRONLY))
        elif os.path.exists(FLAG):
            os.unlink(FLAG)
training.finish()
