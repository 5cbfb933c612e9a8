"""An iterable dataset whose stream the loop redirects.

Remedies: data.workers data.threads data.cache data.server
"""

from _training import ROWS, Training, wait
from torch.utils.data import DataLoader, IterableDataset

training = Training()


class Stream(IterableDataset):
    def __iter__(self):
        for place in range(160):
            wait()
            yield ROWS[(place + training.num_steps) % 160]


for batch in DataLoader(Stream(), 8):
    training.step(batch)
training.finish()
