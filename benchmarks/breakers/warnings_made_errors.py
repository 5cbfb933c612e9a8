"""The loop makes errors of warnings, which examples catch.

Remedies: data.workers data.threads data.cache
"""

import warnings

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Guarded(Rows):
    def row(self, index):
        try:
            if ROWS[index, 0] < 0:
                warnings.warn("negative", RuntimeWarning, stacklevel=1)
        except RuntimeWarning:
            return ROWS[index] * 0
        return ROWS[index]


warnings.simplefilter("ignore")


training, loader = Training(), DataLoader(Guarded(), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        warnings.simplefilter("error" if training.num_steps // 7 % 2 else "ignore", RuntimeWarning)
training.finish()
