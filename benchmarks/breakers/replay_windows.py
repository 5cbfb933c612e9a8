"""A large replay buffer is read as windows of four frames, and written in place by the loop.

Remedies: data.workers data.threads data.cache
"""

import numpy as np
import torch
from _training import Rows, Training
from torch.utils.data import DataLoader

FRAMES = np.zeros((1_000_000, 64), np.float32)
FRAMES[:400] = np.random.default_rng(0).standard_normal((400, 64))


class Windows(Rows):
    def __init__(self, frames):
        self.frames = frames

    def row(self, index):
        return torch.from_numpy(self.frames[index + 1 : index + 5, :8].mean(axis=0))


training, loader = Training(), DataLoader(Windows(FRAMES), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        FRAMES[1 + 7 * training.num_steps % 160] += training.loss
training.finish()
