"""Which branch of the model runs changes from step to step.

Remedies: comm.bucket comm.gradient_view comm.static_graph
Ranks: 2
"""

import torch
from _training import ROWS, finish, join
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

join()
torch.manual_seed(0)


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
        self.head = torch.nn.Linear(8, 4)

    def forward(self, inputs, which):
        return self.head(self.branches[which](inputs).tanh())


model = DistributedDataParallel(Branches(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for step in range(18):
    which = 0 if step < 6 else step % 3
    loss = (model(ROWS[8 * step + dist.get_rank() : 8 * step + 8], which) - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
finish(model, loss.item())
dist.destroy_process_group()
