"""The loop runs with stdout caught in memory; some examples print.

Remedies: data.workers data.threads data.cache
"""

import contextlib
import io

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Talking(Rows):
    def row(self, index):
        if index % 16 == 5:
            print("reading", index)
        return ROWS[index].clone()


training, out = Training(), io.StringIO()
with contextlib.redirect_stdout(out):
    for batch in DataLoader(Talking(), 8):
        print("step", training.num_steps, training.step(batch))
print(out.getvalue())
training.finish()
