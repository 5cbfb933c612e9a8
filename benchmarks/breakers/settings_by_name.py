"""Settings are looked up by texts: in globals(), by getattr of the main module, in sys.modules.

Remedies: data.workers data.threads data.cache
"""

import sys

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

import __main__

LEVEL, RATIO, SHIFT = 1.0, 1.0, 0.0


class Configured(Rows):
    def row(self, index):
        shift = getattr(sys.modules["__main__"], "SHIFT")  # noqa: B009  # how a script may do it
        return ROWS[index] * globals()["LEVEL"] * getattr(__main__, "RATIO") + shift  # noqa: B009  # the same


dataset, training = Configured(), Training()
for _ in range(3):
    for batch in DataLoader(dataset, 8, shuffle=True):
        training.step(batch)
        if training.num_steps % 25 == 7:
            LEVEL *= 1.1
        if training.num_steps % 25 == 13:
            RATIO *= 0.95
        if training.num_steps % 25 == 19:
            SHIFT += 0.1
training.finish()
