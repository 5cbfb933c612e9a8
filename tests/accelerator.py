"""An emulated accelerator: a job computes on the CPU, and a device beside it works through what it launches.

The device is a timeline, not a thread: work that is launched begins when what was launched before is done, so the truth
of its busy, idle and awaited time is known to the nanosecond. Events pass when the timeline reaches them. The host is
made to wait where a real one waits: for the device (`synchronize`, `.item()`), and where its launch queue is full.

    python -m tests.accelerator --forward-ms 3 --backward-ms 6 -- train.py       runs train.py on it, under headway too

The script is not edited: `.to("cuda")` and `torch.cuda.synchronize()` mean this device. Tensors stay on the CPU; one
that gradients flow through, or that was copied there, counts as on the device.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headway.runtime import device

now = time.perf_counter_ns

ROOT = Path(__file__).resolve().parent.parent


class Accelerator(device.Device):
    """A device whose timeline is kept on the host's clock, `skew_ns` ahead; the launch queue holds `depth` launches."""

    def __init__(self, *, depth: int = 1024, skew_ns: int = 7_000_000, index: int = 0) -> None:
        self.kind, self.index = "cuda", index
        self.depth, self.skew_ns = depth, skew_ns
        self.busy_until_ns = 0
        self.capturing = False
        self.work: list[tuple[int, int]] = []
        """Start and end of all work, ns of the host's clock."""
        self.waits: list[tuple[int, int]] = []
        """The same of the host's waits for the device."""
        self.copies: list[tuple[int, int]] = []
        """The same of the host's calls that copy to the device, which is no work of it."""
        self.live_events = self.made_events = self.queries = 0
        self._queue: deque[int] = deque()
        self._free: list[Any] = []

    def launch(self, duration_ns: int, *, works: bool = True) -> None:
        """Queue work, or what is none; waits while the queue is full."""
        if self.capturing:
            return
        while self._queue and self._queue[0] <= now():
            self._queue.popleft()
        if len(self._queue) >= self.depth:
            self._wait_until(self._queue[len(self._queue) - self.depth])
        start = max(now(), self.busy_until_ns)
        self.busy_until_ns = start + duration_ns
        self._queue.append(self.busy_until_ns)
        if not works:
            return
        if self.work and self.work[-1][1] == start:
            self.work[-1] = (self.work[-1][0], self.busy_until_ns)
        else:
            self.work.append((start, self.busy_until_ns))

    def copy(self, duration_ns: int) -> None:
        """Copy from pageable memory: behind all work, and the host waits until it is done."""
        start = now()
        self.launch(duration_ns, works=False)
        self.synchronize()
        self.copies.append((start, now()))

    def synchronize(self) -> None:
        """Wait until all work is done."""
        self._wait_until(self.busy_until_ns)

    def _wait_until(self, moment_ns: int) -> None:
        start = now()
        while (left := moment_ns - now()) > 0:
            time.sleep(left / 1e9)
        if now() - start > 20_000:
            self.waits.append((start, now()))

    def record(self) -> Any:
        """Record an event."""
        assert not self.capturing, "an event was recorded while a graph was captured"
        event = self._free.pop() if self._free else Event(self)
        event.passes_ns = max(now(), self.busy_until_ns)
        self.live_events += 1
        return event

    def release(self, event: Any) -> None:
        """Take one back."""
        self.live_events -= 1
        self._free.append(event)

    @property
    def is_capturing(self) -> bool:
        """Whether a graph is captured."""
        return self.capturing

    @property
    def name(self) -> str:
        """As of a real one."""
        return "NVIDIA H100 80GB HBM3"

    def memory(self) -> dict[str, int]:
        """It has none."""
        return {}


class Event:
    """An event of an `Accelerator`, as CUDA's: asking too early is an error, and the answer is float32 milliseconds."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator, self.passes_ns = accelerator, 0
        accelerator.made_events += 1

    def query(self) -> bool:
        """Say whether it has passed."""
        self.accelerator.queries += 1
        return now() >= self.passes_ns

    def elapsed_time(self, other: Event) -> float:
        """Return the milliseconds to `other`."""
        if now() < max(self.passes_ns, other.passes_ns):
            raise RuntimeError("device not ready")
        return float(np.float32((other.passes_ns - self.passes_ns) / 1e6))

    def synchronize(self) -> None:
        """Never to be called by a recorder."""
        raise AssertionError("a timer must not wait for the device")


def install(
    accelerator: Accelerator, *, forward_ms: float, backward_ms: float, update_ms: float, launches: int = 1
) -> Callable[[], None]:
    """Have what torch computes launch work on `accelerator`, in `launches` parts each; returns the undo.

    The outermost forward, `torch.autograd.backward` and update launch; `.item()` waits.
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def launching(milliseconds: float) -> Callable[..., None]:
        def launch(*_: object) -> None:
            for _ in range(launches):
                accelerator.launch(int(milliseconds * 1e6 / launches))

        return launch

    depth = [0]

    def began(module: Any, _: Any) -> None:
        depth[0] += 1
        if depth[0] == 1:
            launching(forward_ms)()

    def ended(module: Any, *_: Any) -> None:
        depth[0] -= 1

    def turning(original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            """Launch first: the gradient of the root is the first thing that a backward computes."""
            launching(backward_ms)()
            return original(tensors, *args, **kwargs)

        return backward

    def waiting(original: Callable[..., Any]) -> Callable[..., Any]:
        def item(tensor: Any) -> Any:
            """Wait for the device first."""
            accelerator.synchronize()
            return original(tensor)

        return item

    hooks = torch.nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(began),
        hooks.register_module_forward_hook(ended, always_call=True),
        register_optimizer_step_pre_hook(launching(update_ms)),
    ]
    undos = [beneath(torch.Tensor, "item", waiting), beneath(torch.autograd, "backward", turning)]
    undo = device.emulate(
        lambda tensor: on(accelerator, tensor),
        {(accelerator.kind, accelerator.index): accelerator},
    )

    def away() -> None:
        for put_back in (undo, *undos):
            put_back()
        for handle in handles:
            handle.remove()

    return away


