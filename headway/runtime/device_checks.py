"""What about this host's device would spoil a recording: each check runs in a process of its own, with a time limit.

Use `check()` beside `doctor.check()`: this process imports no torch and starts no driver. The children import torch side
by side and then measure one after another; what they leave is killed with their process group. Times in seconds.

Written after torch's documentation and the emulated accelerator of tests/accelerator.py; not run on a device yet.

>>> not_asked("device events", "the kernel knows no device").value
'not asked: the kernel knows no device'
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from headway.runtime import device
from headway.runtime.device_clock import MOST_LATE_NS
from headway.runtime.doctor import Finding

LIMIT_S = 15.0
"""For all checks together."""

MARKS = 8192
"""Marks that are recorded at most to fill a queue of launches; CUDA's holds 1024."""

START = """
import torch
model = torch.nn.Linear(8, 8).to({place!r})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(4, 8).to({place!r})).square().mean().backward()
    optimizer.step()
has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
print("contexts", sum(map(has_context, range(torch.cuda.device_count()))) if has_context is not None else "unknown")
"""
"""A script whose start is looked at; it prints on how many devices its process has a context."""


class NotAskedError(Exception):
    """This host lacks what a check asks for; the message says what."""


def check(limit_s: float = LIMIT_S) -> list[Finding]:
    """Run all of `CHECKS`, `limit_s` seconds at most; one that could not be asked has `ok` None and says why."""
    if not device.host_has_devices():
        return [not_asked(title, "the kernel knows no device") for title, _ in CHECKS.values()]
    ends = time.monotonic() + limit_s
    command = [sys.executable, "-m", "headway.runtime.device_checks"]
    findings, missing = [], ""
    folder = tempfile.mkdtemp(prefix="headway-device-")
    children = {name: start_child([*command, name], {**os.environ, "TMPDIR": folder}) for name in CHECKS}
    try:
        for name, child in children.items():
            title = CHECKS[name][0]
            if missing and name != "sharing":
                findings.append(not_asked(title, missing))
                continue
            found = finding_of(title, *answer_of(child, max(ends - time.monotonic(), 0.1)))
            findings.append(found)
            if name == "device" and found.ok is not True:
                missing = "torch sees no device"
    finally:
        for child in children.values():
            end_child(child)
        shutil.rmtree(folder, ignore_errors=True)
    return findings


def not_asked(title: str, reason: str) -> Finding:
    """Return the finding of a check that this host cannot be asked."""
    return Finding(title, f"not asked: {reason}", None, None)


def start_child(command: Sequence[str], env: Mapping[str, str] = os.environ) -> subprocess.Popen[str]:
    """Start a check in a process group of its own; it waits for a line on its stdin before it measures."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=env)


def answer_of(child: subprocess.Popen[str], limit_s: float) -> tuple[dict[str, Any] | None, str]:
    """Have a child measure; returns the JSON object of its last line, or None and what went wrong."""
    try:
        output, error = child.communicate("go\n", timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {limit_s:.0f} s"
    finally:
        end_child(child)
    lines = output.strip().splitlines()
    with contextlib.suppress(ValueError, IndexError):
        answer = json.loads(lines[-1])
        if isinstance(answer, dict):
            return answer, ""
    return None, (error.strip().splitlines() or [f"exit code {child.returncode}"])[-1]


def end_child(child: subprocess.Popen[str]) -> None:
    """Kill a child's process group, whether it has ended or not."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def finding_of(title: str, answer: dict[str, Any] | None, problem: str) -> Finding:
    """Return the finding that a child's answer tells."""
    if answer is None:
        return Finding(title, problem, "an answer", False, "run `headway doctor --device` again on an idle device")
    return not_asked(title, answer["not_asked"]) if "not_asked" in answer else Finding(**answer)


