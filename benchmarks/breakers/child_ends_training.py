"""The script stops when a child of it ends: it has one helper, which should live as long as training does.

Remedies: data.workers data.threads data.cache
"""

import signal
import subprocess
import sys

from _training import Rows, Training
from torch.utils.data import DataLoader

ended = []


def child_ended(*_):
    ended.append(1)
    raise RuntimeError("the helper ended")


helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
signal.signal(signal.SIGCHLD, child_ended)
training, data = Training(), Rows()
for _ in range(4):
    for batch in DataLoader(data, 8, shuffle=True):
        training.step(batch)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
helper.kill()
helper.wait()
training.finish(len(ended))
