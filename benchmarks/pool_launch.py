"""A 2-rank DDP launch from the warm pool against `torch.multiprocessing.spawn`.

Claim: once the pool is warm, starting two ranks, joining them over gloo and
doing one DDP step is at least 20x faster than with spawn. Both must compute
the same gradient.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path

from tests.made.pool import RankPool

ROUNDS = 3


def gradient() -> list[float]:
    """Return a gradient after one DDP forward and backward."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    model(torch.full((1, 4), float(dist.get_rank()))).sum().backward()
    return [float(x) for x in model.module.weight.grad.flatten()]


def spawned(rank: int, store: str, out: str) -> None:
    """Do the same in a rank that spawn started."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    Path(f"{out}-{rank}").write_text(json.dumps(gradient()))
    dist.barrier()
    os._exit(0)  # as the pool does: a teardown that races its peer's may abort


def by_spawn() -> list[list[float]]:
    """Start two ranks with spawn."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(spawned, (f"{folder}/store", f"{folder}/out"), nprocs=2)
        return [json.loads(Path(f"{folder}/out-{rank}").read_text()) for rank in (0, 1)]


def main() -> None:
    """Run interleaved rounds and print one JSON line."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pool = RankPool()
    pool.run(gradient, 2)  # the first call starts the server
    pairs = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        ours = pool.run(gradient, 2)
        middle = time.perf_counter()
        theirs = by_spawn()
        assert ours == theirs, "gradients differ"
        pairs.append((middle - begin, time.perf_counter() - middle))
    ratios = sorted(theirs / mine for mine, theirs in pairs)
    print(
        json.dumps(
            {
                "bench": "pool_launch",
                "ranks": 2,
                "baseline": "torch.multiprocessing.spawn",
                "ours_s": round(statistics.median(mine for mine, _ in pairs), 3),
                "baseline_s": round(statistics.median(theirs for _, theirs in pairs), 3),
                "ratio": round(statistics.median(ratios), 1),
                "ratio_range": [round(ratios[0], 1), round(ratios[-1], 1)],
                "claim": ">=20",
            }
        )
    )


if __name__ == "__main__":
    multiprocessing.freeze_support()
    main()
