"""A filter of the handler counts messages and changes them; the loop uses the count.

Remedies: host.logging
"""

import logging
import tempfile
from pathlib import Path

import torch
from _training import Training

path = tempfile.mktemp()


class Counting(logging.Filter):
    count = 0

    def filter(self, record):
        self.count += 1
        record.msg = f"{self.count} {record.msg}"
        return True


counting, handler = Counting(), logging.FileHandler(path)
handler.addFilter(counting)
logger = logging.getLogger("job")
logger.setLevel("INFO")
logger.addHandler(handler)
training = Training()
for step in range(40):
    logger.info("step %d", step)
    training.step(torch.full((4, 8), 1 + counting.count / 20))
logging.shutdown()
training.finish(Path(path).read_text())
