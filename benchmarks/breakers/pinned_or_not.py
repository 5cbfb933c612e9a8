"""The loop scales batches by whether they are pinned and whether they lie in shared memory.

Remedies: data.workers data.threads data.cache
"""

from _training import Rows, Training
from torch.utils.data import DataLoader

training = Training()
for _ in range(2):
    for batch in DataLoader(Rows(), 8, shuffle=True):
        training.step(batch * (1 + batch.is_shared() + 2 * batch.is_pinned()))
training.finish()
