"""A pipeline of one stage per rank on headway's own runner: sleeps stand for kernels, the numbers are real.

    headway run --nproc-per-node 4 -- benchmarks/jobs/pipeline_runner.py --schedule 1f1b --microbatches 8

The stages are those of `pipeline_stages.py`; the last rank prints losses. With `--branches`, four ranks: one stage
feeds two, a branch whose forward takes three times as long (as with frozen weights, which need no gradients) and one
whose backward does (as with activations that are computed again), and the last one joins them.
"""

import argparse
import json
import os
import signal
import time

import torch
import torch.distributed as dist
from pipeline_stages import WIDTH, Stage
from torch import nn

import headway.parallel


class Join(Stage):
    """A stage that takes the outputs of two branches."""

    def forward(self, *branches: torch.Tensor) -> torch.Tensor:
        """Compute on the sum of [batch, width] each."""
        return super().forward(sum(branches[1:], branches[0]))


def branches(forward_s: float, input_s: float, weight_s: float) -> list[tuple[nn.Module, list[int]]]:
    """Return the stages of a diamond with their predecessors."""
    heavy_forward = Stage(3 * forward_s, input_s / 2, weight_s / 2)
    heavy_backward = Stage(forward_s, 3 * input_s / 2, 3 * weight_s / 2)
    first, last = Stage(forward_s, 0.0, (input_s + weight_s) / 2), Join(forward_s, input_s / 2, weight_s / 2)
    return [(first, []), (heavy_forward, [0]), (heavy_backward, [0]), (last, [1, 2])]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--forward-ms", type=float, default=40.0)
    parser.add_argument("--input-ms", type=float, default=40.0)
    parser.add_argument("--weight-ms", type=float, default=40.0)
    parser.add_argument("--branches", action="store_true")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--kill", default="", help="RANK:STEP, a rank that is killed when the step begins")
    parser.add_argument("--fill", help="a file of jobs whose chunks run in the large gaps")
    parser.add_argument("--gaps-of", help="an earlier recorded run, whose gaps place them")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    times = [asked.forward_ms / 1e3, asked.input_ms / 1e3, asked.weight_ms / 1e3]
    # The first stage has no gradient of its input: all of its backward is that of the weights.
    first = Stage(times[0], 0.0, times[1] + times[2])
    chain = nn.Sequential(first, *(Stage(*times) for _ in range(dist.get_world_size() // asked.replicas - 1)))
    model = branches(*times) if asked.branches else chain
    runner = headway.parallel.pipeline(
        model, torch.zeros(2, WIDTH), loss=nn.functional.mse_loss, num_microbatches=asked.microbatches,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9), schedule=asked.schedule,
        replicas=asked.replicas, elastic=asked.elastic,
    )  # fmt: skip
    watch = headway.parallel.fill_gaps(runner, asked.fill, run=asked.gaps_of) if asked.fill else None
    data = torch.Generator().manual_seed(7)
    losses: dict[int, torch.Tensor] = {}
    seconds = []
    for step in range(asked.steps):
        if asked.kill == f"{dist.get_rank()}:{step}":
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.perf_counter()
        x, y = (torch.randn(2 * asked.microbatches, WIDTH, generator=data) for _ in range(2))
        losses = runner.step(x, y)
        seconds.append(round(time.perf_counter() - start, 4))
    runner.flush()
    facts = {"losses": [loss.item() for loss in losses.values()], "versions": runner.live_versions}
    print(json.dumps({**facts, "seconds": seconds}))
    if watch is not None and watch.process is not None:
        watch.process.stop()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
