"""Processes and threads of the script's own, and code that asks in which one it is.

Remedies: data.workers data.threads data.cache
"""

import multiprocessing
import os
import queue
import subprocess
import sys
import threading

from _training import ROWS, Rows, Training, chosen, train
from torch.utils.data import DataLoader, get_worker_info


def children_counted():
    """The script counts its child processes and reaps whichever has ended.

    Remedies: data.workers data.threads data.cache power.filler
    """
    training = Training()
    for _ in range(2):
        helper = subprocess.Popen([sys.executable, "-c", "pass"])
        for batch in DataLoader(Rows(), 8, shuffle=True):
            training.step(batch * (1 + len(multiprocessing.active_children())))
        number, code = os.wait()
        helper.returncode = code
        training.loss += number == helper.pid
    training.finish()


def fork_in_epoch():
    """The script forks in mid-epoch; the child reads on from the same iterator and exits."""
    training = Training()
    for _ in range(2):
        batches = iter(DataLoader(Rows(), 8, shuffle=True))
        for step, batch in enumerate(batches):
            training.step(batch)
            if step == 4:
                child = os.fork()
                if child == 0:
                    for rest in batches:
                        training.step(rest)
                    os._exit(int(abs(training.loss) * 1e4) % 200)
                training.loss += os.waitpid(child, 0)[1]
                training.step(batch * (1 + os.waitstatus_to_exitcode(int(training.loss))) / 100)
    training.finish()


def loader_in_thread():
    """A thread of the script's own reads the loader and hands batches over a queue."""
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


class Aware(Rows):
    def row(self, index):
        return ROWS[index] * (1 if get_worker_info() is None else 2)


def worker_info():
    """Examples look whether a loader worker reads them."""
    train(DataLoader(Aware(), 8, shuffle=True))


if __name__ == "__main__":
    chosen(globals())
