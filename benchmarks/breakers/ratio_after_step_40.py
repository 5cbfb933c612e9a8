"""The dataset changes once, after step 40, in the middle of an epoch.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Mixed(Rows):
    ratio = 0.0

    def row(self, index):
        return ROWS[index] * (1 + self.ratio)


training, rows = Training(), Mixed()
loader = DataLoader(rows, 4, shuffle=True)
for _ in range(2):
    for batch in loader:
        training.step(batch)
        if training.num_steps == 47:
            rows.ratio = 0.5
training.finish()
