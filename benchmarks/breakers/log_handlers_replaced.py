"""The list of handlers of a logger is replaced by assignment right after a message.

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
        time.sleep(1e-3)
        super().emit(record)


path = tempfile.mktemp()
handler, logger = Slow(path), logging.getLogger("job")
logger.setLevel("INFO")
training = Training()
for step in range(40):
    logger.handlers = [handler]
    logger.info("step %d", step)
    logger.info("again %d", step)
    logger.handlers = [logging.NullHandler()]
    training.step(torch.full((4, 8), 1 + step / 40))
logging.shutdown()
training.finish(len(Path(path).read_text()))
