"""Examples depend on whether the script's own process and main thread read them.

Remedies: data.workers data.threads data.cache
"""

import os
import threading

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

HOME = os.getpid(), threading.get_ident()


class Home(Rows):
    def row(self, index):
        return ROWS[index] * (1 if (os.getpid(), threading.get_ident()) == HOME else 2)


training = Training()
for batch in DataLoader(Home(), 8, shuffle=True):
    training.step(batch)
training.finish()
