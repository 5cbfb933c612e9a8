"""A metaclass keeps the one instance of the settings, by which examples are scaled; the loop sets it.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Singleton(type):
    instances = dict()  # noqa: C408, RUF012 - as scripts have it

    def __call__(cls):
        if cls not in Singleton.instances:
            Singleton.instances[cls] = super().__call__()
        return Singleton.instances[cls]


class Settings(metaclass=Singleton):
    def __init__(self):
        self.scale = 1.0


class Scaled(Rows):
    def row(self, index):
        return ROWS[index] * Settings().scale


training, loader = Training(), DataLoader(Scaled(), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        Settings().scale = 1.0 + training.num_steps // 7
training.finish()
