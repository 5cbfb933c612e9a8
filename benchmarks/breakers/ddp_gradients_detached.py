"""The loop zeroes gradients the old way, by detach_() and zero_().

Remedies: comm.gradient_view
Ranks: 2
"""

import torch
from _training import ROWS, finish, join
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

join()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(12):
    loss = (model(ROWS[8 * step + dist.get_rank() : 8 * step + 8]) - 1).pow(2).mean()
    for value in model.parameters():
        if value.grad is not None:
            value.grad.detach_()
            value.grad.zero_()
    loss.backward()
    optimizer.step()
finish(model, loss.item())
dist.destroy_process_group()
