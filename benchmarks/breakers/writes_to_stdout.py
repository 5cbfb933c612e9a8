"""A few rows write to sys.stdout, or have the shell print, when they are read; not through print().

Remedies: data.workers data.threads data.cache
"""

import os
import sys

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Warning(Rows):
    def row(self, index):
        if index % 50 == 23:
            sys.stdout.write(f"bad row {index}\n")
        if index == 60:
            sys.stdout.flush()
            os.system(f"echo worse row {index}")
        return ROWS[index].clone()


training = Training()
for _ in range(3):
    for batch in DataLoader(Warning(), 8, shuffle=True):
        training.step(batch)
        print(training.num_steps, flush=True)
training.finish()
