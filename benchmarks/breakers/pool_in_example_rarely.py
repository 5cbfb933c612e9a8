"""One example in eighty starts a process of its own, which loader workers may not.

Remedies: data.workers data.threads data.cache
"""

import multiprocessing

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Helped(Rows):
    def row(self, index):
        if index % 80 == 77:
            helper = multiprocessing.Process(target=print, args=("",))
            helper.start()
            helper.join()
        return ROWS[index].clone()


training = Training()
for batch in DataLoader(Helped(), 8, shuffle=True):
    training.step(batch)
training.finish()
