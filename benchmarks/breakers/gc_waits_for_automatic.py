"""The loop makes garbage until an automatic collection has freed some: without one it never ends.

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
for step in range(30):
    before = FREED[0]
    while FREED[0] == before:
        Node()
    training.step(torch.full((4, 8), 1 + step / 10))
training.finish(gc.isenabled())
