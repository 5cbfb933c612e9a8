"""A list of 160 functions, one per example, which go by a variable of the module.

Remedies: data.workers data.threads data.cache
"""

from _training import NUM_ROWS, ROWS, Training, wait
from torch.utils.data import DataLoader

SCALE = 1.0


def maker(place):
    return lambda: ROWS[place] * SCALE


class Lazy:
    def __init__(self, makers):
        self.makers = makers

    def __len__(self):
        return len(self.makers)

    def __getitem__(self, index):
        wait()
        return self.makers[index]()


training, loader = Training(), DataLoader(Lazy([maker(i) for i in range(NUM_ROWS)]), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        SCALE = 1.0 + training.num_steps // 7
training.finish()
