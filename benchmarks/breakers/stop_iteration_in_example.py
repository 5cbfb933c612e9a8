"""An example raises StopIteration, which ends the epoch early and in silence.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Training, wait
from torch.utils.data import DataLoader, Dataset


class Ending(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        wait()
        if index == 99:
            raise StopIteration
        return ROWS[index].clone()


training = Training()
for _ in range(2):
    for batch in DataLoader(Ending(), 8):
        training.step(batch)
training.finish(training.num_steps)
