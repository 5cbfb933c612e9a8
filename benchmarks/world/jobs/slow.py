"""Examples whose reading takes a known time, for the quick-start scripts beside this file."""

import time

import torch
from torch import nn
from torch.utils.data import Dataset

WIDTH = 16
BATCH = 16


class SlowExamples(Dataset):
    """`batches` batches of 16 pairs (x [16], y [1]); each example sleeps 1/16 of `batch_s`."""

    def __init__(self, batches, batch_s, seed=1):
        self.batch_s = batch_s
        draws = torch.Generator().manual_seed(seed)
        self.x = torch.randn(batches * BATCH, WIDTH, generator=draws)
        self.y = torch.randn(batches * BATCH, 1, generator=draws)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        time.sleep(self.batch_s / BATCH)
        return self.x[index], self.y[index]


def train_and_validation():
    """Return the two data sets: 20 batches of 0.01 s, 15 batches of 0.03 s."""
    return SlowExamples(20, 0.01), SlowExamples(15, 0.03, seed=2)


def network():
    """Return a small network."""
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))
