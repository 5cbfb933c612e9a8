"""Texts are decoded with an error handler that goes by a variable of the script.

Remedies: data.workers data.threads data.cache
"""

import codecs

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

SIGN = "1"
codecs.register_error("breaker", lambda error: (SIGN, error.end))


class Texts(Rows):
    def row(self, index):
        return ROWS[index] * float(b"\xff.5".decode("ascii", "breaker"))


training, loader = Training(), DataLoader(Texts(), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        SIGN = str(1 + training.num_steps // 7)
training.finish()
