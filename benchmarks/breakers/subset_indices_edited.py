"""The loop edits the list of a SubsetRandomSampler in the middle of an epoch.

Remedies: data.workers data.threads data.cache
"""

from _training import Rows, Training
from torch.utils.data import DataLoader, SubsetRandomSampler

training, rows = Training(), Rows()
indices = list(range(80))
sampler = SubsetRandomSampler(indices)
for step, batch in enumerate(DataLoader(rows, 4, sampler=sampler)):
    training.step(batch)
    indices[(step * 11) % 80] = 80 + step
training.finish()
