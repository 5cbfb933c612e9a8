"""Log lines and printed lines share stdout, where their order shows.

Remedies: host.logging
"""

import logging
import sys

import torch
from _training import Training

logging.basicConfig(stream=sys.stdout, level="INFO", format="%(message)s")
training = Training()
for step in range(40):
    print("begin", step, flush=True)
    logging.info("step %d", step)
    print("loss", repr(training.step(torch.full((4, 8), 1 + step / 20))), flush=True)
training.finish()
