"""An alarm breaks off batches that take too long, and the loop goes on with the next.

Remedies: data.workers data.threads data.cache
"""

import signal
import time

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Slow(Rows):
    def row(self, index):
        if index % 40 == 17:
            time.sleep(1.0)
        return ROWS[index].clone()


class LateError(Exception):
    pass


def late(*_):
    raise LateError


signal.signal(signal.SIGALRM, late)
training, loader = Training(), DataLoader(Slow(), 8, shuffle=True)
for _ in range(3):
    iterator, skipped = iter(loader), 0
    while True:
        signal.setitimer(signal.ITIMER_REAL, 0.4)
        try:
            batch = next(iterator)
        except LateError:
            skipped += 1
            continue
        except StopIteration:
            break
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        training.step(batch)
    print("skipped", skipped)
training.finish()
