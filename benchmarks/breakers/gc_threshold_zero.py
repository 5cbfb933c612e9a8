"""Collection is switched off by a threshold of 0, and finalizers act when the script collects.

Remedies: host.gc
"""

import gc

import torch
from _training import Training

FREED = []


class Node:
    def __init__(self, number):
        self.number, self.self = number, self

    def __del__(self):
        FREED.append(self.number)


gc.set_threshold(0)
training = Training()
for step in range(40):
    Node(step)
    if step % 9 == 8:
        gc.collect()
    training.step(torch.full((4, 8), 1 + len(FREED) / 10))
training.finish(gc.get_threshold(), FREED[:9])
