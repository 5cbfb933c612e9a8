"""One example in forty sets an alarm, which only the main thread may.

Remedies: data.workers data.threads data.cache
"""

import signal

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Guarded(Rows):
    def row(self, index):
        if index % 40 == 17:
            before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.signal(signal.SIGALRM, before)
        return ROWS[index].clone()


training = Training()
for batch in DataLoader(Guarded(), 8, shuffle=True):
    training.step(batch)
training.finish()
