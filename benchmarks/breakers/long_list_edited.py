"""The loop replaces single entries of a list of 1600 rows; a look at some of them does not see it.

Remedies: data.workers data.threads data.cache
"""

from _training import NUM_ROWS, ROWS, Rows, Training
from torch.utils.data import DataLoader


class Listed(Rows):
    def __init__(self):
        self.rows = [row.clone() for row in ROWS for _ in range(10)]

    def row(self, index):
        return self.rows[index * 10 + 3].clone()


training, listed = Training(), Listed()
for _ in range(2):
    for step, batch in enumerate(DataLoader(listed, 8, shuffle=True)):
        training.step(batch)
        where = (step * 29) % NUM_ROWS * 10 + 3
        listed.rows[where] = listed.rows[where] * 0.5
training.finish()
