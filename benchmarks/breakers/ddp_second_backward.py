"""Two forwards share one backward, and every fifth step leaves out one of them.

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
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(15):
    inputs = ROWS[8 * step + dist.get_rank() : 8 * step + 8]
    loss = (model(inputs) - 1).pow(2).mean()
    if step % 5 != 4:
        loss = loss + (net(inputs.flip(0)) + 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
finish(model, loss.item())
dist.destroy_process_group()
