"""The script gives itself 400 MB more of addresses than it has, and takes 240 MB of them at each step.

Remedies: data.workers data.threads data.cache
"""

import resource
from pathlib import Path

import torch
from _training import Rows, Training
from torch.utils.data import DataLoader

training = Training()
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (400 << 20), resource.RLIM_INFINITY))
for _ in range(3):
    for batch in DataLoader(Rows(), 8, shuffle=True):
        room = torch.zeros(60 << 20)
        training.step(batch)
        del room
training.finish()
