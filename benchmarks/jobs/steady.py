"""Steps of about 5 ms of real compute with a loader and an optimizer; prints the CPU seconds of the loop."""

import json
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 600

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(*(nn.Linear(384, 384) for _ in range(6)))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
loader = DataLoader(TensorDataset(torch.randn(STEPS * 16, 384)), 16)
start_cpu, start = time.process_time(), time.perf_counter()
for (x,) in loader:
    for _repeat in range(2):
        model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps({"cpu_s": time.process_time() - start_cpu, "wall_s": time.perf_counter() - start, "steps": STEPS}))
