"""The loop over a loader iterates over the same loader inside.

Remedies: data.workers data.threads data.cache
"""

from _training import Rows, Training
from torch.utils.data import DataLoader

training = Training(dropout=0.1)
loader = DataLoader(Rows(), 16, shuffle=True)
for outer, batch in enumerate(loader):
    training.step(batch)
    if outer % 4 == 1:
        for inner in loader:
            training.step(inner)
training.finish()
