"""A sampler inside a plain BatchSampler looks at the last loss.

Remedies: data.workers data.threads data.cache
"""

from _training import NUM_ROWS, Rows, Training
from torch.utils.data import BatchSampler, DataLoader, Sampler

training = Training()


class Curriculum(Sampler):
    def __iter__(self):
        for place in range(NUM_ROWS):
            yield (place * 7 + int(training.loss * 1e6)) % NUM_ROWS

    def __len__(self):
        return NUM_ROWS


for _ in range(2):
    for batch in DataLoader(Rows(), batch_sampler=BatchSampler(Curriculum(), 8, False)):
        training.step(batch)
training.finish()
