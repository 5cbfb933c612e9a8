"""`set_epoch` of a DistributedSampler is called after `iter(loader)`, before the first batch.

Remedies: data.workers data.threads data.cache
"""

from _training import Rows, Training
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

training, rows = Training(), Rows()
sampler = DistributedSampler(rows, 2, 0)
loader = DataLoader(rows, 8, sampler=sampler)
for epoch in range(3):
    batches = iter(loader)
    sampler.set_epoch(epoch)
    for batch in batches:
        training.step(batch)
training.finish()
