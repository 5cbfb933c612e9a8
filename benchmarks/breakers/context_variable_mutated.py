"""A context variable holds a dictionary that the loop edits in place.

Remedies: data.workers data.threads data.cache
"""

from contextvars import ContextVar

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

CONFIG = ContextVar("config")
CONFIG.set({"scale": 1.0})


class Scaled(Rows):
    def row(self, index):
        return ROWS[index] * CONFIG.get()["scale"]


training, loader = Training(), DataLoader(Scaled(), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        CONFIG.get()["scale"] = 1.0 + training.num_steps // 7
training.finish()
