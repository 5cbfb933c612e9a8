"""A handler raises when the loss is high, and the loop reacts.

Remedies: host.logging
"""

import logging

import torch
from _training import Training


class Diverged(Exception):  # noqa: N818 - as its author named it
    pass


class Watching(logging.Handler):
    def emit(self, record):
        if record.args[0] % 7 == 3:
            raise Diverged


logger = logging.getLogger("job")
logger.setLevel("INFO")
logger.addHandler(Watching())
training = Training()
for step in range(40):
    scale = 1.0
    try:
        logger.info("step %d", step)
    except Diverged:
        scale = 0.5
    training.step(torch.full((4, 8), scale + step / 40))
training.finish()
