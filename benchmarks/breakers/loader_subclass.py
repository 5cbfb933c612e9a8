"""A subclass of DataLoader skips batches in its own `__iter__`, by the state of the training.

Remedies: data.workers data.threads data.cache
"""

from _training import Rows, Training
from torch.utils.data import DataLoader

training = Training()


class Skipping(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            if training.num_steps % 3 == 2 and batch.mean() > 0:
                continue
            yield batch


for _ in range(3):
    for batch in Skipping(Rows(), 8, shuffle=True):
        training.step(batch)
        training.num_steps += int(training.loss * 1e6) % 2
training.finish()
