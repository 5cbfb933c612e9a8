"""Gradients are accumulated in no_sync(), with hooks on parameters, and clipped.

Remedies: cluster.noise comm.bucket comm.gradient_view comm.static_graph
Ranks: 2
"""

import torch
from _training import ROWS, finish, join
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

join()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
net[0].weight.register_hook(lambda gradient: gradient * 1.1)
norms = []
net[2].weight.register_post_accumulate_grad_hook(lambda value: norms.append(value.grad.norm().item()))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
for step in range(16):
    inputs = ROWS[8 * step + dist.get_rank() : 8 * step + 8]
    if step % 3:
        with model.no_sync():
            (model(inputs) - 1).pow(2).mean().backward()
        continue
    loss = (model(inputs) - 1).pow(2).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad(set_to_none=bool(step % 2))
finish(model, loss.item(), norms)
dist.destroy_process_group()
