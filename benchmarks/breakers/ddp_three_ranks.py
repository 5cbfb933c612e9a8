"""Three ranks: the order in which their gradients are added depends on where these lie in their buckets.

Remedies: comm.bucket
Ranks: 3
"""

import torch
from _training import finish, join
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

join()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(6)])
replica = DistributedDataParallel(model)
optimizer = torch.optim.SGD(replica.parameters(), 0.05, momentum=0.9)
inputs = torch.Generator().manual_seed(dist.get_rank())
for _ in range(40):
    loss = (replica(torch.randn(8, 64, generator=inputs)) - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
finish(model, loss.item())
dist.destroy_process_group()
