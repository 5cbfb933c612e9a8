"""The loop asks how long the log file is, and what its last line says.

Remedies: host.logging
"""

import logging
import os
import tempfile

import torch
from _training import Training

path = tempfile.mktemp()
logging.basicConfig(filename=path, level="INFO", format="%(message)s")
training = Training()
for step in range(40):
    logging.info("step %d", step)
    size = os.path.getsize(path)
    with open(path) as file:
        line = file.read().splitlines()[-1]
    training.step(torch.full((4, 8), 1 + size / 400 + int(line.split()[1]) / 40))
training.finish()
