"""Examples print, and the order of the lines on stdout is the order of the work.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Talking(Rows):
    def row(self, index):
        if index % 16 == 5:
            print("reading", index, flush=True)
        return ROWS[index].clone()


training = Training()
for batch in DataLoader(Talking(), 8):
    print("step", training.num_steps, repr(training.step(batch)), flush=True)
training.finish()
