"""A handler samples messages by the global generator, from which the loop draws too.

Remedies: host.logging
"""

import logging
import random

import torch
from _training import Training


class Sampling(logging.Handler):
    def emit(self, record):
        if random.random() < 0.5:
            self.format(record)


random.seed(0)
logger = logging.getLogger("job")
logger.setLevel("INFO")
logger.addHandler(Sampling())
training = Training()
for step in range(60):
    logger.info("step %d", step)
    training.step(torch.full((4, 8), random.random()))
training.finish()
