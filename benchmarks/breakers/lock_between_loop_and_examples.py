"""Examples wait for a lock that the loop holds while it trains.

Remedies: data.workers data.threads data.cache
"""

import threading

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

LOCK = threading.Lock()


class Locked(Rows):
    def row(self, index):
        with LOCK:
            return ROWS[index].clone()


training = Training()
for _ in range(2):
    batches = iter(DataLoader(Locked(), 8, shuffle=True))
    LOCK.acquire()
    for _ in range(20):
        LOCK.release()
        batch = next(batches)
        LOCK.acquire()
        training.step(batch)
    LOCK.release()
training.finish()
