"""A tensor-parallel MLP on gloo ranks, sequence-parallel around it. Arguments: steps, blocks, width."""

import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

ROWS = 512

steps, blocks, width = (int(value) for value in sys.argv[1:4])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)


class Block(torch.nn.Module):
    """Up, activation, down, and the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return this rank's rows."""
        return x + self.down(torch.relu(self.up(x)))


model = torch.nn.Sequential(*(Block() for _ in range(blocks)))
for block in model:
    styles = {"up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel(output_layouts=Shard(0))}
    parallelize_module(block, mesh, styles)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
random = torch.Generator().manual_seed(1)
begin = time.perf_counter()
for step in range(steps):
    x = torch.randn(ROWS, width, generator=random).chunk(dist.get_world_size())[dist.get_rank()]
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 4:
        begin = time.perf_counter()
    if dist.get_rank() == 0:
        print(f"{step} {loss.item():.9g}", flush=True)
if dist.get_rank() == 0:
    print(f"step_s {(time.perf_counter() - begin) / max(steps - 5, 1):.6f}", flush=True)
dist.destroy_process_group()
