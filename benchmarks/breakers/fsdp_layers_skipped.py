"""Layers of a sharded model are skipped by the step, and evaluated in between.

Remedies: comm.order
Ranks: 2
"""

import torch
from _training import ROWS, finish, join
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

join()
torch.manual_seed(0)


class Skipping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(4)])

    def forward(self, inputs, skipped):
        for place, layer in enumerate(self.layers):
            if place != skipped:
                inputs = layer(inputs).tanh()
        return inputs


model = Skipping()
for layer in model.layers:
    fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for step in range(16):
    skipped = -1 if step < 4 else step % 5
    loss = (model(ROWS[8 * step + dist.get_rank() : 8 * step + 8], skipped) - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        loss = loss + model(ROWS[:4], (step + 1) % 5).sum()
finish(torch.nn.ParameterList([value.full_tensor() for value in model.parameters()]), loss.item())
dist.destroy_process_group()
