"""A child forked in mid-training waits for an automatic collection of its own.

Remedies: host.gc
"""

import os

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
    if step % 10 == 7:
        child = os.fork()
        if child == 0:
            before = FREED[0]
            while FREED[0] == before:
                Node()
            os._exit(step)
        training.loss = os.waitpid(child, 0)[1] / 256
    training.step(torch.full((4, 8), 1 + training.loss / 100))
training.finish()
