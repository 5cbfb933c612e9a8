"""A training job that saves as scripts do, made to order: what it saves with, how much, how often, beside what steps.

    saving.py FOLDER --save dcp --state-mb 80 --every 20 --steps 100 --accelerator-ms 20

The accelerator is a sleep; with --compute-ms the step computes on a core instead. The state is a frozen table of
numbers and a small model that trains. `--save checkpointer` is the change by hand that headway proposes to scripts
that call torch.save.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

TABLES = 8


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--save", choices=["torch", "dcp", "checkpointer"], default="dcp")
    parser.add_argument("--state-mb", type=float, default=80)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--accelerator-ms", type=float, default=0)
    parser.add_argument("--compute-ms", type=float, default=0)
    return parser.parse_args()


def model_of(state_mb: float) -> torch.nn.Module:
    """Return a small model that trains, with a frozen table of so many megabytes beside it."""
    torch.manual_seed(0)
    size = int(state_mb * 1e6 / 4 / TABLES)
    tables = [torch.nn.Parameter(torch.rand(size), requires_grad=False) for _ in range(TABLES)]
    return torch.nn.ModuleDict({"net": torch.nn.Linear(64, 64), "tables": torch.nn.ParameterList(tables)})


def compute(milliseconds: float) -> None:
    """Keep a core busy for so long, by its own clock."""
    until, numbers = time.thread_time() + milliseconds / 1e3, torch.rand(100, 100)
    while time.thread_time() < until:
        numbers = numbers @ numbers
        numbers /= numbers.norm()


def main() -> None:
    """Train; save every so many steps, and once more at the end."""
    asked, rank, joined = options(), int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)) > 1
    torch.set_num_threads(1)
    if joined:
        dist.init_process_group("gloo")
    model = model_of(asked.state_mb)
    net = DistributedDataParallel(model["net"]) if joined else model["net"]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    checkpointer = None
    if asked.save == "checkpointer":
        import headway  # the change by hand

        checkpointer = headway.Checkpointer(asked.folder, model=model, opt=optimizer)

    def save(step: int) -> None:
        state = {"model": model.state_dict(), "opt": optimizer.state_dict(), "step": step}
        if checkpointer is not None:
            checkpointer.save(step)
        elif asked.save == "dcp":
            dcp.save(state, checkpoint_id=asked.folder / f"step-{step}")
        elif rank == 0:
            torch.save(state, asked.folder / f"step-{step}.pt")

    for step in range(1, asked.steps + 1):
        optimizer.zero_grad()
        loss = net(torch.full((8, 64), step / asked.steps)).square().mean()
        loss.backward()
        time.sleep(asked.accelerator_ms / 1e3)
        compute(asked.compute_ms)
        optimizer.step()
        if step % asked.every == 0:
            save(step)
    save(asked.steps)  # after the last step: what runs at other intervals write can be compared
    if checkpointer is not None:
        checkpointer.close()
    print("loss", loss.item().hex(), flush=True)
    if joined:
        dist.barrier()  # gloo's teardown may hang where a peer has gone in the middle of a message
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
