"""One iterator is asked with `next`, and made anew at StopIteration, in the middle of the training.

Remedies: data.workers data.threads data.cache
"""

from _training import Rows, Training
from torch.utils.data import DataLoader

training = Training(dropout=0.1)
loaders = [DataLoader(Rows(), size, shuffle=True) for size in (8, 24)]
batches = [iter(loader) for loader in loaders]
for _ in range(45):
    for place, loader in enumerate(loaders):
        try:
            batch = next(batches[place])
        except StopIteration:
            batches[place] = iter(loader)
            batch = next(batches[place])
        training.step(batch)
training.finish()
