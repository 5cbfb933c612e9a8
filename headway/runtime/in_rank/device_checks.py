"""What about this host's device would spoil a recording: each check runs in a process of its own, with a time limit.

Use `check()` beside `doctor.check()`: this process imports no torch and starts no driver. The children import torch
side by side, then measure one after another; what they leave is killed with their process group. Times in seconds.

Run on the emulated accelerator of tests/accelerator.py and on an H100: docs/devices.md has what was seen.

>>> not_asked("device events", "the kernel knows no device").value
'not asked: the kernel knows no device'
"""

from __future__ import annotations

import contextlib
import functools
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
from typing import TYPE_CHECKING, Any, Final

from headway.cost.specs import Ceilings, keep
from headway.runtime.host import device
from headway.runtime.host.device import MOST_LATE_NS, Device, module_of
from headway.runtime.host.doctor import Finding

if TYPE_CHECKING:
    import torch

LIMIT_S = 60.0
"""For all checks together."""

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
"""A script whose start is looked at; it says on how many devices its process has a context, as torch's tests ask."""


class NotAskedError(Exception):
    """This host lacks what a check asks for; the message says what."""


def check(limit_s: float = LIMIT_S) -> list[Finding]:
    """Run all of `CHECKS`, for `limit_s` seconds at most; one that could not be asked has `ok` None and says why."""
    if not device.host_has_devices():
        return [not_asked(title, "the kernel knows no device") for title, _ in CHECKS.values()]
    ends, found, missing = time.monotonic() + limit_s, list[Finding](), ""
    folder = tempfile.mkdtemp(prefix="headway-device-")
    command, env = [sys.executable, "-m", "headway.runtime.in_rank.device_checks"], {**os.environ, "TMPDIR": folder}
    children = {name: start_child([*command, name], env) for name in CHECKS}
    try:
        for name, child in children.items():
            title = CHECKS[name][0]
            if missing and name != "sharing":
                found.append(not_asked(title, missing))
                continue
            answer, problem = answer_of(child, max(ends - time.monotonic(), 0.1))
            if answer is None:
                fix = "run `headway doctor --device` again while nothing else runs on the device"
                found.append(Finding(title, problem, "an answer", False, fix))
            else:
                found.append(not_asked(title, answer["not_asked"]) if "not_asked" in answer else Finding(**answer))
            missing = "torch sees no device" if name == "device" and not found[-1].ok else missing
    finally:
        for child in children.values():
            end_child(child)
        shutil.rmtree(folder, ignore_errors=True)
    return found


def not_asked(title: str, reason: str) -> Finding:
    """Return the finding of a check that this host cannot be asked."""
    return Finding(title, f"not asked: {reason}", None, None)


