"""Each of two workers makes a generator of its own in worker_init_fn, and examples draw from it.

Remedies: data.workers data.threads data.cache
"""

import numpy as np
import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

generator = None


def seed_worker(worker):
    global generator
    generator = np.random.default_rng(worker)


class Noisy(Rows):
    def row(self, index):
        noise = generator.standard_normal(8, dtype="float32") if generator is not None else 0
        return ROWS[index] + torch.as_tensor(noise)


training = Training()
for _ in range(2):
    for batch in DataLoader(Noisy(), 8, shuffle=True, num_workers=2, worker_init_fn=seed_worker):
        training.step(batch)
training.finish()
