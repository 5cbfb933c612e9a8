"""Records of rows lie in a dictionary of 6,000, by name; the loop edits some of them in place.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Named(Rows):
    def __init__(self):
        self.names = [f"image{number:06d}" for number in range(6000)]
        self.records = {name: {"scale": 1.0} for name in self.names}

    def row(self, index):
        return ROWS[index] * self.records[self.names[index]]["scale"]


dataset, training = Named(), Training()
for _ in range(3):
    for batch in DataLoader(dataset, 8, shuffle=True):
        training.step(batch)
        for name in dataset.names[40:120] if training.num_steps % 25 == 0 else ():
            dataset.records[name]["scale"] *= 1.1
training.finish()