def answer_in_child(look: Callable[[], dict[str, Any]]) -> None:
    """Wait for the line on stdin, then print what `look` says as JSON; what it lacks is an answer too."""
    sys.stdin.readline()
    try:
        answer = look()
    except NotAskedError as cause:
        answer = {"not_asked": str(cause)}
    print(json.dumps(answer), flush=True)  # noqa: T201  # the answer of this process


def place_in_use() -> str:
    """Return the device that torch computes on by default, 'cuda:0', and start it; raises `NotAskedError` without one."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    kind = "cuda" if torch.cuda.is_available() else None if found is None else found.type
    if kind is None:
        raise NotAskedError("torch sees no device")
    return f"{kind}:0"


def started() -> device.Device:
    """Return the device that torch computes on, once it is initialised."""
    import torch

    place = place_in_use()
    torch.zeros(1).to(place)
    return device.Device(place.split(":")[0], 0)


def torch_device() -> Finding:
    """Whether torch sees a device, and which."""
    import torch

    limit, fix = "a device", "install the build of torch for this driver, and look at CUDA_VISIBLE_DEVICES"
    try:
        one = started()
    except NotAskedError:
        return Finding(TITLES["device"], f"none (torch {torch.__version__})", limit, False, fix)
    count = getattr(device.module_of(one.kind), "device_count", lambda: 1)()
    return Finding(TITLES["device"], f"{count} x {one.name} (torch {torch.__version__})", limit, True)


def start(launch: Sequence[str] = ("--",)) -> Finding:
    """Whether a process that is recorded starts without a warning, and with a context on one device alone.

    `launch` are the words before the script's path. torch's own tests ask for contexts the same way.
    """
    place, title = place_in_use(), TITLES["start"]
    with tempfile.TemporaryDirectory(prefix="headway-device-") as name:
        script = Path(name) / "start.py"
        script.write_text(START.format(place=place))
        command = [sys.executable, "-m", "headway.cli", "run", "--quiet", "--windows", "0", "--out", f"{name}/run"]
        done = subprocess.run([*command, *launch, str(script)], capture_output=True, text=True, check=False)
    said = done.stderr.strip().splitlines()
    contexts = next((line.split()[1] for line in done.stdout.splitlines() if line.startswith("contexts")), "no")
    value = f"{said[0] if said else 'nothing on stderr'}; contexts: {contexts}"
    fix = "report this line; with several contexts call torch.cuda.set_device before anything else"
    well = done.returncode == 0 and not said and contexts in ("1", "unknown")
    return Finding(title, value, "nothing on stderr, 1 context", well, fix)


def events(rounds: int = 50) -> Finding:
    """Whether events can be timed, and how long after its record an idle device is seen to have passed one."""
    one = started()
    late_ns: list[int] = []
    for _ in range(rounds):
        device.module_of(one.kind).synchronize()
        begin_ns = time.perf_counter_ns()
        event = one.record()
        while not event.query():
            if time.perf_counter_ns() - begin_ns > 1e9:
                raise RuntimeError("an event did not pass within a second")
        late_ns.append(time.perf_counter_ns() - begin_ns)
        event.elapsed_time(event)
    late_ns.sort()
    usual, most = statistics.median(late_ns) / 1e3, late_ns[len(late_ns) * 9 // 10]
    fix = "MPS or WSL 2 may pass them late: run without it, or read `unknown.device` as part of the device's time"
    value = f"median {usual:.0f} us, 90 % within {most / 1e3:.0f} us"
    return Finding(TITLES["events"], value, f"{MOST_LATE_NS / 1e6:.0f} ms", most <= MOST_LATE_NS, fix)


def cycles_per_ms(synchronize: Callable[[], None]) -> float:
    """Return the clock cycles of a millisecond for `torch.cuda._sleep`, by the host's clock."""
    import torch

    rates = []
    for _ in range(5):
        synchronize()
        begin_ns = time.perf_counter_ns()
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        synchronize()
        rates.append(20e12 / (time.perf_counter_ns() - begin_ns))
    return statistics.median(rates)