def start_child(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
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
    try:
        answer: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None, (error.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
    return answer, ""


def end_child(child: subprocess.Popen[str]) -> None:
    """Kill a child's process group, whether the child has ended or not."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for pipe in (child.stdin, child.stdout, child.stderr):
        with contextlib.suppress(BrokenPipeError):
            if pipe is not None:
                pipe.close()


def answer_in_child(look: Callable[[], dict[str, Any]]) -> None:
    """Wait for the line on stdin, then print what `look` says as JSON; what it lacks is an answer too."""
    sys.stdin.readline()
    try:
        answer = look()
    except NotAskedError as cause:
        answer = {"not_asked": str(cause)}
    print(json.dumps(answer), flush=True)  # noqa: T201  # the answer of this process


def started() -> device.Device:
    """Return the first device that torch computes on, initialised; raises `NotAskedError` without one."""
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None and not torch.cuda.is_available():
        raise NotAskedError("torch sees no device")
    one = device.Device(found.type if found is not None else "cuda", 0)
    torch.zeros(1).to(repr(one))
    return one


def torch_device() -> Finding:
    """Whether torch sees a device, and which."""
    import torch

    title, fix = "device, as torch sees it", "install the build of torch for this driver; look at CUDA_VISIBLE_DEVICES"
    try:
        one = started()
    except NotAskedError:
        return Finding(title, f"none (torch {torch.__version__})", "a device", False, fix)
    count = getattr(device.module_of(one.kind), "device_count", lambda: 1)()
    return Finding(title, f"{count} x {one.name} (torch {torch.__version__})", "a device", True)


def start(launch: Sequence[str] = ("--",)) -> Finding:
    """Whether a process that is recorded starts in silence and with a context on one device alone.

    `launch` are the words between the options of `headway run` and the script's path.
    """
    with tempfile.TemporaryDirectory(prefix="headway-device-") as name:
        script = Path(name) / "start.py"
        script.write_text(START.format(place=repr(started())))
        command = [sys.executable, "-m", "headway.cli", "run", "--quiet", "--windows", "0", "--out", f"{name}/run"]
        done = subprocess.run([*command, *launch, str(script)], capture_output=True, text=True, check=False)
    said = done.stderr.strip().splitlines()
    contexts = next((line.split()[1] for line in done.stdout.splitlines() if line.startswith("contexts")), "none")
    value = f"{said[0] if said else 'nothing on stderr'}; contexts: {contexts}"
    fix = "report this line; with several contexts call torch.cuda.set_device before anything else"
    well = done.returncode == 0 and not said and contexts in ("1", "unknown")
    return Finding("start of a recorded process", value, "nothing on stderr, 1 context", well, fix)


def events(rounds: int = 50) -> Finding:
    """Whether events can be timed, and how long after its record an idle device is seen to have passed one."""
    one, late_ns = started(), []
    for _ in range(rounds):
        device.module_of(one.kind).synchronize()
        begin_ns = time.perf_counter_ns()
        event = one.record()
        while not event.query():
            pass  # the child's time limit ends this
        late_ns.append(time.perf_counter_ns() - begin_ns)
        event.elapsed_time(event)
    most = sorted(late_ns)[rounds * 9 // 10]
    value = f"median {statistics.median(late_ns) / 1e3:.0f} us, 90 % within {most / 1e3:.0f} us"
    fix = "MPS or WSL 2 may pass them late: run without it, or read `unknown.device` as part of the device's time"
    return Finding("events of an idle device", value, f"{MOST_LATE_NS / 1e6:.0f} ms", most <= MOST_LATE_NS, fix)


def cycles_per_ms() -> float:
    """Return the cycles of `torch.cuda._sleep` that take a millisecond of the host's clock."""
    import torch

    rates = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin_ns = time.perf_counter_ns()
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # torch's own, without types
        torch.cuda.synchronize()
        rates.append(20e12 / (time.perf_counter_ns() - begin_ns))
    return statistics.median(rates)


def lock() -> Finding:
    """Whether other threads of Python go on while a mark waits for its place in a full queue of launches."""
    import torch

    one, counted, ended = started(), [0], threading.Event()
    if one.kind != "cuda":
        raise NotAskedError(f"torch has no kernel of a given length for {one.kind}")

    def count() -> None:
        while not ended.wait(0.001):
            counted[0] += 1

    cycles = int(300 * cycles_per_ms())
    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch's own, without types
    for _ in range(
        8192
    ):  # CUDA's queue holds 1024 launches; the first mark that waits does so until the kernel is done
        before, begin_ns = counted[0], time.perf_counter_ns()
        one.record()
        counts, took_ns = counted[0] - before, time.perf_counter_ns() - begin_ns
        if took_ns > 20_000_000:
            break
    else:
        raise NotAskedError("8192 marks did not fill the queue of launches")
    ended.set()
    thread.join()
    fix = "torch.cuda.Event.record keeps the interpreter's lock in this torch: report its version"
    # A thread that stood still counts once at most, between the call and the look at it.
    value = f"counted to {counts} in {took_ns / 1e6:.0f} ms"
    return Finding("threads while a mark waits", value, "a thread counts on", counts >= 5, fix)


def profiler() -> Finding:
    """Whether the profiler shows kernels to this user: deep windows need that."""
    import torch

    from headway.runtime.in_rank.window_profiler import has_kernels, low_level_start, low_level_stop

    one = started()
    if not device.activities():
        raise NotAskedError(f"torch's profiler has no activity for {one.kind}")
    with tempfile.TemporaryDirectory(prefix="headway-device-") as name:
        low_level_start(host=False)
        torch.ones(64, 64).to(repr(one)).sum()
        device.module_of(one.kind).synchronize()
        low_level_stop().save(f"{name}/window.json")
        seen = has_kernels(f"{name}/window.json")
    fix = "end Nsight, DCGM or other profilers; NVreg_RestrictProfilingToAdminUsers=0, or a container's SYS_ADMIN"
    return Finding("profiler", "kernels" if seen else "no kernel", "kernels", seen, fix)


def sharing() -> Finding:
    """Whether several processes share the device (MPS), or it is a part of one (MIG): stated only."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as cause:
        raise NotAskedError(f"the driver's library is not there: {cause}") from None
    split = list[int]()
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):  # not every device knows the mode
                split += [index] * bool(pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByIndex(index))[0])
    finally:
        pynvml.nvmlShutdown()
    served = (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()
    mig = f"MIG on {split}" if split or "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", "") else "no MIG"
    return Finding("MPS and MIG", f"{'MPS' if served else 'no MPS'}, {mig}", None, True)


def rates() -> Finding:
    """What the device reaches: measured, and kept for the predictions of what precision and fused kernels would win."""
    device_here = started()
    if device_here.kind != "cuda":
        raise NotAskedError(f"the products of {device_here.kind} are not measured")
    ceilings = measure(device_here)
    path = keep(device_here.name, ceilings)
    products = ", ".join(f"{name} {rate / 1e12:.0f}" for name, rate in ceilings.flops_per_s.items())
    value = f"{products} TFLOP/s; a copy inside the device {ceilings.bytes_per_s / 1e12:.2f} TB/s; kept in {path}"
    return Finding("rates of the device", value, None, True)


# Rates of a device: large matrix products by dtype, a copy inside the device, a small launch. Each takes a few
# milliseconds at its rate on a recent device; the median of five counts, timed by events. A device whose memory is
# nearly taken is measured with smaller operands. Kept in `headway.cost.specs`, for the predictions of the compute room.

SIDE = 8192
"""Rows and columns of the matrices: large enough that every device is filled."""

NUM_LAUNCHES = 1000


def measure(device: Device) -> Ceilings:
    """Return the rates of a device; the flags of torch are put back as they were."""
    import torch

    on = torch.device(device.kind, device.index)
    memory = device.free_memory()
    side = SIDE if memory is None or memory[0] > 3 * 4 * SIDE * SIDE + (1 << 30) else SIDE // 4
    before = torch.get_float32_matmul_precision()
    rates = dict[str, float]()
    try:
        for name, dtype, precision in _dtypes():
            torch.set_float32_matmul_precision(precision)
            first, second = (torch.randn(side, side, device=on, dtype=dtype) for _ in range(2))
            rates[name] = 2 * side**3 / _seconds(device, functools.partial(torch.mm, first, second))
    finally:
        torch.set_float32_matmul_precision(before)
    source = torch.ones(side * side * 2, device=on)
    target = torch.empty_like(source)
    copy_s = _seconds(device, lambda: target.copy_(source))
    small, module = torch.zeros(8, device=on), module_of(device.kind)
    module.synchronize()
    begin = time.perf_counter()
    for _ in range(NUM_LAUNCHES):
        small.add_(1)
    launch_s = (time.perf_counter() - begin) / NUM_LAUNCHES
    module.synchronize()
    return Ceilings(flops_per_s=rates, bytes_per_s=2 * source.nbytes / copy_s, launch_s=launch_s, is_measured=True)


def _dtypes() -> list[tuple[str, torch.dtype, str]]:
    """Return the name of each rate, the dtype of its operands, and torch's precision for float32."""
    import torch

    return [
        ("fp32", torch.float32, "highest"), ("tf32", torch.float32, "high"), ("bf16", torch.bfloat16, "highest"),
        ("fp16", torch.float16, "highest"),
    ]  # fmt: skip


def _seconds(device: Device, function: Callable[[], object]) -> float:
    """Return how long the device takes for one call, the median of five."""
    for _ in range(2):
        function()
    times = []
    for _ in range(5):
        begin = device.record()
        function()
        end = device.record()
        module_of(device.kind).synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return statistics.median(times)


CHECKS: Final[Mapping[str, tuple[str, Callable[[], Finding]]]] = {
    "device": ("device, as torch sees it", torch_device),
    "start": ("start of a recorded process", start),
    "events": ("events of an idle device", events),
    "lock": ("threads while a mark waits", lock),
    "profiler": ("profiler", profiler),
    "sharing": ("MPS and MIG", sharing),
    "rates": ("rates of the device", rates),
}
"""Name -> title and check, in the order of the report."""

if __name__ == "__main__":
    look = CHECKS[sys.argv[1]][1]
    if look is not sharing:
        with contextlib.suppress(Exception):  # the check itself says what is wrong
            started()  # beside the other children, before it is this one's turn
    answer_in_child(lambda: asdict(look()))
