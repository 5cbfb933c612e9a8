"""The script counts its child processes and reaps whichever has ended.

Remedies: data.workers data.threads data.cache power.filler
"""

import multiprocessing
import os
import subprocess
import sys

from _training import Rows, Training
from torch.utils.data import DataLoader

training = Training()
for _ in range(2):
    helper = subprocess.Popen([sys.executable, "-c", "pass"])
    for batch in DataLoader(Rows(), 8, shuffle=True):
        training.step(batch * (1 + len(multiprocessing.active_children())))
    number, code = os.wait()
    helper.returncode = code
    training.loss += number == helper.pid
training.finish()
