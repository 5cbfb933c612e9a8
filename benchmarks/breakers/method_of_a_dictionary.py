"""The target transform is `get` of a dictionary, which the loop edits in the middle of an epoch.

Remedies: data.workers data.threads data.cache
"""

from _training import NUM_ROWS, ROWS, Rows, Training
from torch.utils.data import DataLoader


class Labelled(Rows):
    def __init__(self, label_of):
        self.label_of = label_of

    def row(self, index):
        return ROWS[index] * self.label_of(index, 1.0)


labels = dict.fromkeys(range(NUM_ROWS), 1.0)
dataset, training = Labelled(labels.get), Training()
for _ in range(3):
    for batch in DataLoader(dataset, 8, shuffle=True):
        training.step(batch)
        if training.num_steps % 25 == 0:
            labels.update({index: label * 1.1 for index, label in labels.items() if index % 3})
training.finish()
