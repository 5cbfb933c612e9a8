"""Two replicas of a pipeline whose ranks kill themselves: `rerouted.py FOLDER PLAN`.

PLAN is JSON: "steps", "stages", and "kills", each [rank, step, milliseconds into that step], or [rank, "switch",
milliseconds after another rank was killed]; a job that is started again kills nobody. A rank of the last stage appends
[step, seconds, losses] to FOLDER/log-<rank>, in one write; each rank that gets to the end saves its weights as
FOLDER/weights-<rank>.pt.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from headway.parallel import pipeline
from headway.runtime.launching.peers import peers_of

WIDTH, BATCH, MICROBATCHES = 6, 24, 8


class Work(nn.Module):
    """Computes for 3 ms, and nothing."""

    def forward(self, x):
        """Return what came."""
        time.sleep(0.003)
        return x


def model(num_stages):
    """Return one or two stages: BatchNorm (behind no bias, whose gradient would be noise), dropout on both."""
    torch.manual_seed(1)
    first = nn.Sequential(nn.Linear(WIDTH, 16, bias=False), nn.BatchNorm1d(16), nn.Dropout(0.3), Work(), nn.Tanh())
    last = nn.Sequential(Work(), nn.Linear(16, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 2))
    return nn.Sequential(first, last) if num_stages > 1 else nn.Sequential(nn.Sequential(first, last))


def kill_at(begun, when, milliseconds):
    """Kill this process so long into a step, or after another rank was killed."""
    if when == "switch":
        board = peers_of(os.environ)[0]
        while not board.killed():
            time.sleep(0.0005)
    else:
        begun[when].wait()
    time.sleep(milliseconds / 1000)
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    """Train."""
    folder, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    runner = pipeline(
        model(plan["stages"]), torch.zeros(BATCH // MICROBATCHES, WIDTH), loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01), num_microbatches=MICROBATCHES,
        replicas=2, elastic=True, timeout_s=60,
    )  # fmt: skip
    begun = [threading.Event() for _ in range(plan["steps"])]
    for who, when, milliseconds in plan["kills"]:
        if who == rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            threading.Thread(target=kill_at, args=(begun, when, milliseconds), daemon=True).start()
    data = torch.Generator().manual_seed(7)
    for step in range(plan["steps"]):
        x, y = torch.randn(BATCH, WIDTH, generator=data), torch.randn(BATCH, 2, generator=data)
        begun[step].set()
        start = time.perf_counter()
        losses = runner.step(x, y)
        if losses:
            row = [step, time.perf_counter() - start, [losses[key].item() for key in sorted(losses)]]
            with open(folder / f"log-{rank}", "ab", buffering=0) as log:
                log.write(json.dumps(row).encode() + b"\n")
    torch.save(runner.state_dict(), folder / f"weights-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
