"""The loop edits a tensor of priorities in place, and examples are scaled by theirs.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import NUM_ROWS, ROWS, Rows, Training
from torch.utils.data import DataLoader


class Replay(Rows):
    priorities = torch.ones(NUM_ROWS)

    def row(self, index):
        return ROWS[index] * self.priorities[index]


training, replay = Training(), Replay()
for _ in range(2):
    for batch in DataLoader(replay, 8, shuffle=True):
        loss = training.step(batch)
        replay.priorities.mul_(0.99).add_(loss / 1000)
training.finish()
