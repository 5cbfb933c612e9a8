"""The device path on this host's own device: which of docs/devices.md's claims hold there?

Claim: a recorded job starts in silence with one context per rank; in five jobs whose kernels take a known time, every
bucket of the ledger is within 3 points of the profiler's kernels or named unknown, what bounds the job is named right,
`input.fetch=none` is predicted within 10 %, and a device-bound job is promised at most 1.03x by what is done for its
input unless it reads in each step; marks cost at most 6 records and 1 % of a step, and stop no thread; a window opens
where it is asked for and shows kernels; a checkpoint taken between replays of a whole step's CUDA graph is that of its
step; a snapshot of 2 GB gives its memory back; exposed communication is what events around it say, and the rank that
skips a collective is named.

Paste the JSON into an issue. A check for which this host lacks something is "not asked", and says why; exit code 3 says
that one fell. `--pretend` runs what it can on the emulated accelerator of tests/accelerator.py, twice where a check falls
at first: other load on the host disturbs that one. Each check is a process of its own with a time limit. What needs a
device is written after torch's documentation, not run on one yet.
"""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.device_truth import Mix, ledger_errors, rounded
from headway.ledger.ledger import Ledger
from headway.runtime import device, device_checks
from headway.runtime.device_checks import NotAskedError, answer_in_child, answer_of, start_child
from headway.runtime.windows import has_kernels
from headway.sim.program import Program
from headway.trace.runs import Run
from tests.accelerator import Truth, options_of

ROOT = Path(__file__).resolve().parent.parent

TOKEN = "HEADWAY_ON_DEVICE"
"""Variable by whose value everything that a check started is found."""

GIB = 1 << 30

MIXES = {
    "host": Mix("host", 0.2, 12, 5, 0), "device": Mix("device", 2, 1, 12, 0),
    "read": Mix("read", 1, 1, 12, 0, read_every=1), "loader": Mix("loader", 14, 0.5, 8, 0),
    "copy": Mix("copy", 1, 0.5, 12, 0, copy_ms=1.0),
}  # fmt: skip
"""What bounds a job -> the job; on a device `copy_ms` stands for a batch of `WIDE` numbers in pageable memory."""

WIDE = 1 << 19
"""Numbers of each of the four examples of a batch whose copy is waited for."""


