"""The loop sets an environment variable that examples look up.

Remedies: data.workers data.threads data.cache
"""

import os

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Mixed(Rows):
    def row(self, index):
        return ROWS[index] * float(os.environ.get("RATIO", "1"))


training = Training()
for step, batch in enumerate(DataLoader(Mixed(), 8, shuffle=True)):
    training.step(batch)
    os.environ["RATIO"] = str(1 + step / 20)
training.finish()
