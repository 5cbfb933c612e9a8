"""After `gc.collect()` the loop asks whether an old cycle is gone; it was made before the first step.

Remedies: host.gc
"""

import gc
import weakref

import torch
from _training import Training


class Node:
    pass


def cycle():
    node = Node()
    node.self = node
    return node


training, node = Training(), cycle()
alive = weakref.ref(node)
for step in range(30):
    if step == 12:
        del node
    gc.collect()
    training.step(torch.full((4, 8), 1.0 if alive() is None else 2.0))
training.finish()
