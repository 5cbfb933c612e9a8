"""The same loader is read twice at once, by `zip`.

Remedies: data.workers data.threads data.cache
"""

from _training import Rows, Training
from torch.utils.data import DataLoader

training = Training(dropout=0.1)
loader = DataLoader(Rows(), 8, shuffle=True)
for _ in range(2):
    for left, right in zip(loader, loader, strict=True):
        training.step(left + right)
training.finish()
