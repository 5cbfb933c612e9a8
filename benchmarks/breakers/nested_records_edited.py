"""The loop weighs one class of nested records anew after each step; no record of it is among those that are sampled.

Remedies: data.workers data.threads data.cache
"""

from _training import NUM_ROWS, ROWS, Rows, Training
from torch.utils.data import DataLoader


class Records(Rows):
    def __init__(self):
        self.records = [{"row": row, "about": {"weight": 1.0}} for row in ROWS]

    def row(self, index):
        record = self.records[index]
        return record["row"] * record["about"]["weight"]


dataset, training = Records(), Training()
for epoch in range(4):
    for batch in DataLoader(dataset, 8, shuffle=True):
        training.step(batch)
        for index in range(1, NUM_ROWS, 4) if epoch >= 2 else ():
            dataset.records[index]["about"]["weight"] *= 1.02
training.finish()
