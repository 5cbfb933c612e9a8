"""Predicted against measured step time of an input pipeline on throttled storage, from one run per compute time.

Claim: over cache {0, .25, .5, .75, 1} x workers {1, 2} x 3 compute times, predicted from one recorded run of each
compute time (2 workers, no cache), the median error is at most 5 %, the largest at most 12 %, and the bottleneck is
named right in at least 95 %. Peer: DS-Analyzer's closed form, speed = min(F(x), P(cores), G), fed with the true rates.
The storage is one token bucket that all workers share, the accelerator is a sleep, the work of an example is a loop of
fixed CPU time. Measure on an idle host: other work changes the recorded run and the measured ones differently.
"""

import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from headway.data.stalls import attribute
from headway.runtime.launch import LaunchOptions, launch
from headway.sim.program import Program
from headway.trace.runs import Run

CACHES = (0.0, 0.25, 0.5, 0.75, 1.0)
WORKERS = (1, 2)
COMPUTE_S = (0.004, 0.012, 0.024)
BATCH_SIZE, EXAMPLE_BYTES, EXAMPLES = 8, 16384, 240
FETCH_S, PREP_S = 0.002, 0.0005
"""Per example: its time in the pipe of the storage, its CPU time."""
WARMUP_STEPS = 8
ROUNDS = 2
"""Times that each point is measured; the faster one counts, because other work on the host only adds."""


class Storage:
    """A pipe of fixed bandwidth, shared by all processes that read: each read queues behind those before it."""

    def __init__(self, bytes_per_s):
        self.bytes_per_s, self.free_at = bytes_per_s, multiprocessing.Value("d", 0.0)

    def read(self, size):
        with self.free_at.get_lock():
            end = max(time.perf_counter(), self.free_at.value) + size / self.bytes_per_s
            self.free_at.value = end
        time.sleep(max(0.0, end - time.perf_counter()))


class Examples(Dataset):
    """Examples behind the storage, a fixed fraction of them in memory already: ready to be handed out."""

    def __init__(self, storage, cached):
        self.storage, self.cached = storage, cached

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        if index * 7919 % 1000 >= 1000 * self.cached:
            self.storage.read(EXAMPLE_BYTES)
            end = time.thread_time() + PREP_S
            while time.thread_time() < end:
                sum(range(50))
        return torch.zeros(EXAMPLE_BYTES // 4)


def train(cached, workers, compute_s):
    """Run one epoch and return its mean step time, warm-up left out."""
    torch.set_num_threads(1)
    storage = Storage(EXAMPLE_BYTES / FETCH_S)
    loader = DataLoader(Examples(storage, cached), BATCH_SIZE, shuffle=True, num_workers=workers)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 0.1)
    ends = []
    for batch in loader:
        weight.grad = batch.mean().reshape(1)
        time.sleep(compute_s)
        optimizer.step()
        ends.append(time.perf_counter())
    return (ends[-1] - ends[WARMUP_STEPS]) / (len(ends) - 1 - WARMUP_STEPS)


def record(compute_s, folder):
    """Record the run that predictions start from."""
    script = [__file__, "train", str(compute_s)]
    report = launch(LaunchOptions(out=folder, quiet=True, windows=0.0), script)
    assert report.code == 0, report.traceback
    return Program.from_run(Run.open(folder))


def main() -> None:
    """Record, predict, measure, and print one JSON line."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for compute_s in COMPUTE_S:
            program = record(compute_s, Path(folder) / f"run-{compute_s}")
            for cached in CACHES:
                for workers in WORKERS:
                    rows.append(point(program, cached, workers, compute_s))
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows]
    peer = [abs(row["closed_form_s"] / row["measured_s"] - 1) for row in rows]
    named = [row["named"] in row["bottlenecks"] for row in rows]
    result = {
        "bench": "ds_analyzer", "points": len(rows),
        "median_error": statistics.median(errors), "max_error": max(errors),
        "bottleneck_named": sum(named) / len(named), "baseline": "closed form min(F, P, G) with the true rates",
        "baseline_median_error": statistics.median(peer), "baseline_max_error": max(peer),
        "claim": "median <= 5 %, max <= 12 %, bottleneck >= 95 %",
        "met": statistics.median(errors) <= 0.05 and max(errors) <= 0.12 and sum(named) >= 0.95 * len(named),
    }  # fmt: skip
    if "--rows" in sys.argv:
        result["rows"] = rows
    print(json.dumps(result))


def point(program, cached, workers, compute_s):
    """Predict and measure one point of the grid."""
    edits = [f"workers={workers}", f"cache_fraction={cached}", "storage=shared"]
    predicted_s = program.predict(edits).step_s
    named = attribute(program, edits, fixes=False).bottleneck
    measured_s = min(train(cached, workers, compute_s) for _ in range(ROUNDS))
    # A cached example needs no preparation here, so what is left of both scales with the misses.
    misses = max(1 - cached, 1e-9)
    seconds = {
        "compute": compute_s,
        "fetch": misses * BATCH_SIZE * FETCH_S,
        "prep": misses * BATCH_SIZE * PREP_S / workers,
    }
    # One worker reads and prepares in turn: both add up. Within 15 % of a tie either answer is right.
    load = seconds["fetch"] + (seconds["prep"] if workers == 1 else 0)
    tie = 0.85 < load / compute_s < 1.15
    near = {"compute", "fetch"} if tie else {"fetch" if load > compute_s else "compute"}
    return {
        "cached": cached, "workers": workers, "compute_s": compute_s, "predicted_s": predicted_s,
        "measured_s": measured_s, "closed_form_s": max(seconds.values()), "named": named, "bottlenecks": sorted(near),
    }  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(0.0, 2, float(sys.argv[2]))
    else:
        main()
