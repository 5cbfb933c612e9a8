"""Twenty seeded SIGKILLs of ranks, of the launcher and of the warm process: does the job end as if nothing happened?

Claim: two DDP ranks with `headway.Checkpointer` and headway's DataLoader, under `headway run --max-restarts`, end with
the loss of every step bit-equal to a run that nobody disturbed, each step having taken the same examples, of which
`headway data audit` counts every committed one once; and 5 s after the end no process of the job is left. Of the kills
two hit the launcher (the job is then started by hand again) and two the warm process; the others a rank. Six kills by
default, one of the launcher and one of the warm process among them; `--full` all twenty.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._command import headway
from headway.core.rng import stream
from headway.trace.recording.incident import read_incidents

JOB = """
import json, os, pathlib, signal, sys, time
import torch, torch.distributed as dist
import headway
from headway.checkpoint import Keep
from headway.data import DataLoader
from torch.nn.parallel import DistributedDataParallel

folder, plan = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.randn(16, generator=torch.Generator().manual_seed(index)), index

def warm_process():
    parent = os.getppid()
    children = pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    ranks = [(folder / f"pid-{one}").read_text() for one in (0, 1)]
    return next((int(one) for one in children if one not in ranks), None)

dist.init_process_group("gloo")
rank = dist.get_rank()
(folder / f"pid-{rank}").write_text(str(os.getpid()))
torch.manual_seed(3)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
model, opt = DistributedDataParallel(net), torch.optim.Adam(net.parameters(), lr=1e-2)
loader = DataLoader(Numbers(), batch_size=4, shuffle=True, seed=5, rank=rank, world_size=2)
ckpt = headway.Checkpointer(folder / "ckpts", model=net, opt=opt, loader=loader, keep=Keep(last=2))
step = ckpt.restore().step or 0
while step < plan["steps"]:
    for inputs, ids in loader:
        opt.zero_grad()
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        opt.step()
        step += 1
        with open(folder / f"log-{rank}", "ab", buffering=0) as log:
            log.write(json.dumps([step, loss.item().hex(), sorted(ids.tolist())]).encode() + b"\\n")
        time.sleep(0.03)
        if step % 5 == 0:
            ckpt.save(step)
        due = next((row for row in plan["kills"] if not (folder / f"killed-{row[0]}").exists()), None)
        if due is not None and step >= due[0] and rank == due[1]:
            target = {"rank": os.getpid(), "launcher": os.getppid(), "warm": warm_process()}[due[2]]
            if target is not None:
                (folder / f"killed-{due[0]}").write_text(due[2])
                os.kill(target, signal.SIGKILL)
        if step == plan["steps"]:
            break
ckpt.close()
dist.destroy_process_group()
"""


def kills(count: int, others: int) -> list[list[object]]:
    """Return (step, rank, whom) of each kill: `others` of them hit the launcher, as many the warm process."""
    draws = stream(11, "restart_kills")
    steps = 40 + draws.integers(8, 20, count).cumsum()
    whom = ["launcher", "warm"] * others + ["rank"] * (count - 2 * others)
    draws.shuffle(whom)
    return [[int(step), int(draws.integers(2)), name] for step, name in zip(steps, whom, strict=True)]


def train(folder: Path, plan: dict[str, object]) -> list[dict[str, int]]:
    """Run the job until it is done, starting it again where its launcher was killed; returns counts per launch."""
    (folder / "job.py").write_text(JOB)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HEADWAY_CKPT_LINGER_S": "20"}
    launches = []
    for number in range(10):
        out = folder / f"run-{number}"
        line = [
            sys.executable, "-m", "headway.cli", "run", "--quiet", "--out", str(out), "--nproc-per-node", "2",
            "--max-restarts", "30", "--grace-s", "5", "--", str(folder / "job.py"), str(folder), json.dumps(plan),
        ]  # fmt: skip
        done = subprocess.run(line, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=500)
        rows = read_incidents(out)
        launches.append({"failures": len(rows), "warm": sum(row.warm for row in rows)})
        if done.returncode == 0:
            return launches
        if done.returncode != -9:
            raise RuntimeError(f"the job ended with {done.returncode}:\n{done.stderr[-3000:]}")
        time.sleep(1.0)  # the ranks get SIGTERM from the kernel, and end
    raise RuntimeError("the job did not end")


def kept(folder: Path) -> list[dict[int, tuple[str, tuple[int, ...]]]]:
    """Return of each rank: step -> the loss and the examples of its last time."""
    logs = []
    for rank in (0, 1):
        rows = [json.loads(line) for line in (folder / f"log-{rank}").read_text().splitlines()]
        logs.append({step: (loss, tuple(ids)) for step, loss, ids in rows})
    return logs


def left(folder: Path) -> list[str]:
    """Return the processes whose command line or environment names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in text:
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200])
    return found


def main() -> int:
    """Train undisturbed and disturbed, compare, and print one JSON line."""
    plan = kills(20, 2) if "--full" in sys.argv else kills(6, 1)
    steps = int(plan[-1][0]) + 12
    with tempfile.TemporaryDirectory() as calm, tempfile.TemporaryDirectory() as wild:
        train(Path(calm), {"steps": steps, "kills": []})
        begin_s = time.perf_counter()
        launches = train(Path(wild), {"steps": steps, "kills": plan})
        wall_s = time.perf_counter() - begin_s
        time.sleep(5.0)
        orphans = left(Path(wild))
        ours, theirs = kept(Path(wild)), kept(Path(calm))
        done = len(list(Path(wild).glob("killed-*")))
        audit = headway("data", "audit", *sorted(Path(wild).glob("run-*")), expect=(0, 3))
        unequal = sum(ours[rank].get(step) != theirs[rank][step] for rank in (0, 1) for step in theirs[rank])
    result = {
        "bench": "restart_kills",
        "kills": done,
        "launches": len(launches),
        "failures": sum(row["failures"] for row in launches),
        "warm": sum(row["warm"] for row in launches),
        "steps": steps,
        "unequal_steps": unequal,
        "exact_epochs": sum(row["verdict"] == "exact" for row in audit["epochs"]),
        "epochs": len(audit["epochs"]),
        "wrong_epochs": audit["wrong"],
        "orphans": len(orphans),
        "wall_s": round(wall_s, 1),
        "claim": "unequal_steps == 0, wrong_epochs == 0 and orphans == 0",
    }
    print(json.dumps(result))
    for line in orphans:
        print(line, file=sys.stderr)
    return 0 if done == len(plan) and not unequal and not orphans and not audit["wrong"] else 3


if __name__ == "__main__":
    sys.exit(main())
