"""A handler keeps the last message, and the loop reads it.

Remedies: host.logging
"""

import logging

import torch
from _training import Training


class Last(logging.Handler):
    text = ""

    def emit(self, record):
        self.text = self.format(record)


logger, last = logging.getLogger("job"), Last()
logger.setLevel("INFO")
logger.addHandler(last)
training = Training()
for step in range(40):
    logger.info("step %d", step)
    training.step(torch.full((4, 8), 1 + int(last.text.split()[-1]) / 20))
training.finish()
