"""A subclass of RandomSampler overrides `__iter__` and looks at the number of steps.

Remedies: data.workers data.threads data.cache
"""

from _training import Rows, Training
from torch.utils.data import DataLoader, RandomSampler

training, rows = Training(), Rows()


class Shifted(RandomSampler):
    def __iter__(self):
        for index in super().__iter__():
            yield (index + training.num_steps) % len(rows)


for batch in DataLoader(rows, 8, sampler=Shifted(rows)):
    training.step(batch)
training.finish()
