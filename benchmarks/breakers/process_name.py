"""Some examples ask which process or thread they are read in, by name.

Remedies: data.cache data.workers data.threads
"""

import multiprocessing
import threading

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Named(Rows):
    def row(self, index):
        names = multiprocessing.current_process().name, multiprocessing.parent_process()
        is_main = names == ("MainProcess", None) and threading.current_thread() is threading.main_thread()
        if index > 3 and not is_main:
            return ROWS[index] * 2
        return ROWS[index].clone()


training = Training()
for _ in range(2):
    for batch in DataLoader(Named(), 8, shuffle=True):
        training.step(batch)
training.finish()
