"""A stream (IterableDataset) that shards itself over loader workers, read with and without workers."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

torch.manual_seed(3)
torch.set_num_threads(1)


class Stream(IterableDataset):
    """Numbers, made up on the way."""

    def __iter__(self):
        info = get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        generator = torch.Generator().manual_seed(start)
        for i in range(start, 240, step):
            yield torch.randn(6, generator=generator) + i / 240, torch.tensor([i / 240])


model = nn.Linear(6, 1)
optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=2)
for x, y in DataLoader(Stream(), 12, num_workers=int(sys.argv[1]) if len(sys.argv) > 1 else 0):

    def closure(x=x, y=y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    print("loss", optimizer.step(closure).item().hex())
