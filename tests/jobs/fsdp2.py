"""FSDP2 (fully_shard) on CPU, checkpointed with torch.distributed.checkpoint."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.manual_seed(7)
torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
generator = torch.Generator().manual_seed(dist.get_rank())
for _step in range(8):
    loss = model(torch.randn(16, 32, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {dist.get_rank()} loss {loss.item().hex()}", flush=True)
dcp.save({"model": model.state_dict()}, checkpoint_id=os.environ.get("JOB_OUT", tempfile.gettempdir()) + "/dcp")
dist.destroy_process_group()
