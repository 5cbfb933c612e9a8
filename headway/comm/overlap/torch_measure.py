"""What each form of a matmul beside its collective takes: `python -m headway.comm.overlap.torch_measure RANKS SHAPES`.

Starts the other ranks on this host, over gloo, one thread each as torchrun gives them; where a launcher has set RANK
it is one of the launcher's ranks instead, over NCCL where there are CUDA devices. All forms take turns within a round,
behind a barrier each; a time is that of the slowest rank. Each rank prints one line, a `OverlapTable`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from headway.comm.overlap.advise import ROUNDS, OverlapTable, OverlapTimes
from headway.comm.overlap.torch_ring import all_gathered, chunk_rows, gathered, has_symm_mem, scattered, sum_scattered
from headway.cost.collectives import GATHER, OVERLAPS, SYMM_MEM, MatmulShape, read_shape

BUDGET_S = 12.0
"""No round of a shape begins after this, but the fewest."""

FEWEST_ROUNDS = 7

MEETING_S = 60.0
"""Ranks wait so long for each other."""

MATMUL, COLLECTIVE = "matmul alone", "collective alone"


def measured(shape: MatmulShape, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> OverlapTimes:
    """Return the times of all forms of a shape; all ranks of the group call it."""
    calls = _calls(shape, group, device, dtype)
    if SYMM_MEM in calls and not _runs(calls[SYMM_MEM], group, device):
        del calls[SYMM_MEM]
    times: dict[str, list[float]] = {name: [] for name in calls}
    began = time.monotonic()
    for number in range(ROUNDS + 1):
        late = torch.tensor(float(time.monotonic() - began > BUDGET_S), device=device)
        dist.all_reduce(late, group=group)
        if number > FEWEST_ROUNDS and late.item():
            break
        for name, call in calls.items():
            seconds = _slowest_s(call, group, device)
            if number:  # the first round takes fresh memory, and makes connections
                times[name].append(seconds)
    matmul_s, collective_s = (statistics.median(times.pop(name)) for name in (MATMUL, COLLECTIVE))
    return OverlapTimes(shape=str(shape), forms=times, matmul_s=matmul_s, collective_s=collective_s)


def _calls(
    shape: MatmulShape, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """Return what is timed: each form, and its two timed."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    rows = chunk_rows(shape.m, size)
    random = torch.Generator().manual_seed(rank)
    right = torch.randn(shape.k, shape.n, generator=random).to(device, dtype)
    factor = torch.randn(shape.m, shape.k, generator=random).to(device, dtype)
    forms = [name for name in OVERLAPS if name != SYMM_MEM or (has_symm_mem(device) and min(rows) == max(rows))]
    timed: dict[str, Callable[[], object]] = {MATMUL: lambda: factor @ right}
    if shape.way == GATHER:
        x = factor[: rows[rank]].clone()
        timed[COLLECTIVE] = partial(all_gathered, x, group, rows)
        return timed | {form: partial(gathered, x, right, group, rows, form) for form in forms}
    timed[COLLECTIVE] = partial(sum_scattered, factor @ right, group, rows)
    return timed | {form: partial(scattered, factor, right, group, rows, form) for form in forms}


def _runs(call: Callable[[], object], group: dist.ProcessGroup, device: torch.device) -> bool:
    """Say whether all ranks can do it: devices that do not see each other's memory refuse."""
    able = torch.ones(1, device=device)
    try:
        call()
    except RuntimeError:
        able.zero_()
    dist.all_reduce(able, dist.ReduceOp.MIN, group=group)
    return bool(able.item())


def _slowest_s(call: Callable[[], object], group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds of the slowest rank."""
    dist.barrier(group)
    _synchronise(device)
    begin = time.perf_counter()
    call()
    _synchronise(device)
    spent = torch.tensor(time.perf_counter() - begin, dtype=torch.float64, device=device)
    dist.all_reduce(spent, dist.ReduceOp.MAX, group=group)
    return float(spent)


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def join(ranks: int, rank: int, store: str) -> torch.device:
    """Join the group of a launcher, or that of the processes that share the file `store`; return this rank's device."""
    timeout = timedelta(seconds=MEETING_S)
    if not store and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
        return device
    if store:
        dist.init_process_group("gloo", timeout=timeout, init_method=f"file://{store}", rank=rank, world_size=ranks)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    return torch.device("cpu")


def main() -> None:
    """Be rank 0 and start the peers, or one of them, or a rank of the launcher's."""
    torch.set_num_threads(1)
    ranks, shapes = int(sys.argv[1]), [read_shape(name) for name in sys.argv[2].split(",")]
    rank, store = (int(sys.argv[3]), sys.argv[4]) if len(sys.argv) > 3 else (0, "")
    peers: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            if not store and "RANK" not in os.environ:
                store = str(Path(folder) / "store")
                command = [sys.executable, "-m", "headway.comm.overlap.torch_measure", *sys.argv[1:3]]
                peers += [
                    subprocess.Popen([*command, str(peer), store], stdout=subprocess.DEVNULL)
                    for peer in range(1, ranks)
                ]
            device, dtype = join(ranks, rank, store), torch.float32
            assert dist.group.WORLD is not None
            rows = [measured(shape, dist.group.WORLD, device, dtype) for shape in shapes]
            name = str(dtype).removeprefix("torch.")
            table = OverlapTable(ranks=dist.get_world_size(), device=device.type, dtype=name, rows=rows)
            sys.stdout.write(f"{msgspec.json.encode(table).decode()}\n")
            dist.destroy_process_group()
        finally:
            for peer in peers:
                peer.terminate() if sys.exc_info()[0] else peer.wait()


if __name__ == "__main__":
    main()
