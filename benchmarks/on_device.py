"""The device path on this host's own device: which of docs/devices.md's claims hold there?

Claim: a recorded job starts in silence with one context per rank; in five jobs whose kernels take a known time, every
bucket of the ledger is within 3 points of the profiler's kernels or named unknown, what bounds the job is named right,
`input.fetch=none` is predicted within 10 %, and a device-bound job is promised at most 1.03x by what is done for its
input unless it reads in each step; marks cost at most 6 records and 1 % of a step, and stop no thread; a window opens
where it is asked for and shows kernels, of which the ledger tells the share within 3 points, and steps behind it take
no longer than those before, within 1 %; in four jobs with real kernels the ledger's share of a device at work is within
3 points of CUPTI's or named unknown, with and without a window; recording adds at most 1 % or 60 us to a step of FSDP2
and DDP on one rank and of a plain loop; a checkpoint taken between replays of a whole step's CUDA graph is that of its
step; a snapshot of 2 GB gives its memory back; exposed communication is what events around it say, and the rank that
skips a collective is named.

Paste the JSON into an issue. A check for which this host lacks something is "not asked", and says why; exit code 3
says that one fell. `--pretend` runs what it can on the emulated accelerator of tests/accelerator.py, twice where a
check falls at first: other load on the host disturbs that one. Each check is a process of its own with a time limit.
docs/devices.md has what was seen on a device.
"""

import argparse
import contextlib
import gzip
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _device_windows
from benchmarks._command import ROOT, python_path
from benchmarks.device_truth import Mix, ledger_errors, rounded
from headway.core.units import GIB, MIB
from headway.ledger.answers.ledger import Ledger
from headway.ledger.buckets import BUCKETS
from headway.runtime.host import device
from headway.runtime.in_rank import device_checks
from headway.runtime.in_rank.device_checks import NotAskedError, answer_in_child, answer_of, start_child
from headway.sim.recorded.program import Program
from headway.trace.recording.runs import Run
from tests.recorded_device import Truth, options_of

TOKEN = "HEADWAY_ON_DEVICE"
"""Variable by whose value everything that a check started is found."""

MIXES = {
    "host": Mix("host", 0.2, 30, 12, 0), "device": Mix("device", 2, 1, 12, 0),
    "read": Mix("read", 1, 1, 12, 0, read_every=1), "loader": Mix("loader", 36, 18, 12, 0),
    "copy": Mix("copy", 1, 0.5, 12, 0, copy_ms=1.0),
}  # fmt: skip
"""What bounds a job -> the job; on a device `copy_ms` stands for examples of 2 MB each in pageable memory."""

STEPS = 120
"""Steps of a job."""

LAUNCHES = Mix("host", 0, 0, 0.05, 12)
"""A job whose kernels are shorter than their launches."""


