"""A thread of the script's own reads the loader and hands batches over a queue.

Remedies: data.workers data.threads data.cache
"""

import queue
import threading

from _training import Rows, Training
from torch.utils.data import DataLoader

ready = queue.Queue(2)
training = Training()
loader = DataLoader(Rows(), 8, shuffle=True)


def read():
    for _ in range(2):
        for batch in loader:
            ready.put(batch)
    ready.put(None)


threading.Thread(target=read).start()
while (batch := ready.get()) is not None:
    training.step(batch)
training.finish()
