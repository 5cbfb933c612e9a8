"""The script sets and reads thresholds, the freeze count and whether collection is on.

Remedies: host.gc
"""

import gc

import torch
from _training import Training

training, seen = Training(), []
for step in range(30):
    if step % 10 == 4:
        gc.set_threshold(500 + step, 11, 12)
    seen.append((gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()))
    training.step(torch.full((4, 8), 1 + gc.get_freeze_count() + gc.get_threshold()[0] / 1000))
training.finish(seen[0], seen[-1])
