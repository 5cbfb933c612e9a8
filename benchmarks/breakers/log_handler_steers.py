"""A handler lowers the learning rate when a message says that the loss is low.

Remedies: host.logging
"""

import logging

import torch
from _training import Training

training = Training()


class Steering(logging.Handler):
    def emit(self, record):
        training.optimizer.param_groups[0]["lr"] *= 0.9


logger = logging.getLogger("job")
logger.setLevel("INFO")
logger.addHandler(Steering())
for step in range(40):
    logger.info("step %d", step)
    training.step(torch.full((4, 8), 1 + step / 40))
training.finish()
