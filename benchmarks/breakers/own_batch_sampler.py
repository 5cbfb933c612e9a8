"""A batch sampler of the script's own looks at the last loss.

Remedies: data.workers data.threads data.cache
"""

from _training import NUM_ROWS, Rows, Training
from torch.utils.data import DataLoader

training = Training()


class HardFirst:
    def __iter__(self):
        for place in range(20):
            start = (place + int(training.loss * 1e6)) % (NUM_ROWS - 8)
            yield list(range(start, start + 8))

    def __len__(self):
        return 20


for _ in range(2):
    for batch in DataLoader(Rows(), batch_sampler=HardFirst()):
        training.step(batch)
training.finish()
