"""A pipeline of one stage per rank under torch.distributed.pipelining: sleeps stand for kernels, the numbers are real.

    headway run --nproc-per-node 4 -- benchmarks/jobs/pipeline_stages.py --schedule 1f1b --microbatches 8

Each rank prints its last line as JSON: the losses of the last stage, and a sum over its weights, bit for bit.
"""

import argparse
import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

WIDTH = 16


class Pause(torch.autograd.Function):
    """The identity, whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
        """Return the value."""
        ctx.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Sleep, and return the gradient."""
        time.sleep(ctx.seconds)
        return grads[0], None


class Stage(nn.Module):
    """A linear layer with a norm: the forward sleeps, the gradient of the input, and that of the weights."""

    def __init__(self, forward_s: float, input_s: float, weight_s: float) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.forward_s, self.input_s, self.weight_s = forward_s, input_s, weight_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute on [batch, width]."""
        time.sleep(self.forward_s)
        weight = Pause.apply(self.linear.weight, self.weight_s)
        x = Pause.apply(x, self.input_s) if x.requires_grad else x
        return self.norm(torch.tanh(nn.functional.linear(x, weight, self.linear.bias)))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", choices=("gpipe", "1f1b"), default="1f1b")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--forward-ms", type=float, nargs="+", default=[40.0])
    parser.add_argument("--input-ms", type=float, nargs="+", default=[40.0])
    parser.add_argument("--weight-ms", type=float, nargs="+", default=[40.0])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    forward_s, input_s, weight_s = (
        times[rank % len(times)] / 1e3 for times in (asked.forward_ms, asked.input_ms, asked.weight_ms)
    )
    torch.manual_seed(rank)
    # The first stage has no gradient of its input: all of its backward is that of the weights.
    model = Stage(forward_s, input_s, weight_s + (input_s if rank == 0 else 0.0))
    stage = PipelineStage(model, rank, world_size, torch.device("cpu"))
    made = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[asked.schedule]
    schedule = made(stage, asked.microbatches, loss_fn=nn.MSELoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(7)
    losses: list[float] = []
    for _ in range(asked.steps):
        x, y = (torch.randn(2 * asked.microbatches, WIDTH, generator=data) for _ in range(2))
        optimizer.zero_grad()
        found: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        elif rank == world_size - 1:
            schedule.step(target=y, losses=found)
        else:
            schedule.step()
        losses += [loss.item() for loss in found]
        optimizer.step()
    weights = [float(p.detach().double().sum()) for p in model.parameters()]
    print(json.dumps({"rank": rank, "losses": [loss.hex() for loss in losses], "weights": [w.hex() for w in weights]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
