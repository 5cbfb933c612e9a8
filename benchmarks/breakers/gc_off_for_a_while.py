"""Each step switches collection off, and on again if it was on; finalizers count in between.

Remedies: host.gc
"""

import gc

import torch
from _training import Training

FREED = [0]


class Node:
    def __init__(self):
        self.self = self

    def __del__(self):
        FREED[0] += 1


training = Training()
for _ in range(30):
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    freed = FREED[0]
    Node()
    training.step(torch.full((4, 8), 1.0 + (FREED[0] - freed) + was_on))
    if was_on:
        gc.enable()
training.finish(gc.isenabled())
