"""The loop counts its own objects among `gc.get_objects()` and looks at referrers.

Remedies: host.gc
"""

import gc

import torch
from _training import Training


class Node:
    def __init__(self):
        self.list = []


nodes = [Node() for _ in range(10)]
training = Training()
for _ in range(30):
    nodes.append(Node())
    found = sum(type(thing) is Node for thing in gc.get_objects())
    holders = sum(holder is nodes for holder in gc.get_referrers(nodes[0]))
    training.step(torch.full((4, 8), found / 10 + holders))
training.finish()