@dataclass(frozen=True)
class Host:
    """Where a check runs."""

    folder: Path
    """Its own, removed afterwards."""
    pretend: bool
    """Whether the device is emulated."""

    def place(self) -> str:
        """Return where tensors are to lie."""
        return "cpu" if self.pretend else repr(device_checks.started())

    def run(self, script: list[str], *words: str, copy_ms: float = 0.0, stand_in: bool = True) -> tuple[Path, str]:
        """Record a script under `headway run WORDS`; returns the run folder and what came on stderr.

        When pretending, `stand_in` puts a device under it; without, the script is a module that brings its own.
        """
        run = Path(tempfile.mkdtemp(dir=self.folder)) / "run"
        truth = ["--truth", f"{run.parent}/device", "--copy-ms", f"{copy_ms}"]
        under = ["benchmarks._pretend_device", *truth, "--"] if self.pretend and stand_in else []
        module = ["--module"] if self.pretend or not script[0].endswith(".py") else []
        command = [sys.executable, "-m", "headway.cli", "run", "--quiet", "--out", str(run), *words, *module, "--"]
        done = subprocess.run([*command, *under, *script], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode and "--hang-timeout" not in words:
            raise RuntimeError(f"{script} exited with {done.returncode}: {done.stderr[-1500:]}")
        # "USDT:" begins what torch 2.13 says itself where its profiler starts.
        return run, "\n".join(line for line in done.stderr.splitlines() if line and not line.startswith("USDT:"))

    def job(self, mix: Mix, *words: str, steps: int = STEPS, **paths: Path) -> tuple[Path, str]:
        """Record `steps` of the loop of jobs/device_sleeps.py, which writes its options' `paths`."""
        numbers = {"steps": steps, "load_ms": mix.load_ms, "host_ms": mix.host_ms, "device_ms": mix.device_ms,
                   "read_every": mix.read_every, "launches": 64 if mix is LAUNCHES else 4 if self.pretend else 16,
                   "width": 1 << 19 if mix.copy_ms and not self.pretend else 8}  # fmt: skip
        written = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
        profiled = ["--profile"] if "truth" in paths and not self.pretend else []
        turn = ["--turn", f"{self.folder}/turn"]
        script = ["benchmarks.jobs.device_sleeps", *options_of(numbers), *written, *profiled, *turn]
        return self.run(script, *words, copy_ms=mix.copy_ms)

    def jobs(self, *jobs: Callable[[], Path]) -> list[Path]:
        """Record jobs, one of which trains at a time; on a device the others start and end beside it, in seconds."""
        with ThreadPoolExecutor(1 if self.pretend else len(jobs)) as pool:
            return [future.result() for future in [pool.submit(job) for job in jobs]]


def shared(name: str) -> Callable[[Host], dict[str, Any]]:
    """Return a check of `headway doctor --device`."""

    def look(host: Host) -> dict[str, Any]:
        if host.pretend:
            from benchmarks._pretend_device import stand_in

            if name in ("profiler", "sharing", "rates"):
                raise NotAskedError("an emulated device has no driver")
            stand_in()
        if name == "start" and host.pretend:
            found = device_checks.start(("--module", "--", "benchmarks._pretend_device", "--"))
        else:
            found = device_checks.CHECKS[name][1]()
        return {"value": found.value, "limit": found.limit, "met": found.ok}

    return look


def truth(name: str) -> Callable[[Host], dict[str, Any]]:
    """Return the check of one job's ledger and predictions."""

    def look(host: Host) -> dict[str, Any]:
        mix, loop = MIXES[name], host.folder / "loop"
        jobs = [lambda: host.job(mix, truth=loop)[0]]
        # On a device the profiler slows launches: what is predicted and measured goes without it.
        jobs += [] if host.pretend else [lambda: host.job(mix)[0]]
        jobs += [] if host.pretend and name != "loader" else [lambda: host.job(replace(mix, load_ms=0.0))[0]]
        run, *others = host.jobs(*jobs)
        found = json.loads(loop.read_text()) | (json.loads((run.parent / "device").read_text()) if host.pretend else {})
        if not found["work"]:
            raise NotAskedError("the profiler shows no kernel of the device")
        copies = found["copies"] if mix.copy_ms else []
        points, bound = ledger_errors(Run.open(run), [Truth(found["work"], copies, found["loads"])])
        unknown = max(points.pop("unknown"), 0.0)
        program = Program.from_run(Run.open(run if host.pretend else others[0]))
        promised = {
            edit: program.predict([edit], interval=False, max_discrepancy=0.2).speedup
            for edit in ("input.fetch=none", "workers=2")
        }
        met = bound in (mix.bound, "unknown") and all(-3 - unknown <= value <= 3 for value in points.values())
        if name == "device":
            met = met and max(promised.values()) <= 1.03
        measured = None
        if name == "loader" or not host.pretend:
            measured = program.measured_s / Program.from_run(Run.open(others[-1])).measured_s
            # On the emulated device the host's cores are shared with what else runs there.
            met = met and abs(promised["input.fetch=none"] / measured - 1) <= (0.2 if host.pretend else 0.1)
        return {"bound": bound, "by_bucket": rounded(points), "unknown": unknown, "predicted": promised,
                "measured": measured, "met": met}  # fmt: skip

    return look


def launches(host: Host) -> dict[str, Any]:
    """A job of short kernels is not called bound by its device, and a window shows what the device did meanwhile."""
    loop = host.folder / "loop"
    run, windowed = host.jobs(
        lambda: host.job(LAUNCHES, truth=loop)[0], lambda: host.job(LAUNCHES, "--window-at", "60")[0]
    )
    found = json.loads(loop.read_text()) | (json.loads((run.parent / "device").read_text()) if host.pretend else {})
    points, bound = ledger_errors(Run.open(run), [Truth(found["work"], [], found["loads"])])
    unknown = points.pop("unknown")
    met = bound in ("host", "unknown") and all(-3 - unknown <= value <= 3 for value in points.values())
    seen = {}
    for name, one in (("events", run), ("window", windowed)):
        steps_ns = dict(zip(BUCKETS, Ledger.of(Run.open(one)).step_ns.sum(axis=1).tolist(), strict=True))
        seen[name] = {key: round(steps_ns[key] / sum(steps_ns.values()), 3) for key in ("useful", "host", "unknown")}
    # What the window says of steps that nobody profiled: the kernels' time, by the profile, of their own wall.
    kernels_ns = sum(end - start for start, end in found["work"]) / STEPS
    true_share = kernels_ns / float(np.median(Ledger.of(Run.open(windowed)).step_wall_ns[16:60]))
    met = met and (host.pretend or abs(seen["window"]["useful"] - true_share) <= 0.03)
    return {"bound": bound, "by_bucket": rounded(points), "unknown": unknown, "shares": seen,
            "true_share": round(true_share, 3), "met": met}  # fmt: skip


def after_window(host: Host) -> dict[str, Any]:
    """Steps of short kernels take as long behind a window as before it: the profiler's library has left."""
    run, _ = host.job(LAUNCHES, "--window-at", "300", steps=600)
    wall_ns = Ledger.of(Run.open(run)).step_wall_ns
    before, behind = float(np.median(wall_ns[16:300])), float(np.median(wall_ns[316:]))
    ratio = behind / before
    return {"before_s": before / 1e9, "behind_s": behind / 1e9, "ratio": round(ratio, 4),
            "met": ratio <= (1.1 if host.pretend else 1.01)}  # fmt: skip


def cost(host: Host) -> dict[str, Any]:
    """What marks cost: calls, and CPU time of the training thread, per step."""
    path = host.folder / "cost"
    run, _ = host.job(MIXES["device"], cost=path)
    calls = json.loads(path.read_text())
    share = calls["cpu_ns"] / 1e9 / Program.from_run(Run.open(run)).measured_s
    # An emulated event is Python, and slower than a driver's.
    return {**calls, "share": share, "met": 0 < calls["record"] <= 6 and (share <= 0.01 or host.pretend)}


def window(host: Host) -> dict[str, Any]:
    """A window that is asked for opens at its step, in silence, and shows kernels."""
    run, said = host.job(MIXES["device"], "--window-at", "30")
    found = sorted((run / "windows").glob("r0-w30.json*"))
    seen = any(b'"kernel"' in (gzip.open if one.suffix == ".gz" else open)(one).read() for one in found)
    return {"windows": len(found), "kernels": seen, "stderr": said[:300],
            "met": bool(found) and not said and (seen or host.pretend)}  # fmt: skip


def graph(host: Host) -> dict[str, Any]:
    """A whole step as one CUDA graph, 200 replays, a save after every fiftieth: each is the state of its step.

    When pretending, the step runs eagerly on the CPU. The capture follows torch's notes on CUDA graphs: some steps on a
    side stream first, static inputs, gradients made anew inside the graph.
    """
    import torch

    import headway
    from headway.checkpoint import Keep

    place, root = host.place(), host.folder / "checkpoints"
    data = torch.randn(200, 64, 256, generator=torch.Generator().manual_seed(0)).to(place)

    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).to(place)
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    def copied(model: Any) -> list[Any]:
        return [one.detach().clone() for one in model.parameters()]

    def train(*, saves: bool) -> tuple[list[Any], dict[int, list[Any]]]:
        """Return the parameters at the end, and at each save."""
        model, optimizer = made()
        static, kept, tickets = torch.zeros(64, 256).to(place), dict[int, list[Any]](), []
        saver = headway.Checkpointer(root, model=model, opt=optimizer, keep=Keep(last=9)) if saves else None

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            model(static).square().mean().backward()
            optimizer.step()

        replay = step
        if not host.pretend:
            side, whole = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(whole):
                step()
            replay = whole.replay
        for number, batch in enumerate(data, 1):
            static.copy_(batch)
            replay()
            if saver is not None and number % 50 == 0:
                tickets.append(saver.save(number))
                kept[number] = copied(model)
        for ticket in tickets:
            ticket.result()
        return copied(model), kept

    (plain, _), (saved, kept) = train(saves=False), train(saves=True)
    torn = []
    for number, wanted in kept.items():
        model, optimizer = made()
        headway.Checkpointer(root, model=model, opt=optimizer).restore(number)
        torn += [] if all(map(torch.equal, model.parameters(), wanted)) else [number]
    same = all(map(torch.equal, plain, saved))
    return {"graph": not host.pretend, "torn": torn, "same_end": same, "met": len(kept) == 4 and not torn and same}


