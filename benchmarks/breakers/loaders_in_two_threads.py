"""Two threads start the same loader at the same time; batches are added up by place.

Remedies: data.workers data.threads data.cache
"""

import threading

import torch
from _training import Rows, Training
from torch.utils.data import DataLoader

training = Training()
loader = DataLoader(Rows(), 8)
batches = {0: [], 1: []}
threads = [threading.Thread(target=lambda place: batches[place].extend(loader), args=(place,)) for place in batches]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for both in zip(*batches.values(), strict=True):
    training.step(torch.cat(both))
training.finish()
