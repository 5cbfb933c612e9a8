"""Gradients are replaced by clones, by None and by views of a flat buffer of the script's own.

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
values = list(model.parameters())
flat = torch.zeros(sum(value.numel() for value in values))
optimizer = torch.optim.SGD(values, 0.1, momentum=0.9)
for step in range(12):
    loss = (model(ROWS[8 * step + dist.get_rank() : 8 * step + 8]) - 1).pow(2).mean()
    loss.backward()
    place = 0
    for value in values:
        part = flat[place : place + value.numel()].view_as(value)
        place += value.numel()
        value.grad = part.copy_(value.grad) if step % 3 == 0 else value.grad.clone()
    optimizer.step()
    if step % 2:
        flat.mul_(0.5)
    else:
        optimizer.zero_grad(set_to_none=step % 4 == 0)
finish(model, loss.item())
dist.destroy_process_group()
