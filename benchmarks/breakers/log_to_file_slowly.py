"""Nothing is wrong with this one: a slow file handler, read when all is done.

Remedies: host.logging
"""

import logging
import tempfile
import time
from pathlib import Path

import torch
from _training import Training


class Slow(logging.FileHandler):
    def emit(self, record):
        time.sleep(3e-3)
        super().emit(record)


path = tempfile.mktemp()
logging.basicConfig(level="INFO", format="%(message)s", handlers=[Slow(path)])
training = Training()
for step in range(60):
    logging.info("step %d loss %r", step, training.loss)
    training.step(torch.full((4, 8), 1 + step / 40))
logging.shutdown()
training.finish(len(Path(path).read_text()))
