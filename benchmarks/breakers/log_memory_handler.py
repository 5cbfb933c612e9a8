"""The loop looks at the buffer of a MemoryHandler and at the length of a queue.

Remedies: host.logging
"""

import logging
import logging.handlers
import queue

import torch
from _training import Training

messages = queue.Queue()
memory = logging.handlers.MemoryHandler(7, target=logging.NullHandler())
logger = logging.getLogger("job")
logger.setLevel("INFO")
logger.addHandler(memory)
logger.addHandler(logging.handlers.QueueHandler(messages))
training = Training()
for step in range(40):
    logger.info("step %d", step)
    training.step(torch.full((4, 8), 1 + len(memory.buffer) + messages.qsize() / 40))
training.finish()
