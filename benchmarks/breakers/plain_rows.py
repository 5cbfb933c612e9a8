"""Nothing is wrong with this one: remedies apply, and the losses are equal.

Remedies: data.workers data.threads data.cache data.server
"""

from _training import Rows, Training
from torch.utils.data import DataLoader

training = Training(dropout=0.1)
loader = DataLoader(Rows(), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
training.finish()
