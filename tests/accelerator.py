"""An emulated accelerator: a job computes on the CPU, and a device beside it works through what it launches.

The device is a timeline, not a thread: work that is launched begins when what was launched before is done, so the truth
of its busy, idle and awaited time is known to the nanosecond. Events pass when the timeline reaches them. The host is
made to wait where a real one waits: for the device (`synchronize`, `.item()`), and where its launch queue is full.

    python -m tests.accelerator --forward-ms 3 --backward-ms 6 -- train.py       runs train.py on it, under headway too

The script is not edited: `.to("cuda")` and `torch.cuda.synchronize()` mean this device. Tensors stay on the CPU; one
that gradients flow through counts as on the device.
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
        self.live_events = self.made_events = self.queries = 0
        self._queue: deque[int] = deque()
        self._free: list[Any] = []

    def launch(self, duration_ns: int) -> None:
        """Queue work; waits while the queue is full."""
        if self.capturing:
            return
        while self._queue and self._queue[0] <= now():
            self._queue.popleft()
        if len(self._queue) >= self.depth:
            self._wait_until(self._queue[len(self._queue) - self.depth])
        start = max(now(), self.busy_until_ns)
        self.busy_until_ns = start + duration_ns
        self._queue.append(self.busy_until_ns)
        if self.work and self.work[-1][1] == start:
            self.work[-1] = (self.work[-1][0], self.busy_until_ns)
        else:
            self.work.append((start, self.busy_until_ns))

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

    The outermost forward, backward (by a hook of its root's output) and update launch; `.item()` waits.
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

    def ended(module: Any, _: Any, output: Any) -> None:
        depth[0] -= 1
        if depth[0] == 0 and isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(launching(backward_ms))

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
    put_back = beneath(torch.Tensor, "item", waiting)
    undo = device.emulate(
        lambda tensor: accelerator if getattr(tensor, "requires_grad", False) else None,
        {(accelerator.kind, accelerator.index): accelerator},
    )

    def away() -> None:
        undo()
        put_back()
        for handle in handles:
            handle.remove()

    return away


def beneath(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace a function by `make(function)` below the wrapper of a recording, if there is one; returns the undo."""
    wrapper = getattr(owner, name)
    original = getattr(wrapper, "__wrapped__", None)
    cells = [cell for cell in getattr(wrapper, "__closure__", None) or () if cell.cell_contents is original]
    if original is None or not cells:
        setattr(owner, name, make(wrapper))
        return lambda: setattr(owner, name, wrapper)
    cells[0].cell_contents = make(original)
    return lambda: setattr(cells[0], "cell_contents", original)


def pretend_cuda(accelerator: Accelerator) -> None:
    """Have 'cuda' mean the CPU for a script that is not edited."""
    import torch

    def moved(original: Callable[..., Any]) -> Callable[..., Any]:
        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            """Stay where it is, if it was to go to the device."""
            kept = [one for one in args if not str(one).startswith("cuda")]
            kwargs = {key: one for key, one in kwargs.items() if not str(one).startswith("cuda")}
            return original(self, *kept, **kwargs) if kept or kwargs else self

        return to

    for owner in (torch.Tensor, torch.nn.Module):
        owner.to = moved(owner.to)
        owner.cuda = lambda self, *_, **__: self
    beneath(torch.cuda, "synchronize", lambda _: lambda *_: accelerator.synchronize())
    torch.cuda.is_available = lambda: True


def recorded_loop(folder: Path, accelerator: Mapping[str, float], loop: Mapping[str, float]) -> list[tuple[int, int]]:
    """Record benchmarks/jobs/device_loop.py into `folder`/run on an emulated accelerator; returns all of its work, ns.

    The mappings are the options of this module and of the loop. Raises `RuntimeError` where the job fails.
    """
    truth, job = folder / "truth.json", ROOT / "benchmarks" / "jobs" / "device_loop.py"
    command = [
        sys.executable, "-m", "headway.cli", "run", "--quiet", "--out", str(folder / "run"), "--module", "--",
        "tests.accelerator", "--truth", str(truth), "--launches", "4", *options_of(accelerator),
        "--", str(job), *options_of(loop),
    ]  # fmt: skip
    environ = {**os.environ, "OMP_NUM_THREADS": "1", device.PRETEND: "device"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{loop} on {accelerator}: {done.stderr[-2000:]}")
    return [(start, end) for start, end in json.loads(truth.read_text())["work"]]


def options_of(values: Mapping[str, float]) -> list[str]:
    """Return a command line's options."""
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", f"{value:g}")]


def main() -> None:
    """Run a script on an emulated accelerator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("forward-ms", 3.0), ("backward-ms", 6.0), ("update-ms", 1.0)):
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--depth", type=int, default=1024, help="launches that the queue holds")
    parser.add_argument("--launches", type=int, default=1, help="launches of each part of a step")
    parser.add_argument("--truth", type=Path, help="write what the device did to this file")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    accelerator = Accelerator(depth=options.depth)
    install(
        accelerator, forward_ms=options.forward_ms, backward_ms=options.backward_ms, update_ms=options.update_ms,
        launches=options.launches,
    )  # fmt: skip
    pretend_cuda(accelerator)
    sys.argv = options.script[1:] if options.script[0] == "--" else options.script
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        if options.truth is not None:
            facts = {
                "work": accelerator.work, "waits": accelerator.waits, "made_events": accelerator.made_events,
                "queries": accelerator.queries,
            }  # fmt: skip
            options.truth.write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
