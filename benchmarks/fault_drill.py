"""Nine real faults on a job of four ranks: is each seen within 3 s, with its class and rank; and is a quiet one let be?

Claim: with steps of 50 ms and `--hang-timeout 2`, the faults of `headway drill` are seen within 3 s, at least 25 of 27
get the right class, and each one that strikes a single rank names it. Beside that a job whose steps vary lognormally,
and whose rank 0 evaluates once for 20 s without a sign of life, ends without an incident. Three faults and 40 s of the
quiet job by default; `--full` plays all nine with three seeds, and 5 min of the quiet job.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._command import headway
from headway.fault.torch_drill import FAULTS

JOB = """
import os, sys, time
import torch, torch.distributed as dist
import headway
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
model, opt = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(4096, 16)), batch_size=8)
ckpt = headway.Checkpointer(sys.argv[1], model=net, opt=opt)
step = ckpt.restore().step or 0
while step < 5000:
    for (rows,) in loader:
        begin = time.perf_counter()
        opt.zero_grad()
        (model(rows) - 1).square().mean().backward()
        opt.step()
        step += 1
        if step % 10 == 0:
            ckpt.save(step)
        time.sleep(max(0.05 - (time.perf_counter() - begin), 0.0))
"""

QUIET = """
import os, sys, time
import numpy as np
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, until = dist.get_rank(), time.monotonic() + float(sys.argv[1])
draws = np.random.default_rng(rank)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
go, step = torch.ones(1), 0
while go.item():
    opt.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    opt.step()
    step += 1
    time.sleep(float(draws.lognormal(np.log(0.04), 0.6)))
    if step == 100 and rank == 0:
        model.eval()
        time.sleep(20.0)
        model.train()
    go.fill_(float(time.monotonic() < until))
    dist.all_reduce(go, op=dist.ReduceOp.MIN)
dist.destroy_process_group()
"""

RANKS, SEEN_S = 4, 3.0


def drilled(faults: list[str], seed: int, folder: Path) -> dict[str, Any]:
    """Play faults on the job; returns the answer of the drill."""
    (folder / "job.py").write_text(JOB)
    return headway(
        "drill", "--faults", ",".join(faults), "--seed", seed, "--out", folder / f"run-{seed}", "--nproc-per-node",
        RANKS, "--hang-timeout", 2, "--quiet", "--", folder / "job.py", folder / f"ckpts-{seed}", expect=(0, 2, 3),
    )  # fmt: skip


def quiet(seconds: float, folder: Path) -> int:
    """Run the quiet job; returns the number of its incidents."""
    (folder / "quiet.py").write_text(QUIET)
    answer = headway(
        "run", "--out", folder / "quiet", "--nproc-per-node", RANKS, "--max-restarts", 2, "--hang-timeout", 2,
        "--quiet", "--", folder / "quiet.py", seconds,
    )  # fmt: skip
    return len(answer["incidents"])


def main() -> int:
    """Play, and print one JSON line; 3 where the claim is missed."""
    full = "--full" in sys.argv
    faults, seeds = ([*FAULTS], (0, 1, 2)) if full else (["kill", "stop", "skipped_collective"], (0,))
    with tempfile.TemporaryDirectory() as name:
        answers = [drilled(faults, seed, Path(name)) for seed in seeds]
        incidents = quiet(300.0 if full else 40.0, Path(name))
    rows = [row for answer in answers for row in answer["faults"]]
    seen = [row for row in rows if row["detected_ns"] is not None]
    delays = sorted((row["detected_ns"] - row["injected_ns"]) / 1e9 for row in seen)
    classes = sum(row["class"] == FAULTS[row["name"]].cls for row in rows)
    single = [row for row in rows if row["rank"] is not None]
    named = sum(row["ranks"] == [row["rank"]] for row in single)
    late = [[row["name"], round((row["detected_ns"] - row["injected_ns"]) / 1e9, 2)] for row in seen
            if row["detected_ns"] - row["injected_ns"] > SEEN_S * 1e9]  # fmt: skip
    result = {
        "bench": "fault_drill", "faults": len(rows), "seen": len(seen), "class_right": classes,
        "rank_right": named, "rank_wanted": len(single), "median_s": round(delays[len(delays) // 2], 2),
        "longest_s": round(delays[-1], 2), "late": late,
        "false_alarms": sum(answer["false_alarms"] for answer in answers), "quiet_incidents": incidents,
        "wrong": [[row["name"], row["class"], row["rank"], row["ranks"]] for row in rows if not row["ok"]],
        "ettr": [round(answer["ettr"], 3) for answer in answers],
        "claim": "late == [], class_right >= 25/27, rank_right == rank_wanted, no false alarm, quiet_incidents == 0",
    }  # fmt: skip
    print(json.dumps(result))
    good = len(seen) == len(rows) and not late and classes * 27 >= 25 * len(rows) and named == len(single)
    return 0 if good and not incidents and not result["false_alarms"] else 3


if __name__ == "__main__":
    sys.exit(main())
