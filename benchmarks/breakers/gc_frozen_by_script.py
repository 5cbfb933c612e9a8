"""The script freezes and unfreezes objects itself, and counts what it freed since.

Remedies: host.gc
"""

import gc
import weakref

import torch
from _training import Training


class Node:
    def __init__(self):
        self.self = self


training = Training()
gc.collect()
gc.freeze()
for step in range(30):
    node = weakref.ref(Node())
    if step == 15:
        gc.unfreeze()
    gc.collect()
    training.step(torch.full((4, 8), (1.0 if node() is None else 2.0) + (gc.get_freeze_count() > 0)))
training.finish(gc.get_freeze_count() > 0)
