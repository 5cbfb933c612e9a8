"""What watching costs behind the first pass: looks whether a script has changed what its batches are read from.

Claim: at most 1 % of a step, for steps of 5 and of 0.5 ms, batches of 10 KB and of 10 MB, under `data.cache` and under
`data.workers`: CPU time of the training thread inside the looks of a pass over the wall time of the pass, median of 20,
less what the same two readings of its clock take around nothing (`clock`: 4 us where training has emptied the caches).
Between those passes are others without looks: the median of the pairs' differences in CPU time per step, with its
quartiles, shows what looks cost outside themselves. The accelerator is a sleep. Beside it stands what looks before each
batch cost, as `--verify` takes them. Peer: the same remedy without looks. Usage: `python benchmarks/watch_cost.py`.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _command import ROOT

LIMIT = 0.01
REMEDIES = {
    "data.cache": {"bytes": 3 * 10**9},
    "data.workers": {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": True, "pin_memory": False},
}
SHAPES = {(step_ms, kilobytes) for step_ms in (0.5, 5.0) for kilobytes in (10, 10_000)}

JOB = """
import json, os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from headway.data.guard.process_state import Looks

step_s, numbers, batches = float(os.environ["STEP_MS"]) / 1000, int(os.environ["KB"]) * 256, int(os.environ["BATCHES"])

class Rows(Dataset):
    def __init__(self):
        self.scale, self.transforms = 2.0, [abs, float]

    def __len__(self):
        return batches

    def __getitem__(self, index):
        time.sleep(0.0005)
        return torch.full((numbers,), self.scale * index)

original, inside = Looks.are_alike, [0.0]

def timed(look_at):
    def are_alike(looks, read, look):
        looks.each_batch, began = each, time.thread_time()
        try:
            return look_at(looks, read, look)
        finally:
            inside[0] += time.thread_time() - began
    return are_alike

paced = timed(original)
ways = {"paced": (paced, False), "without": (timed(lambda looks, read, look: True), False), "each": (paced, True)}
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader, cpu, wall, shares = DataLoader(Rows(), 1), {name: [] for name in ways}, [], {name: [] for name in ways}
for number in range(2 + 3 * int(os.environ["ROUNDS"])):
    name = "paced" if number < 2 else list(ways)[number % 3]
    Looks.are_alike, each = ways[name]
    rows, began, inside[0] = [], time.perf_counter(), 0.0
    before = time.thread_time()
    for batch in loader:
        time.sleep(step_s)
        optimizer.zero_grad()
        model(batch[:, :8]).sum().backward()
        optimizer.step()
        now = time.thread_time()
        rows.append(now - before)
        before = now
    if number >= 2:
        cpu[name].append(sum(rows) / len(rows))
        wall.append((time.perf_counter() - began) / batches)
        shares[name].append(inside[0] / wall[-1] / batches)
print(json.dumps({"cpu_ms": {name: [1000 * value for value in values] for name, values in cpu.items()},
                  "step_ms": 1000 * sorted(wall)[len(wall) // 2], "shares": shares}))
"""


def measured(remedy: str, step_ms: float, kilobytes: int, folder: Path) -> dict[str, Any]:
    """Run the job under one remedy; return what looks cost of a step."""
    script, plan = folder / "job.py", folder / "plan.json"
    script.write_text(JOB)
    rows = [{"name": remedy, "parameters": REMEDIES[remedy]}]
    plan.write_text(json.dumps({"schema": "headway.plan-file/1", "remedies": rows}))
    env = {
        **os.environ, "OMP_NUM_THREADS": "1", "STEP_MS": str(step_ms), "KB": str(kilobytes),
        "BATCHES": "100" if kilobytes < 1000 else "40", "ROUNDS": "20",
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "headway.cli",
        "run",
        "--quiet",
        "--out",
        str(folder / "run"),
        "--apply",
        str(plan),
    ]
    done = subprocess.run(
        [*command, "--no-verify", "--", str(script)], cwd=ROOT, env=env, capture_output=True, text=True, check=True,
        timeout=400,
    )  # fmt: skip
    seen = json.loads(done.stdout.splitlines()[-1])
    (applied,) = json.loads((folder / "run" / "run.json").read_text())["applied"]
    if not applied["applied"] or "withdrawn" in applied["facts"]:
        raise SystemExit(f"{remedy} was not in force: {applied}")
    cpu = seen["cpu_ms"]

    def share(name: str) -> list[float]:
        return [(one - other) / seen["step_ms"] for one, other in zip(cpu[name], cpu["without"], strict=True)]

    paced, clock = seen["shares"]["paced"], statistics.median(seen["shares"]["without"])
    low, mid, high = (round(value, 4) for value in statistics.quantiles(share("paced"), n=4))
    return {
        "remedy": remedy, "compute_ms": step_ms, "batch_kb": kilobytes, "step_ms": round(seen["step_ms"], 2),
        "share": round(statistics.median(paced) - clock, 4), "clock": round(clock, 4), "pairs": [low, mid, high],
        "share_of_each": round(statistics.median(share("each")), 4),
        "cpu_ms_without": round(statistics.median(cpu["without"]), 3),
    }  # fmt: skip


def main() -> int:
    """Measure all; print one JSON line."""
    rows = []
    for remedy in REMEDIES:
        for step_ms, kilobytes in sorted(SHAPES):
            with tempfile.TemporaryDirectory(prefix="headway-watch-") as folder:
                rows.append(measured(remedy, step_ms, kilobytes, Path(folder)))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    met = all(row["share"] <= LIMIT for row in rows)
    print(json.dumps({
        "bench": "watch_cost", "rows": rows, "peer": "the same remedy without looks",
        "claim": "<= 1 % of a step behind the first pass", "met": met,
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
