"""One row in forty is added to a running digest, which the script prints after each epoch.

Remedies: data.workers data.threads data.cache
"""

import hashlib

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

SEEN = hashlib.sha256()


class Digesting(Rows):
    def row(self, index):
        if index % 40 == 17:
            SEEN.update(bytes([index]))
        return ROWS[index].clone()


dataset, training = Digesting(), Training()
for _ in range(3):
    for batch in DataLoader(dataset, 8, shuffle=True):
        training.step(batch)
    print(SEEN.hexdigest())
training.finish()
