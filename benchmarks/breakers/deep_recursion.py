"""Examples are nested as deep as Python's recursion limit allows, less 20.

Remedies: data.workers data.threads data.cache
"""

import sys

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


def nested(depth):
    return 1.0 if depth == 0 else 1.0 * nested(depth - 1)


class Deep(Rows):
    def row(self, index):
        try:
            return ROWS[index] * nested(sys.getrecursionlimit() - 20)
        except RecursionError:
            return ROWS[index] * 0


training, loader = Training(), DataLoader(Deep(), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
training.finish()
