"""A layer raises in some forwards, the loop skips the batch, and parameters change before the next.

Remedies: comm.order
Ranks: 2
"""

import torch
from _training import ROWS, finish, join
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

join()
torch.manual_seed(0)


class Failing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(4)])

    def forward(self, inputs, fails):
        for place, layer in enumerate(self.layers):
            if fails and place == 2:
                raise FloatingPointError
            inputs = layer(inputs).tanh()
        return inputs


model = Failing()
for layer in model.layers:
    fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for step in range(16):
    optimizer.zero_grad()
    try:
        loss = (model(ROWS[8 * step + dist.get_rank() : 8 * step + 8], step % 4 == 3) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
    except FloatingPointError:
        with torch.no_grad():
            for value in model.parameters():
                value.mul_(0.95)
finish(torch.nn.ParameterList([value.full_tensor() for value in model.parameters()]), loss.item())
dist.destroy_process_group()
