"""Windows over a list of 5000 arrays, of which the loop edits some in place.

Remedies: data.workers data.threads data.cache
"""

import numpy as np
import torch
from _training import Rows, Training
from torch.utils.data import DataLoader


class Windows(Rows):
    def __init__(self, frames):
        self.frames = frames

    def row(self, index):
        return torch.from_numpy(sum(self.frames[index + 1 : index + 5]))


FRAMES = [*np.random.default_rng(0).standard_normal((5000, 8)).astype(np.float32)]
FRAMES = [frame.copy() for frame in FRAMES]


training, loader = Training(), DataLoader(Windows(FRAMES), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        FRAMES[1 + 7 * training.num_steps % 160][:] += training.loss
training.finish()
