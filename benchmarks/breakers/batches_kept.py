"""The loop keeps every batch, where few files may be open: shared memory needs descriptors.

Remedies: data.workers data.threads
"""

import resource

from _training import Rows, Training
from torch.utils.data import DataLoader

resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
training, batches = Training(), []
for _ in range(3):
    for batch in DataLoader(Rows(), 1, shuffle=True):
        batches.append(batch)
        training.step(batch + batches[len(batches) // 2])
training.finish()
