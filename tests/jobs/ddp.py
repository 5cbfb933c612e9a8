"""DistributedDataParallel under torchrun: sampler, no_sync accumulation, a barrier, rank 0 saves."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.manual_seed(6)
torch.set_num_threads(1)
dist.init_process_group("gloo")
data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, 16, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (a, b) in enumerate(loader):
        if i % 2 == 0:
            with model.no_sync():
                nn.functional.mse_loss(model(a), b).backward()
            continue
        loss = nn.functional.mse_loss(model(a), b)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        print(f"rank {dist.get_rank()} loss {loss.item().hex()} {mean.item().hex()}", flush=True)
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), os.environ.get("JOB_OUT", tempfile.gettempdir()) + "/ddp.pt")
dist.destroy_process_group()
