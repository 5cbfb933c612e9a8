"""At the end of each epoch the script waits for all threads that `threading` knows, and for their number to fall.

Remedies: data.workers data.threads data.cache host.gc host.logging
"""

import threading
import time

from _training import Rows, Training
from torch.utils.data import DataLoader

training = Training()
written = []
for _ in range(2):
    for batch in DataLoader(Rows(), 8, shuffle=True):
        training.step(batch)
        threading.Thread(target=lambda: (time.sleep(0.01), written.append(1))).start()
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join()
    while threading.active_count() > 1:
        time.sleep(0.01)
    training.loss += len(written)
training.finish()
