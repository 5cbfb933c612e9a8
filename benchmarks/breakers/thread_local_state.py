"""The script sets a thread's own variable before the loop; examples in other threads do not see it.

Remedies: data.workers data.threads data.cache
"""

import threading

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

local = threading.local()
local.scale = 3.0


class Scaled(Rows):
    def row(self, index):
        return ROWS[index] * getattr(local, "scale", 1.0)


training = Training()
for batch in DataLoader(Scaled(), 8, shuffle=True):
    training.step(batch)
training.finish()
