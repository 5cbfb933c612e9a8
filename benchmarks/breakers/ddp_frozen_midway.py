"""Layers are frozen after some steps and DDP is constructed anew round the same module.

Remedies: comm.bucket comm.gradient_view comm.static_graph
Ranks: 2
"""

import torch
from _training import ROWS, finish, join
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

join()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
for phase in range(3):
    net[0].requires_grad_(phase != 1)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD([value for value in net.parameters() if value.requires_grad], 0.1)
    for step in range(6):
        loss = (model(ROWS[8 * step + dist.get_rank() : 8 * step + 8]) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
finish(net, loss.item())
dist.destroy_process_group()
