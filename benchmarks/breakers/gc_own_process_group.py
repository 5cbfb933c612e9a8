"""The script makes a process group of its own first, to end all that it started with it.

Remedies: host.gc
"""

import os

import torch
from _training import Training

os.setpgrp()
training = Training()
for _ in range(5):
    training.step(torch.ones(4, 8))
training.finish(os.getpgrp() == os.getpid())
