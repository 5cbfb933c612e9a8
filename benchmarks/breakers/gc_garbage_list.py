"""The script keeps garbage by DEBUG_SAVEALL and empties the list itself.

Remedies: host.gc
"""

import gc

import torch
from _training import Training


class Node:
    def __init__(self):
        self.self = self


training = Training()
gc.collect()
gc.set_debug(gc.DEBUG_SAVEALL)
for step in range(30):
    for _ in range(step % 4):
        Node()
    gc.collect()
    found = sum(type(thing) is Node for thing in gc.garbage)
    gc.garbage.clear()
    training.step(torch.full((4, 8), 1.0 + found))
gc.set_debug(0)
training.finish()
