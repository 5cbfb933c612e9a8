"""The state of torch's generator is saved in mid-epoch, and the next epoch begins from it.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import Rows, Training
from torch.utils.data import DataLoader

training, digests = Training(dropout=0.2), []
for _ in range(3):
    for step, batch in enumerate(DataLoader(Rows(), 8, shuffle=True)):
        training.step(batch)
        if step == 7:
            saved = torch.get_rng_state()
            digests.append(int(saved.long().mul(torch.arange(len(saved))).sum()))
    torch.set_rng_state(saved)
training.finish(digests)