def snapshot(host: Host) -> dict[str, Any]:
    """A snapshot of 2 GB, or a quarter of what is free, inside the device: whole, and its memory given back.

    What a twentieth of it holds may be kernels, which a driver loads when they are first used.
    """
    import torch

    import headway

    one = None if host.pretend else device_checks.started()
    free = (MIB << 8, GIB) if one is None else one.free_memory()
    if free is None:
        raise NotAskedError("this kind of device does not say how much memory is free")
    host_free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = min(2 * GIB, min(free[0], host_free, shutil.disk_usage(host.folder).free) // 4)
    if size < 64 * MIB:
        raise NotAskedError(f"{size} bytes are a quarter of what is free in device, host and folder: 64 MiB are needed")
    model = torch.nn.ParameterList(torch.full((size // 32,), float(index)) for index in range(8)).to(host.place())
    mode: Any = "auto" if host.pretend else "device"
    saver = headway.Checkpointer(host.folder / "big", model=model, device_snapshot=mode)
    before, begin = one.free_memory() if one is not None else None, time.perf_counter()
    ticket = saver.save(1)
    held_s = time.perf_counter() - begin
    ticket.result()
    after = one.free_memory() if one is not None else None
    missing = before[0] - after[0] if before is not None and after is not None else 0
    for tensor in model:
        tensor.data.zero_()
    saver.restore(1)
    whole = all(bool((tensor == index).all()) for index, tensor in enumerate(model))
    return {"bytes": size, "held_s": held_s, "missing_bytes": missing, "met": whole and missing <= size // 20}


RANKS = """
import os, sys, time, torch, torch.distributed as dist
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda(), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
flat, skip = torch.zeros(64 << 20, device="cuda"), int(sys.argv[1])
events = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(100)]
for step, (begin, ready, done) in enumerate(events):
    begin.record()
    optimizer.zero_grad()
    model(torch.ones(8, 64, device="cuda")).square().mean().backward()
    torch.cuda._sleep(10_000_000)
    ready.record()
    if not (rank == 1 and step == skip):
        dist.all_reduce(flat)
    done.record()
    optimizer.step()
if rank == 1 and skip >= 0:
    time.sleep(600)
torch.cuda.synchronize()
print("contexts", sum(map(torch._C._cuda_hasPrimaryContext, range(torch.cuda.device_count()))))
if rank == 0:
    exposed = sum(ready.elapsed_time(done) for _, ready, done in events[50:])
    print("exposed", exposed / sum(begin.elapsed_time(done) for begin, _, done in events[50:]), flush=True)
dist.destroy_process_group()
"""
"""100 steps on NCCL with a collective that nothing hides, and its share of them; rank 1 leaves out that of a step."""


def on_two_devices(host: Host, skip: int, *words: str) -> tuple[Path, str]:
    """Record `RANKS`; raises `NotAskedError` with fewer than two devices."""
    if host.pretend:
        raise NotAskedError("one emulated device")
    import torch

    if torch.cuda.device_count() < 2:
        raise NotAskedError(f"{torch.cuda.device_count()} CUDA devices")
    script = host.folder / "ranks.py"
    script.write_text(RANKS)
    return host.run([str(script), f"{skip}"], "--nproc-per-node", "2", *words)


def exposure(host: Host) -> dict[str, Any]:
    """Communication that nothing hides is what the script's own events say, within 5 points; one context per rank."""
    run, said = on_two_devices(host, -1, "--window-at", "60")
    output = [(run / f"logs/r{rank}.out").read_text() for rank in (0, 1)]
    contexts = [int(text.split("contexts ")[1].split()[0]) for text in output]
    by_events = float(output[0].split("exposed ")[1].split()[0])
    found = dict(zip(BUCKETS, Ledger.of(Run.open(run)).step_ns.sum(axis=1).tolist(), strict=True))
    # Of the work alone: the window itself takes seconds, between two steps.
    share = found["comm"] / max(found["comm"] + found["useful"], 1)
    return {"exposed": share, "by_events": by_events, "contexts": contexts, "stderr": said[:300],
            "met": abs(share - by_events) <= 0.05 and contexts == [1, 1]}  # fmt: skip


def skipped(host: Host) -> dict[str, Any]:
    """The rank that skips a collective is named."""
    run, _ = on_two_devices(host, 99, "--hang-timeout", "10")
    command = [sys.executable, "-m", "headway.cli", "hang", str(run), "--json"]
    answer = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    named = sorted({rank for origin in answer["origins"] for rank in origin["ranks"]})
    return {"named": named, "met": named == [1]}


CHECKS: dict[str, tuple[float, Callable[[Host], dict[str, Any]]]] = {
    **{name: (30, shared(name)) for name in device_checks.CHECKS},
    **{f"truth {name}": (90, truth(name)) for name in MIXES},
    "launches": (60, launches), "cost": (60, cost), "window": (60, window),
    "after a window": (60, after_window),
    **{f"window truth {name}": (90, _device_windows.window_truth(name)) for name in _device_windows.MODELS},
    "overhead": (90, _device_windows.overhead), "graph": (60, graph),
    "snapshot": (60, snapshot),
    "exposure": (60, exposure), "skipped": (90, skipped),
}  # fmt: skip
"""Name -> its time limit in seconds, and the check; docs/devices.md has a row for each."""


def outcome(name: str, *, pretend: bool, keep: Path | None = None) -> dict[str, Any]:
    """Run a check in a child, and take away what it leaves, or copy it into `keep`; returns its row."""
    folder, token, begin = tempfile.mkdtemp(prefix="headway-on-device-"), secrets.token_hex(8), time.monotonic()
    env = {**os.environ, TOKEN: token, "TMPDIR": folder, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT)}
    env |= {device.PRETEND: "device"} if pretend else {}
    command = [sys.executable, "-m", "benchmarks.on_device", "--check", name, *(["--pretend"] if pretend else [])]
    try:
        answer, problem = answer_of(start_child(command, env), CHECKS[name][0])
    finally:
        left = sweep(token)
        if keep is not None:
            shutil.copytree(folder, keep / name.replace(" ", "-"), dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    row: dict[str, Any] = {"check": name, "seconds": round(time.monotonic() - begin, 1), "left_behind": left}
    if answer is None or "not_asked" in answer:
        state, reason = ("fell", problem) if answer is None else ("not asked", answer["not_asked"])
        return {**row, "state": state, "reason": reason}
    return {**row, "state": "held" if answer.pop("met") is not False else "fell", **answer}


def sweep(token: str) -> list[str]:
    """Kill the processes that carry the token in their environment; returns their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{TOKEN}={token}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120])
                os.kill(int(path.name), signal.SIGKILL)
    return found


def main() -> int:
    """Run the checks, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretend", action="store_true", help="on the emulated accelerator")
    parser.add_argument("--only", choices=CHECKS, nargs="+", help="these checks")
    parser.add_argument("--keep", type=Path, help="keep what the checks recorded in this folder")
    parser.add_argument("--check", choices=CHECKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check:
        host = Host(Path(tempfile.gettempdir()), options.pretend)
        answer_in_child(lambda: CHECKS[options.check][1](host))
        return 0
    rows = list[dict[str, Any]]()
    missing = "" if options.pretend or device.host_has_devices() else "the kernel knows no device"
    for name in options.only or CHECKS:
        if missing:
            rows.append({"check": name, "state": "not asked", "reason": missing})
            continue
        rows.append(outcome(name, pretend=options.pretend, keep=options.keep))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if options.pretend and rows[-1]["state"] == "fell":
            rows[-1] = {**outcome(name, pretend=True), "tries": 2}
        missing = "torch sees no device" if name == "device" and rows[-1]["state"] == "fell" else ""
    states = [row["state"] for row in rows]
    met = False if "fell" in states else True if "held" in states else None
    counts = {state: states.count(state) for state in ("held", "fell", "not asked")}
    print(json.dumps({"bench": "on_device", "pretend": options.pretend, **counts, "rows": rows, "met": met}))
    return 3 if met is False else 0


if __name__ == "__main__":
    sys.exit(main())
