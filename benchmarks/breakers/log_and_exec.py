"""The program replaces itself after its last message, and reads the file then.

Remedies: host.logging
"""

import logging
import os
import sys
import time
from pathlib import Path

import torch
from _training import Training

path = Path(os.environ.setdefault("LOG_OF_BREAKER", f"/tmp/breaker-{os.getpid()}.log"))


class Slow(logging.FileHandler):
    def emit(self, record):
        time.sleep(1e-3)
        super().emit(record)


training = Training()
logging.basicConfig(level="INFO", format="%(message)s", handlers=[Slow(path)])
for step in range(30):
    training.step(torch.full((4, 8), 1 + step / 40))
    if len(sys.argv) == 1:
        logging.info("step %d", step)
if len(sys.argv) == 1:
    os.execv(sys.executable, [sys.executable, __file__, "again"])
text = path.read_text()
path.unlink()
training.finish(text)
