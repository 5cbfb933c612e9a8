"""Four jobs over slow storage: a data server in opportunistic order against four DataLoaders.

Claims (S3): with a cache of 20 % of the data, four jobs (processes of their own) read storage at most 1.03 N times per
epoch together, each gets every item exactly once per epoch, and they take at most 0.55x the time of four torch
DataLoaders with two workers each. The storage is one and the same: a file lock is held for the bytes' time at the
storage's rate by whoever reads, so all processes share one budget, and a reader waits its turn. There is no other
preparation; training steps sleep. Wall time, but nearly all of it sleep.
"""

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from shared_preparation import Process

from headway.core.wire.channel import connect
from headway.data.service.messages import FROM_SERVER

JOBS, COUNT, BATCH, EPOCHS = 4, 400, 20, 2
ITEM_BYTES, BYTES_PER_S, STEP_S = 100_000, 20e6, 0.01
"""5 ms per read: four epochs at once ask for four times what the storage gives."""
LOOKS = 8
"""Reads of the first and the last item before they are served: they are none of an epoch."""


def trained(jobs: list[Process], order: dict) -> tuple[float, int]:
    """Let all jobs train; return seconds and reads of storage, and check what each job got."""
    reads = Path(order["folder"]) / "reads"
    reads.write_bytes(b"")
    start = time.perf_counter()
    for job in jobs:
        job.begin(order)
    answers = [job.answer() for job in jobs]
    spent = time.perf_counter() - start
    for answer in answers:
        for taken in answer["taken"]:
            if sorted(taken) != list(range(COUNT)):
                raise SystemExit(f"a job got {len(taken)} items, {len(set(taken))} different, of {COUNT}")
    return spent, reads.stat().st_size


def served(jobs: list[Process], order: dict) -> tuple[float, int]:
    """Let all jobs train with a server, and end it; return seconds and reads of storage."""
    path = Path(order["folder"]) / "server.sock"
    server = {"order": "opportunistic", "threads": 4, "cache_bytes": COUNT * (ITEM_BYTES + 512) // 5, "path": str(path)}
    found = trained(jobs, {**order, "way": "slow_served", "server": server})
    channel = connect(path, types=FROM_SERVER)
    os.kill(channel.peer.pid, signal.SIGTERM)
    while path.exists():
        time.sleep(0.02)
    return found


def main() -> int:
    """Run both ways in interleaved rounds; `--full` takes five, over more epochs."""
    full = "--full" in sys.argv[1:]
    rounds, epochs = (5, 4) if full else (1, EPOCHS)
    with tempfile.TemporaryDirectory() as folder:
        order = {
            "folder": folder, "count": COUNT, "batch": BATCH, "epochs": epochs, "step_s": STEP_S,
            "item_bytes": ITEM_BYTES, "bytes_per_s": BYTES_PER_S,
        }  # fmt: skip
        jobs = [Process(sys.executable) for _ in range(JOBS)]
        try:
            for job in jobs:
                job.ready()
            figures = []
            for _ in range(rounds):
                ours_s, ours_reads = served(jobs, order)
                theirs_s, theirs_reads = trained(jobs, {**order, "way": "slow_plain"})
                figures.append((ours_s / theirs_s, (ours_reads - LOOKS) / epochs / COUNT, theirs_reads, ours_s))
        finally:
            for job in jobs:
                job.__exit__()
    ratios, reads = sorted(each[0] for each in figures), sorted(each[1] for each in figures)
    ok = statistics.median(ratios) <= 0.55 and reads[-1] <= 1.03
    print(json.dumps({
        "bench": "opportunistic_jobs", "baseline": "torch DataLoader, 2 workers each, the same storage",
        "jobs": JOBS, "items": COUNT, "epochs": epochs, "cached_fraction": 0.2, "rounds": rounds,
        "reads_per_item_and_epoch": round(reads[-1], 4), "loaders_reads": figures[0][2] / epochs / COUNT,
        "server_s": round(statistics.median(each[3] for each in figures), 2),
        "ratio": round(statistics.median(ratios), 3), "ratio_range": [round(ratios[0], 3), round(ratios[-1], 3)],
        "claim": "<=0.55 of the time, <=1.03 reads per item and epoch", "met": ok,
    }))  # fmt: skip
    return 0 if ok else 3


if __name__ == "__main__":
    sys.exit(main())