def lock() -> Finding:
    """Whether other threads of Python go on while a mark waits for its place in a full queue of launches."""
    import torch

    one, title = started(), TITLES["lock"]
    if one.kind != "cuda":
        raise NotAskedError(f"torch has no kernel of a given length for {one.kind}")
    rate, counted, ended = cycles_per_ms(torch.cuda.synchronize), [0], threading.Event()

    def count() -> None:
        while not ended.is_set():
            time.sleep(0.001)
            counted[0] += 1

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    waited_ns = counts = 0
    torch.cuda._sleep(int(300 * rate))  # type: ignore[no-untyped-call]
    for _ in range(MARKS):
        before, begin_ns = counted[0], time.perf_counter_ns()
        one.record()
        took_ns = time.perf_counter_ns() - begin_ns
        if took_ns > 20_000_000:  # the first that waits does so until the kernel is done
            waited_ns, counts = took_ns, counted[0] - before
            break
    ended.set()
    thread.join()
    torch.cuda.synchronize()
    if not waited_ns:
        raise NotAskedError(f"{MARKS} marks did not fill the queue of launches")
    value = f"counted to {counts} in {waited_ns / 1e6:.0f} ms"
    fix = "torch.cuda.Event.record keeps the interpreter's lock in this torch: report its version"
    # A thread that stood still counts once at most, between the call and the look at it.
    return Finding(title, value, "a thread counts on", counts >= 5, fix)


def profiler() -> Finding:
    """Whether the profiler shows kernels to this user: the permission that deep windows need."""
    import torch

    from headway.runtime.windows import has_kernels, low_level_start, low_level_stop

    one, place = started(), place_in_use()
    if not device.activities():
        raise NotAskedError(f"torch's profiler has no activity for {one.kind}")
    data = torch.ones(64, 64).to(place)
    with tempfile.TemporaryDirectory(prefix="headway-device-") as name:
        low_level_start(host=False)
        (data @ data).sum()
        device.module_of(one.kind).synchronize()
        low_level_stop().save(f"{name}/window.json")
        seen = has_kernels(f"{name}/window.json")
    fix = "end Nsight, DCGM or other profilers; NVreg_RestrictProfilingToAdminUsers=0, or a container's SYS_ADMIN"
    return Finding(TITLES["profiler"], "kernels" if seen else "no kernel", "kernels", seen, fix)


def sharing() -> Finding:
    """Whether the device is one of several processes (MPS) or a part of one (MIG): stated only."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as cause:
        raise NotAskedError(f"the driver's library is not there: {cause}") from None
    parts, uuid = [], os.environ.get("CUDA_VISIBLE_DEVICES", "")
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):  # not every device knows the mode
                current, _ = pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByIndex(index))
                parts += [index] if current else []
    finally:
        pynvml.nvmlShutdown()
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))  # noqa: S108  # the daemon's default
    shared = (pipes / "control").exists()
    mig = f"MIG on {parts}" if parts or "MIG-" in uuid else "no MIG"
    return Finding(TITLES["sharing"], f"{'MPS' if shared else 'no MPS'}, {mig}", None, True)


CHECKS: Final[Mapping[str, tuple[str, Callable[[], Finding]]]] = {
    "device": ("device, as torch sees it", torch_device),
    "start": ("start of a recorded process", start),
    "events": ("events of an idle device", events),
    "lock": ("threads while a mark waits", lock),
    "profiler": ("profiler", profiler),
    "sharing": ("MPS and MIG", sharing),
}
"""Name -> title and check, in the order of the report."""

TITLES: Final = {name: title for name, (title, _) in CHECKS.items()}
"""Name -> title."""


def main(name: str) -> None:
    """Run one check in this process, a child of `check`."""
    if name != "sharing":
        with contextlib.suppress(Exception):  # the check itself says what is wrong
            started()  # side by side with the other children, before it is this one's turn

    answer_in_child(lambda: asdict(CHECKS[name][1]()))


if __name__ == "__main__":
    main(sys.argv[1])
