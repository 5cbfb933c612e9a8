"""An iterator is left in mid-epoch, another one begun, and the first taken up again.

Remedies: data.workers data.threads data.cache
"""

from _training import Rows, Training
from torch.utils.data import DataLoader

training = Training(dropout=0.1)
loader = DataLoader(Rows(), 8, shuffle=True)
first = iter(loader)
for _ in range(7):
    training.step(next(first))
for step, batch in enumerate(loader):
    training.step(batch)
    if step == 3:
        break
for batch in first:
    training.step(batch)
training.finish()
