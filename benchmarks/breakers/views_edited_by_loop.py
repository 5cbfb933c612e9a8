"""Batches are views of the dataset's own storage, and the loop edits them in place.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Training, wait
from torch.utils.data import DataLoader, Dataset


class Blocks(Dataset):
    storage = ROWS.clone()

    def __len__(self):
        return 20

    def __getitem__(self, index):
        wait()
        return self.storage[8 * index : 8 * index + 8]


training = Training()
for _ in range(3):
    for batch in DataLoader(Blocks(), batch_size=None, shuffle=True):
        training.step(batch)
        batch.mul_(0.9)
training.finish()