@dataclass(frozen=True)
class Host:
    """Where a check runs."""

    folder: Path
    """Its own, removed afterwards."""

    pretend: bool
    """Whether the device is emulated."""

    def run(self, script: list[str], *words: str, copy_ms: float = 0.0, code: int = 0) -> tuple[Path, str]:
        """Record a script under `headway run WORDS`; returns the run folder and what came on stderr.

        Raises `RuntimeError` where it does not exit with `code`.
        """
        run = Path(tempfile.mkdtemp(dir=self.folder)) / "run"
        stand_in = ["benchmarks._pretend_device", "--truth", f"{run.parent}/device", "--copy-ms", f"{copy_ms}", "--"]
        done = subprocess.run(
            [sys.executable, "-m", "headway.cli", "run", "--quiet", "--out", str(run), *words,
             *(["--module"] if self.pretend or not script[0].endswith(".py") else []), "--",
             *(stand_in if self.pretend else []), *script],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != code:
            raise RuntimeError(f"{script} exited with {done.returncode}: {done.stderr[-1500:]}")
        # The profiler's own, by torch 2.13, at the first start of a window.
        said = [line for line in done.stderr.splitlines() if line and not line.startswith("USDT:")]
        return run, "\n".join(said)

    def place(self) -> str:
        """Return the device for tensors; raises `NotAskedError` without one."""
        return "cpu" if self.pretend else device_checks.place_in_use()


def shared(name: str) -> Callable[[Host], dict[str, Any]]:
    """Return a check of `headway doctor --device`."""

    def look(host: Host) -> dict[str, Any]:
        if host.pretend:
            from benchmarks._pretend_device import stand_in

            if name in ("profiler", "sharing"):
                raise NotAskedError("an emulated device has no driver")
            stand_in()
        if name == "start":
            found = device_checks.start(
                ("--module", "--", "benchmarks._pretend_device", "--") if host.pretend else ("--",)
            )
        else:
            found = device_checks.CHECKS[name][1]()
        return {"value": found.value, "limit": found.limit, "met": found.ok}

    return look


def job(host: Host, mix: Mix, *, steps: int = 120, words: tuple[str, ...] = (), **options: Path) -> tuple[Path, str]:
    """Record the loop of jobs/device_sleeps.py."""
    numbers = {"steps": steps, "load-ms": mix.load_ms, "host-ms": mix.host_ms, "device-ms": mix.device_ms,
               "read-every": mix.read_every, "launches": 4 if host.pretend else 16,
        "width": WIDE if mix.copy_ms and not host.pretend else 8}  # fmt: skip
    paths = [word for name, path in options.items() for word in (f"--{name}", str(path))]
    profiled = ["--profile"] if "truth" in options and not host.pretend else []
    script = ["benchmarks.jobs.device_sleeps", *options_of(numbers), *paths, *profiled]
    return host.run(script, *words, copy_ms=mix.copy_ms)


def mix(name: str) -> Callable[[Host], dict[str, Any]]:
    """Return the check of one job's ledger and predictions."""

    def look(host: Host) -> dict[str, Any]:
        host.place()
        one, loop = MIXES[name], host.folder / "loop"
        run, _ = job(host, one, truth=loop)
        found = json.loads(loop.read_text())
        if host.pretend:
            found["work"] = json.loads((run.parent / "device").read_text())["work"]
        if not found["work"]:
            raise NotAskedError("the profiler shows no kernel of the device: see the check of its permission")
        recorded = Run.open(run)
        copies = found["copies"] if one.copy_ms else []
        points, bound = ledger_errors(recorded, [Truth(found["work"], copies, found["loads"])])
        unknown = max(points.pop("unknown"), 0.0)
        program = Program.from_run(recorded)
        promised = {
            edit: program.predict([edit], interval=False, max_discrepancy=0.2).speedup
            for edit in ("input.fetch=none", "workers=2")
        }
        # Without a profiler on either side, which slows launches.
        base = run if host.pretend else job(host, one)[0]
        gained = 1.0
        if not host.pretend or name == "loader":
            after, _ = job(host, Mix(name, 0.0, one.host_ms, one.device_ms, 0, one.read_every, one.copy_ms))
            gained = Program.from_run(Run.open(base)).measured_s / Program.from_run(Run.open(after)).measured_s
        error = abs(promised["input.fetch=none"] / gained - 1)
        held = one.bound == "device" and not one.read_every
        return {
            "bound": bound, "by_bucket": rounded(points), "unknown": round(unknown, 2),
            "predicted": {edit: round(value, 3) for edit, value in promised.items()},
            "measured": round(gained, 3) if not host.pretend or name == "loader" else None,
            "met": bound in (one.bound, "unknown") and all(-3 - unknown <= value <= 3 for value in points.values())
            and (error <= 0.1 or (host.pretend and name != "loader")) and (not held or max(promised.values()) <= 1.03),
        }  # fmt: skip

    return look


def cost(host: Host) -> dict[str, Any]:
    """What marks cost: calls, and time of the training thread, per step."""
    host.place()
    path, one = host.folder / "cost", MIXES["device"]
    run, _ = job(host, one, cost=path)
    calls = json.loads(path.read_text())
    step_s = Program.from_run(Run.open(run)).measured_s
    share = calls["cpu_ns"] / 1e9 / step_s
    return {**{name: round(value, 2) for name, value in calls.items()}, "step_s": round(step_s, 5),
            "share": round(share, 5), "met": 0 < calls["record"] <= 6 and (share <= 0.01 or host.pretend)}  # fmt: skip


def window(host: Host) -> dict[str, Any]:
    """A window that is asked for opens at its step, in silence, and shows kernels."""
    host.place()
    run, said = job(host, MIXES["device"], words=("--window-at", "30"))
    found = [path.name for path in (run / "windows").glob("r0-w*.json*")]
    names = list((run / "windows").glob("r0-w30.json*"))
    if names and names[0].suffix == ".gz":
        plain = host.folder / "window.json"
        subprocess.run(["gzip", "-dc", str(names[0])], stdout=plain.open("wb"), check=True)
        names = [plain]
    seen = bool(names) and has_kernels(str(names[0]))
    return {"windows": found, "kernels": seen, "stderr": said[:300],
            "bound": Ledger.of(Run.open(run)).bound,
            "met": bool(names) and not said and (seen or host.pretend)}  # fmt: skip


def graph(host: Host) -> dict[str, Any]:
    """A whole step as one CUDA graph, 200 replays, a save after every fiftieth: each is the state of its step.

    When pretending, the step runs eagerly on the CPU instead. The capture follows torch's notes on CUDA graphs: a few
    steps on a side stream first, static inputs, gradients that the graph's own pool holds.
    """
    import torch

    import headway
    from headway.checkpoint import Keep

    place, replays = host.place(), 200
    data = torch.randn(replays, 64, 256, generator=torch.Generator().manual_seed(0)).to(place)
    root = host.folder / "checkpoints"

    def train(saving: bool) -> tuple[list[Any], dict[int, list[Any]]]:
        """Return the parameters at the end, and those at each save."""
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).to(place)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        static, kept = torch.zeros(64, 256).to(place), {}

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            model(static).square().mean().backward()
            optimizer.step()

        saver = headway.Checkpointer(root, model=model, opt=optimizer, keep=Keep(last=9)) if saving else None
        if host.pretend:
            for _ in range(3):
                step()
            replay = step
        else:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            whole = torch.cuda.CUDAGraph()
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(whole):
                step()
            replay = whole.replay
        tickets = []
        for number in range(replays):
            static.copy_(data[number])
            replay()
            if saver is not None and number % 50 == 49:
                tickets.append(saver.save(number + 1))
                kept[number + 1] = [one.detach().clone() for one in model.parameters()]
        for ticket in tickets:
            ticket.result()
        return [one.detach().clone() for one in model.parameters()], kept

    (plain, _), (saved, kept) = train(False), train(True)
    torn = []
    for number, wanted in kept.items():
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).to(place)
        headway.Checkpointer(root, model=model, opt=torch.optim.SGD(model.parameters(), lr=0.01)).restore(number)
        if not all(map(torch.equal, model.parameters(), wanted)):
            torn.append(number)
    same = all(map(torch.equal, plain, saved))
    return {"replays": replays, "saves": len(kept), "torn": torn, "same_end": same, "graph": not host.pretend,
            "met": len(kept) == 4 and not torn and same}  # fmt: skip


