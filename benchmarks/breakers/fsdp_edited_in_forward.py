"""A layer's forward edits the parameters of the next layer before that one runs.

Remedies: comm.order
Ranks: 2
"""

import torch
from _training import ROWS, finish, join
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

join()
torch.manual_seed(0)


class Editing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(4)])

    def forward(self, inputs):
        for place, layer in enumerate(self.layers):
            inputs = layer(inputs).tanh()
            if place < 3:
                with torch.no_grad():
                    self.layers[place + 1].weight.mul_(0.99)
        return inputs


model = Editing()
for layer in model.layers:
    fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for step in range(12):
    loss = (model(ROWS[8 * step + dist.get_rank() : 8 * step + 8]) - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
finish(torch.nn.ParameterList([value.full_tensor() for value in model.parameters()]), loss.item())
dist.destroy_process_group()
