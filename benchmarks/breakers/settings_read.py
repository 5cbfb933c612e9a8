"""The script reads the loader's settings and scales the learning rate by them.

Remedies: data.workers data.threads data.cache
"""

from _training import Rows, Training
from torch.utils.data import DataLoader

training = Training()
loader = DataLoader(Rows(), 8, shuffle=True)
for _ in range(2):
    for batch in loader:
        training.step(batch / (1 + loader.num_workers) * (2 if loader.persistent_workers else 1))
training.finish(loader.num_workers, loader.prefetch_factor)
