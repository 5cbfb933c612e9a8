"""Twelve jobs with one injected loss each, on a quiet host and beside a process that takes a core: one answer?

Claim: the verdict of both runs names the same cause and the same fix, or says that the fix is not resolved, in 12 of 12
jobs, and the cause is the injected one. Peer in the same runs: the largest bucket of the ledger but useful work, as a
profile shows it.
Usage: `python benchmarks/verdict_steady.py [KIND ...]`.
"""

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from _command import headway
from _other_load import spinning

JOB = '''
import gc, json, logging, os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

kind, folder = sys.argv[1], sys.argv[2]
edit = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
ranks = int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
torch.set_num_threads(1)


class Examples(Dataset):
    def __init__(self, size, wait_s=0.0, turns=0, noise=False):
        self.size, self.wait_s, self.turns, self.noise = size, wait_s, turns, noise

    def __len__(self):
        return self.size

    def __getitem__(self, at):
        time.sleep(self.wait_s)
        total = 0
        for turn in range(self.turns):
            total += turn * at
        picture = torch.full((64,), float(at % 7))
        return picture + torch.rand(64) if self.noise else picture + total % 3


class Slow(logging.Handler):
    def emit(self, record):
        time.sleep(0.004)


class Net(torch.nn.Module):
    """Computes for some 8 ms a step, most of it asleep, as a device would."""

    def __init__(self):
        super().__init__()
        width = 1500 if kind == "comm" else 64
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width))

    def forward(self, batch):
        slow = kind.startswith("straggler") and os.environ.get("RANK") == (kind[9:] or "1")
        time.sleep(0.026 if slow else 0.006)
        return self.layers(batch)


net = Net()
model = net
if ranks > 1:
    import torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), 0.001)
wait = {"fetch": 0.002, "augmented": 0.002, "restarts": 0.0002}.get(kind, 0.0)
turns = {"prep": 20000}.get(kind, 0)
workers = 1 if kind == "restarts" else 0
size = 80 if kind == "restarts" else 800
settings = {"num_workers": workers, **edit.get("loader", {})}
loader = DataLoader(Examples(size, wait, turns, kind == "augmented"), batch_size=8, **settings)
log = logging.getLogger("job")
log.addHandler(Slow())
if "queue" in edit:
    import logging.handlers, queue
    q = queue.Queue(); behind = logging.handlers.QueueListener(q, *log.handlers); behind.start()
    log.handlers = [logging.handlers.QueueHandler(q)]
held, steps = [], 0
if "collect_every" in edit:
    gc.freeze()
    gc.disable()
for epoch in range(20 if kind == "restarts" else 2):
    for batch in loader:
        if kind == "script":
            time.sleep(0.01)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if "collect_every" in edit and steps % edit["collect_every"] == 0:
            gc.collect()
        if kind == "logging" and steps % edit.get("log_every", 1) == 0:
            log.warning("loss %s", loss.item())
        if kind == "garbage":
            held.append([{"at": [at]} for at in range(3000)])
            held = held[-150:]
        if kind == "saves" and steps % 8 == 0:
            path = os.path.join(folder, f"last-{os.environ.get('RANK', '0')}.pt")
            torch.save({"model": net.state_dict(), "more": torch.zeros(8_000_000)}, path)
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        if kind == "eval" and steps % 20 == 0:
            model.eval()
            with torch.no_grad():
                for _ in range(20):
                    model(batch)
            model.train()
if "queue" in edit:
    behind.stop()
if ranks > 1:
    dist.destroy_process_group()
'''

KINDS: dict[str, tuple[str, ...]] = {
    "fetch": ("input.fetch",),
    "augmented": ("input.fetch",),
    "prep": ("input.prep", "input.fetch"),
    "restarts": ("input.fetch", "input.prep"),
    "script": ("host.script",),
    "logging": ("host.logging",),
    "garbage": ("host.gc",),
    "saves": ("checkpoint.stall",),
    "eval": ("eval",),
    "straggler": ("straggler.rank",),
    "comm": ("comm.exposed",),
    "none": ("",),
}
"""Kind of a job -> the causes that are its injected one."""

TWO_RANKS = ("straggler", "comm")


def answered(kind: str, script: Path, folder: Path, name: str) -> dict[str, Any]:
    """Record one job; return the verdict, and the peer's bucket."""
    ranks = ["--nproc-per-node", 2] if kind in TWO_RANKS else []
    headway("run", "--quiet", "--out", folder / name, *ranks, "--", script, kind, folder)
    why = headway("why", folder / name)
    lost = {bucket: amount for bucket, amount in why["ledger"].items() if bucket != "useful"}
    said = why["verdict"]
    return {
        "cause": said["cause"], "fix": said["remedy"] or re.sub(r"[\d.,]+", "#", said["fix"]),
        "allow": said["allow"], "peer": max(lost, key=lambda bucket: lost[bucket]),
    }  # fmt: skip


def main() -> int:
    """Record every job twice, in turn, and print one JSON line."""
    rows: dict[str, Any] = {}
    chosen = [kind for kind in sys.argv[1:] if kind != "--full"] or list(KINDS)
    with tempfile.TemporaryDirectory(prefix="headway-steady-") as temporary:
        folder = Path(temporary)
        script = folder / "train.py"
        script.write_text(JOB)
        for kind in chosen:
            quiet = answered(kind, script, folder, f"{kind}-quiet")
            with spinning(1.0):
                busy = answered(kind, script, folder, f"{kind}-busy")
            unsure = any("not resolved" in answer["fix"] for answer in (quiet, busy))
            same = all(quiet[key] == busy[key] for key in (("cause",) if unsure else ("cause", "fix", "allow")))
            rows[kind] = {"quiet": quiet, "busy": busy, "same": same, "right": quiet["cause"] in KINDS[kind]}
            print(kind, json.dumps(rows[kind]), file=sys.stderr, flush=True)
    same, right = (sum(row[key] for row in rows.values()) for key in ("same", "right"))
    print(json.dumps({
        "bench": "verdict_steady", "jobs": len(rows), "same": same, "right": right,
        "peer_same": sum(row["quiet"]["peer"] == row["busy"]["peer"] for row in rows.values()),
        "peer": "the largest bucket but useful work", "rows": rows,
        "claim": "the same cause and fix in 12 of 12, the injected one", "met": same == right == len(rows),
    }))  # fmt: skip
    return 0 if same == right == len(rows) else 3


if __name__ == "__main__":
    sys.exit(main())
