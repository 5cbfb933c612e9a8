"""Level, formatter and filters of a handler change right after a message.

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
logger.addHandler(handler)
training = Training()
for step in range(40):
    handler.setLevel("INFO")
    handler.setFormatter(logging.Formatter(f"{step} %(message)s"))
    logger.propagate = False
    logger.info("step %d", step)
    logger.info("again %d", step)
    handler.setLevel("ERROR")
    handler.setFormatter(None)
    training.step(torch.full((4, 8), 1 + step / 40))
logging.shutdown()
training.finish(Path(path).read_text())