def beneath(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace a function by `make(function)` below all wrappers of a recording, if there are any; returns the undo."""
    outermost = function = getattr(owner, name)
    holder = None
    while hasattr(function, "__wrapped__"):
        cells = [cell for cell in function.__closure__ or () if cell.cell_contents is function.__wrapped__]
        if not cells:
            break
        holder, function = cells[0], function.__wrapped__
    if holder is None:
        setattr(owner, name, make(function))
        return lambda: setattr(owner, name, outermost)
    holder.cell_contents = make(function)
    return lambda: setattr(holder, "cell_contents", function)


def on(accelerator: Accelerator, tensor: Any) -> Accelerator | None:
    """Return the device of a tensor: gradients flow through it, or it was copied there."""
    there = getattr(tensor, "requires_grad", False) or getattr(tensor, "is_emulated", False)
    return accelerator if there else None


def pretend_cuda(accelerator: Accelerator, *, copy_ms: float) -> None:
    """Have 'cuda' mean the CPU for a script that is not edited; a copy there takes so long, and the host waits for it.

    That is how copies from pageable memory are; where they take no time nothing is waited for.
    """
    import torch

    def moved(original: Callable[..., Any]) -> Callable[..., Any]:
        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            """Copy to the device, if that is where it is to go."""
            kept = [one for one in args if not str(one).startswith("cuda")]
            others = {key: one for key, one in kwargs.items() if not str(one).startswith("cuda")}
            here = original(self, *kept, **others) if kept or others else self
            goes = len(kept) < len(args) or len(others) < len(kwargs)
            if not goes or not isinstance(self, torch.Tensor) or on(accelerator, self):
                return here
            if copy_ms:
                accelerator.copy(int(copy_ms * 1e6))
            there = here.view_as(here)
            there.is_emulated = True
            return there

        return to

    torch.nn.Module.to = moved(torch.nn.Module.to)
    torch.nn.Module.cuda = lambda self, *_, **__: self
    beneath(torch.Tensor, "to", moved)
    beneath(torch.Tensor, "cuda", lambda _: lambda self, *_, **__: self.to("cuda"))
    beneath(torch.cuda, "synchronize", lambda _: lambda *_: accelerator.synchronize())
    torch.cuda.is_available = lambda: True


@dataclass(frozen=True)
class Truth:
    """What one rank's device and its host did, intervals (start, end) in ns of the host's clock."""

    work: list[tuple[int, int]]
    """The device at work, copies apart."""
    copies: list[tuple[int, int]]
    """The loop copying to the device."""
    loads: list[tuple[int, int]]
    """The loop asking its loader for a batch."""


def recorded_loop(
    folder: Path,
    accelerator: Mapping[str, float],
    loop: Mapping[str, float],
    *,
    ranks: int = 1,
    plan: Path | None = None,
) -> list[Truth]:
    """Record benchmarks/jobs/device_loop.py into `folder`/run, each rank on an emulated accelerator of its own.

    The mappings are the options of this module and of the loop; `plan` is applied. Returns what is true of each
    rank. Raises `RuntimeError` where the job fails.
    """
    job = ROOT / "benchmarks" / "jobs" / "device_loop.py"
    command = [
        sys.executable, "-m", "headway.cli", "run", "--quiet", "--out", str(folder / "run"),
        *(["--nproc-per-node", str(ranks)] if ranks > 1 else []), *(["--apply", str(plan)] if plan else []),
        "--module", "--", "tests.accelerator",
        "--truth", str(folder / "truth"), "--launches", "4", *options_of(accelerator),
        "--", str(job), "--timeline", str(folder / "loads"), *options_of(loop),
    ]  # fmt: skip
    environ = {**os.environ, "OMP_NUM_THREADS": "1", device.PRETEND: "device"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{loop} on {accelerator}: {done.stderr[-2000:]}")

    def intervals(name: str, rank: int) -> dict[str, list[tuple[int, int]]]:
        text = Path(f"{folder / name}-{rank}.json").read_text()
        return {kind: [(start, end) for start, end in found] for kind, found in json.loads(text).items()}

    return [Truth(**intervals("truth", rank), **intervals("loads", rank)) for rank in range(ranks)]


def options_of(values: Mapping[str, float]) -> list[str]:
    """Return a command line's options."""
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", f"{value:g}")]


def main() -> None:
    """Run a script on an emulated accelerator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("forward-ms", 3.0), ("backward-ms", 6.0), ("update-ms", 1.0), ("copy-ms", 0.0)):
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--depth", type=int, default=1024, help="launches that the queue holds")
    parser.add_argument("--launches", type=int, default=1, help="launches of each part of a step")
    parser.add_argument("--truth", type=Path, help="write what the device did to this path, rank and .json behind it")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    accelerator = Accelerator(depth=options.depth)
    install(
        accelerator, forward_ms=options.forward_ms, backward_ms=options.backward_ms, update_ms=options.update_ms,
        launches=options.launches,
    )  # fmt: skip
    pretend_cuda(accelerator, copy_ms=options.copy_ms)
    sys.argv = options.script[1:] if options.script[0] == "--" else options.script
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        if options.truth is not None:
            Path(f"{options.truth}-{os.environ.get('RANK', '0')}.json").write_text(
                json.dumps({"work": accelerator.work, "copies": accelerator.copies})
            )


if __name__ == "__main__":
    main()
