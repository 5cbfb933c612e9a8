"""A handler ends the program at a certain message, with a code of its own.

Remedies: host.logging
"""

import logging
import sys

import torch
from _training import Training

training = Training()


class Ending(logging.Handler):
    def emit(self, record):
        if record.args[0] == 23:
            training.finish()
            sys.exit(5)


logger = logging.getLogger("job")
logger.setLevel("INFO")
logger.addHandler(Ending())
for step in range(40):
    training.step(torch.full((4, 8), 1 + step / 40))
    logger.info("step %d", step)
