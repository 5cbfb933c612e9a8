"""The loop keeps the gradients of the step before and steps along the difference.

Remedies: comm.bucket comm.gradient_view
Ranks: 2
"""

import torch
from _training import ROWS, finish, join
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

join()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)))
before = None
for step in range(12):
    model.zero_grad()
    loss = (model(ROWS[8 * step + dist.get_rank() : 8 * step + 8]) - 1).pow(2).mean()
    loss.backward()
    gradients = [value.grad for value in model.parameters()]
    with torch.no_grad():
        for value, new, old in zip(model.parameters(), gradients, before or gradients, strict=True):
            value -= 0.1 * (2 * new - old)
    before = gradients
finish(model, loss.item())
dist.destroy_process_group()
