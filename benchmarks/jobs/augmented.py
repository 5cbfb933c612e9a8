"""A dataset whose examples draw from all three generators, so that a wrong resume shows in their bits."""

import random

import numpy as np
import torch


class Augmented:
    """`num_items` examples of an index and three random numbers."""

    def __init__(self, num_items):
        self.num_items = num_items

    def __len__(self):
        return self.num_items

    def __getitem__(self, item):
        return item, random.random(), np.random.rand(), torch.rand(1, dtype=torch.float64)[0]


def rows(batch):
    """Return a batch as a list of examples."""
    return list(zip(*(part.tolist() for part in batch), strict=True))
