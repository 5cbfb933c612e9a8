"""A subclass of DDP reads the settings that it was constructed with.

Remedies: comm.bucket comm.gradient_view comm.static_graph
Ranks: 2
"""

import torch
from _training import ROWS, finish, join
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Reporting(DistributedDataParallel):
    def __init__(self, net, scale):
        super().__init__(net, bucket_cap_mb=3)
        self.scale = scale * self.bucket_bytes_cap / (1 << 20) + self.gradient_as_bucket_view + self.static_graph


join()
torch.manual_seed(0)
model = Reporting(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)), 0.5)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(12):
    loss = (model(ROWS[8 * step + dist.get_rank() : 8 * step + 8]) - model.scale).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
finish(model, loss.item())
dist.destroy_process_group()