def snapshot(host: Host) -> dict[str, Any]:
    """A snapshot of 2 GB, or a quarter of what is free, inside the device: durable, whole, and its memory back."""
    import torch

    import headway

    place = host.place()
    one = None if host.pretend else device_checks.started()
    free = one.free_memory() if one is not None else (GIB // 4, GIB)
    if free is None:
        raise NotAskedError("this kind of device does not say how much memory is free")
    host_free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = min(2 * GIB, free[0] // 4, host_free // 4, shutil.disk_usage(host.folder).free // 4)
    if size < 64 << 20:
        raise NotAskedError(f"{size} bytes are a quarter of what is free: 64 MiB are needed")
    model = torch.nn.ParameterList(torch.full((size // 32,), float(index)) for index in range(8)).to(place)
    mode = "auto" if host.pretend else "device"
    saver, started_ns = (
        headway.Checkpointer(host.folder / "big", model=model, device_snapshot=mode),
        time.perf_counter_ns(),
    )
    before = one.free_memory() if one is not None else None
    ticket = saver.save(1)
    held_ns = time.perf_counter_ns() - started_ns
    ticket.result()
    saver.finish() if hasattr(saver, "finish") else None
    after = one.free_memory() if one is not None else None
    missing = 0 if before is None or after is None else before[0] - after[0]
    for tensor in model:
        tensor.data.zero_()
    saver.restore(1)
    whole = all(bool((tensor == index).all()) for index, tensor in enumerate(model))
    return {"bytes": size, "held_s": round(held_ns / 1e9, 3), "missing_bytes": missing, "whole": whole,
            "met": whole and missing <= 64 << 20}  # fmt: skip


RANKS = """
import os, sys, time, torch, torch.distributed as dist
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda(), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
flat, skip, waits = torch.zeros(64 << 20, device="cuda"), int(sys.argv[1]), []
begin = [torch.cuda.Event(enable_timing=True) for _ in range(100)]
events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(100)]
for step, (start, end) in enumerate(events):
    begin[step].record()
    optimizer.zero_grad()
    model(torch.ones(8, 64, device="cuda")).square().mean().backward()
    torch.cuda._sleep(10_000_000)
    start.record()
    if not (rank == 1 and step == skip):
        dist.all_reduce(flat)
    end.record()
    optimizer.step()
torch.cuda.synchronize()
exposed = sum(start.elapsed_time(end) for start, end in events[50:])
print("exposed", exposed / begin[50].elapsed_time(events[-1][1]), flush=True)
dist.destroy_process_group()
"""
"""100 steps on NCCL with a collective that nothing hides; rank 1 leaves out that of a step; the share it takes."""


def two_devices(host: Host) -> Path:
    """Write the script of `RANKS`; raises `NotAskedError` with fewer than two devices."""
    if host.pretend:
        raise NotAskedError("one emulated device")
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        raise NotAskedError(f"{count} device")
    script = host.folder / "ranks.py"
    script.write_text(RANKS)
    return script


def exposure(host: Host) -> dict[str, Any]:
    """Communication that nothing hides is what the script's own events say, within 5 points."""
    script = two_devices(host)
    run, said = host.run([str(script), "-1"], "--nproc-per-node", "2", "--window-at", "60")
    line = next(line for line in (run / "logs/r0.out").read_text().splitlines() if line.startswith("exposed"))
    ledger = Ledger.of(Run.open(run))
    inside = sum(ledger.step_ns.sum(axis=1).tolist())
    share = dict(zip(ledger.ledger_ns, ledger.step_ns.sum(axis=1).tolist(), strict=False)).get("comm", 0) / inside
    true = float(line.split()[1])
    return {"exposed": round(share, 4), "by_events": round(true, 4), "stderr": said[:300],
            "met": abs(share - true) <= 0.05}  # fmt: skip


def skipped(host: Host) -> dict[str, Any]:
    """The rank that skips a collective is named."""
    run, _ = host.run([str(two_devices(host)), "60"], "--nproc-per-node", "2", "--hang-timeout", "10", code=1)
    command = [sys.executable, "-m", "headway.cli", "hang", str(run), "--json"]
    answer = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    return {"ranks": answer.get("ranks"), "met": answer.get("ranks") == [1]}


CHECKS: dict[str, tuple[float, Callable[[Host], dict[str, Any]]]] = {
    **{name: (30, shared(name)) for name in device_checks.CHECKS},
    **{f"truth {name}": (60, mix(name)) for name in MIXES},
    "cost": (30, cost), "window": (40, window), "graph": (30, graph), "snapshot": (60, snapshot),
    "exposure": (60, exposure), "skipped": (90, skipped),
}  # fmt: skip
"""Name -> its time limit in seconds, and the check; docs/devices.md has a row for each."""


def outcome(name: str, *, pretend: bool) -> dict[str, Any]:
    """Run a check in a child and take away what it leaves; returns its row."""
    limit_s, folder, token = CHECKS[name][0], tempfile.mkdtemp(prefix="headway-on-device-"), secrets.token_hex(8)
    env = {**os.environ, TOKEN: token, "TMPDIR": folder, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.on_device", "--check", name, *(["--pretend"] if pretend else [])]
    begin = time.monotonic()
    try:
        answer, problem = answer_of(
            start_child(command, {**env, **({device.PRETEND: "device"} if pretend else {})}), limit_s
        )
    finally:
        left = sweep(token)
        shutil.rmtree(folder, ignore_errors=True)
    row: dict[str, Any] = {"check": name, "seconds": round(time.monotonic() - begin, 1), "left_behind": left}
    if answer is None:
        return {**row, "state": "fell", "reason": problem}
    if "not_asked" in answer:
        return {**row, "state": "not asked", "reason": answer["not_asked"]}
    return {**row, "state": "held" if answer.pop("met") is not False else "fell", **answer}


def sweep(token: str) -> list[str]:
    """Kill what carries the token in its environment; returns the command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if f"{TOKEN}={token}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120])
                os.kill(int(path.name), signal.SIGKILL)
    return [line for line in found if line]


def main() -> int:
    """Run the checks, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretend", action="store_true", help="on the emulated accelerator")
    parser.add_argument("--only", choices=CHECKS, help="one check")
    parser.add_argument("--check", choices=CHECKS, help=argparse.SUPPRESS)
    parser.add_argument("--full", action="store_true", help="the same")
    options = parser.parse_args()
    if options.check:
        host = Host(Path(tempfile.gettempdir()), options.pretend)
        answer_in_child(lambda: CHECKS[options.check][1](host))
        return 0
    rows = []
    for name in [options.only] if options.only else CHECKS:
        if not options.pretend and not device.host_has_devices():
            rows.append({"check": name, "state": "not asked", "reason": "the kernel knows no device"})
            continue
        rows.append(outcome(name, pretend=options.pretend))
        if options.pretend and rows[-1]["state"] == "fell":
            print(json.dumps(rows.pop()), file=sys.stderr)
            rows.append({**outcome(name, pretend=True), "tries": 2})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    states = [row["state"] for row in rows]
    met = False if "fell" in states else True if "held" in states else None
    print(json.dumps({
        "bench": "on_device", "pretend": options.pretend, **{state: states.count(state) for state in
        ("held", "fell", "not asked")}, "rows": rows, "met": met,
    }))  # fmt: skip
    return 3 if met is False else 0


if __name__ == "__main__":
    sys.exit(main())
