"""The loop sets the locale by which examples are read.

Remedies: data.workers data.threads data.cache
"""

import locale

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Local(Rows):
    def row(self, index):
        return ROWS[index] * (1 + len(locale.setlocale(locale.LC_CTYPE)))


locale.setlocale(locale.LC_CTYPE, "C")


training, loader = Training(), DataLoader(Local(), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8" if training.num_steps // 7 % 2 else "C")
training.finish()
