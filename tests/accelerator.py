"""An emulated accelerator under torch: a job computes on the CPU, a device beside it works through what it launches.

What headway calls of torch is replaced (`torch.Event`, `torch.cuda.Event`, the current streams, what it asks of
`torch.cuda`), headway's own `Device` is not. A device is a few timelines, its streams, and no thread: work that is
launched begins when what was launched before in its stream is done, so the truth of its busy, idle and awaited time is
known to the nanosecond. An event takes a place in the queue of launches like any work, and passes when its stream gets
there, later by up to `late_ns` where the kind of device is like that. The host is made to wait where a real one waits:
for the device (`synchronize`, `.item()`), and where its launch queue is full; `torch.Event.record` keeps the
interpreter's lock then, as torch's does. In a forked child every call raises what torch raises there.

    python -m tests.accelerator --forward-ms 3 --backward-ms 6 -- train.py       runs train.py on it, under headway too

The script is not edited: `.to("cuda")` and `torch.cuda.synchronize()` mean this device. Tensors stay on the CPU; one
that gradients flow through, or that was copied there, counts as on the device.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import runpy
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from headway.runtime.host import device
from tests.emulated_profiler import EmulatedProfiler

now = time.perf_counter_ns

FORKED = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start "
    "method"
)
"""What torch says in a forked child."""

_OWNER = os.getpid()


class Stream:
    """One timeline of an `Accelerator`."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator, self.busy_until_ns, self.passed_ns = accelerator, 0, 0
        self._queue: deque[int] = deque()

    def launch(self, duration_ns: int, *, holds_lock: bool = False) -> tuple[int, int]:
        """Queue work, and return its start and end; waits while the queue is full."""
        while self._queue and self._queue[0] <= now():
            self._queue.popleft()
        if len(self._queue) >= self.accelerator.depth:
            moment_ns = self._queue[len(self._queue) - self.accelerator.depth]
            self.accelerator.wait_until(moment_ns, holds_lock=holds_lock)
        start = max(now(), self.busy_until_ns)
        self.busy_until_ns = start + duration_ns
        self._queue.append(self.busy_until_ns)
        return start, self.busy_until_ns

    def is_capturing(self) -> bool:
        """Whether a graph is captured."""
        _not_in_a_fork()
        return self.accelerator.capturing

    def wait_stream(self, other: Stream) -> None:
        """Have what is launched from now on begin behind what `other` was given."""
        self.busy_until_ns = max(self.busy_until_ns, other.busy_until_ns)


class Accelerator:
    """A device whose timelines are kept on the host's clock; each launch queue holds `depth` launches.

    `device` is headway's own, and asks torch, under which this one stands.
    """

    def __init__(self, *, depth: int = 1024, late_ns: int = 0, index: int = 0) -> None:
        self.depth, self.late_ns, self.index = depth, late_ns, index
        self.capturing = False
        self.profiler: EmulatedProfiler | None = None
        self.work: list[tuple[int, int]] = []
        """Start and end of all work, ns of the host's clock."""
        self.waits: list[tuple[int, int]] = []
        """The same of the host's waits for the device."""
        self.copies: list[tuple[int, int]] = []
        """The same of the host's calls that copy to the device, which is no work of it."""
        self.made_events = self.recorded_events = self.queries = 0
        self.default = Stream(self)
        self._current = threading.local()
        self._random = random.Random(index)
        _ACCELERATORS[index] = self
        _stand_under_torch()
        self.device = device.Device("cuda", index)

    @property
    def stream(self) -> Stream:
        """The current stream of this thread."""
        return getattr(self._current, "stream", None) or self.default

    @contextmanager
    def within(self, stream: Stream | None) -> Iterator[None]:
        """Have `stream` be the current one, as `torch.cuda.stream` does."""
        before, self._current.stream = getattr(self._current, "stream", None), stream
        try:
            yield
        finally:
            self._current.stream = before

    @property
    def busy_until_ns(self) -> int:
        """When the work of the default stream ends."""
        return self.default.busy_until_ns

    @property
    def live_events(self) -> int:
        """Events that were made and not given back."""
        return self.made_events - len(self.device._free)

    def launch(self, duration_ns: int, *, works: bool = True) -> None:
        """Queue work, or what is none, in the current stream; waits while the queue is full."""
        if self.capturing:
            return
        start, end = self.stream.launch(duration_ns)
        if self.profiler is not None and duration_ns:
            self.profiler.launched(start, end, works=works)
        if not works:
            return
        if self.work and self.work[-1][1] == start:
            self.work[-1] = (self.work[-1][0], end)
        else:
            self.work.append((start, end))

    def copy(self, duration_ns: int) -> None:
        """Copy from pageable memory: behind all work of the current stream, and the host waits until it is done."""
        start = now()
        self.launch(duration_ns, works=False)
        self.wait_until(self.stream.busy_until_ns)
        self.copies.append((start, now()))

    def synchronize(self) -> None:
        """Wait until all work is done."""
        self.wait_until(max(self.busy_until_ns, self.stream.busy_until_ns))

    def wait_until(self, moment_ns: int, *, holds_lock: bool = False) -> None:
        """Have the host wait; `holds_lock` keeps all threads of Python waiting with it."""
        start = now()
        while (left := moment_ns - now()) > 0:
            _SLEEP(left // 1000 + 1) if holds_lock else time.sleep(left / 1e9)
        if now() - start > 20_000:
            self.waits.append((start, now()))

    def pass_ns(self, stream: Stream, *, holds_lock: bool) -> int:
        """Record an event in a stream; returns when it passes."""
        assert not self.capturing, "an event was recorded while a graph was captured"
        self.recorded_events += 1
        moment_ns = stream.launch(0, holds_lock=holds_lock)[1] + self._random.randint(0, self.late_ns)
        stream.passed_ns = max(stream.passed_ns, moment_ns)
        return stream.passed_ns


class Event:
    """An event of an `Accelerator`, as CUDA's: asking too early is an error, and the answer is float32 milliseconds."""

    HOLDS_LOCK = True

    def __init__(self, place: Any = None, *, enable_timing: bool = False) -> None:
        _not_in_a_fork()
        assert enable_timing, "its time is asked for"
        self.passes_ns: int | None = None
        self.accelerator: Accelerator | None = None
        if place is not None:
            self._belongs_to(_ACCELERATORS[place.index])

    def _belongs_to(self, accelerator: Accelerator) -> None:
        if self.accelerator is None:
            self.accelerator = accelerator
            accelerator.made_events += 1
        assert self.accelerator is accelerator, "an event of one device was recorded on another"

    def record(self, stream: Stream) -> None:
        """Record it."""
        _not_in_a_fork()
        self._belongs_to(stream.accelerator)
        self.passes_ns = stream.accelerator.pass_ns(stream, holds_lock=self.HOLDS_LOCK)

    def query(self) -> bool:
        """Say whether it has passed; one that was not recorded has."""
        _not_in_a_fork()
        if self.accelerator is not None:
            self.accelerator.queries += 1
        return self.passes_ns is None or now() >= self.passes_ns

    def elapsed_time(self, other: Event) -> float:
        """Return the milliseconds to `other`."""
        if self.passes_ns is None or other.passes_ns is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and other.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return float(np.float32((other.passes_ns - self.passes_ns) / 1e6))

    def synchronize(self) -> None:
        """Never to be called by a recorder."""
        raise AssertionError("a timer must not wait for the device")


class CudaEvent(Event):
    """As `torch.cuda.Event`, which lets go of the interpreter's lock while it waits for a place in the queue."""

    HOLDS_LOCK = False


_ACCELERATORS: dict[int, Accelerator] = {}
"""Index -> the newest accelerator of that index."""

_SLEEP = ctypes.PyDLL(None).usleep
"""Sleeps for microseconds, and keeps the interpreter's lock."""


def _not_in_a_fork() -> None:
    if os.getpid() != _OWNER:
        raise RuntimeError(FORKED)


_BEFORE: list[tuple[Any, str, Any]] = []
"""What was replaced: owner, name, value."""


def _stand_under_torch() -> None:
    """Replace what makes events and names streams, until `leave_torch`, for devices of index n that are emulated."""
    import torch

    if _BEFORE:
        return
    general, current = torch.Event, torch.accelerator.current_stream

    class OfPlace(general):
        """Makes an event, of an emulated device where `place` is one."""

        def __new__(cls, place: Any = None, **options: Any) -> Any:
            emulated = getattr(place, "type", "") == "cuda" and place.index in _ACCELERATORS
            return Event(place, **options) if emulated else general.__new__(cls, place, **options)

    def current_stream(place: Any = None) -> Any:
        """Return the stream that is current on a device."""
        index = getattr(place, "index", place)
        if index not in _ACCELERATORS:
            return current(place)
        _not_in_a_fork()
        return _ACCELERATORS[index].stream

    for owner, name, value in (
        (torch, "Event", OfPlace), (torch.cuda, "Event", CudaEvent), (torch.cuda, "current_stream", current_stream),
        (torch.accelerator, "current_stream", current_stream),
    ):  # fmt: skip
        _BEFORE.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)


def leave_torch() -> None:
    """Put back what stands under torch, and forget the accelerators."""
    while _BEFORE:
        setattr(*_BEFORE.pop())
    _ACCELERATORS.clear()


def use_cuda(accelerator: Accelerator) -> Callable[[], None]:
    """Have `torch.cuda` say that this process uses the accelerator; returns the undo."""
    import torch

    def answers(value: Any) -> Callable[..., Any]:
        def answer(*_: object) -> Any:
            """Answer, but not in a forked child."""
            _not_in_a_fork()
            return value

        return answer

    replaced = {
        "is_initialized": lambda: os.getpid() == _OWNER,
        "is_current_stream_capturing": lambda: accelerator.capturing,
        "current_device": answers(accelerator.index),
        "get_device_name": answers("NVIDIA H100 80GB HBM3"),
        "max_memory_reserved": answers(1 << 30),
        "max_memory_allocated": answers(3 << 28),
        "get_device_properties": answers(SimpleNamespace(total_memory=80 << 30)),
        "default_generators": tuple(torch.Generator() for _ in range(accelerator.index + 1)),
    }
    before = {name: getattr(torch.cuda, name) for name in replaced}
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)

    def undo() -> None:
        for name, value in before.items():
            setattr(torch.cuda, name, value)

    return undo


def install(
    accelerator: Accelerator,
    *,
    forward_ms: float,
    backward_ms: float,
    update_ms: float,
    loss_ms: float = 0.0,
    launches: int = 1,
) -> Callable[[], None]:
    """Have what torch computes launch work on `accelerator`, in `launches` parts each; returns the undo.

    The outermost forward, `torch.autograd.backward` and update launch, and the loss just before backward; `.item()`
    waits.
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

    def losing(original: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            """Launch the loss, whose gradients are asked for next."""
            if loss_ms:
                launching(loss_ms)()
            return original(*args, **kwargs)

        return zero_grad

    hooks = torch.nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(began),
        hooks.register_module_forward_hook(ended, always_call=True),
        register_optimizer_step_pre_hook(launching(update_ms)),
    ]
    undos = [
        beneath(torch.Tensor, "item", waiting), beneath(torch.autograd, "backward", turning),
        beneath(torch.optim.Optimizer, "zero_grad", losing),
    ]  # fmt: skip
    undos.append(use_cuda(accelerator))
    # A step that was captured whole: one launch.
    whole_ns = int((forward_ms + loss_ms + backward_ms + update_ms) * 1e6)
    undos.append(beneath(torch.cuda.graphs.CUDAGraph, "replay", lambda _: lambda graph: accelerator.launch(whole_ns)))
    undo = device.emulate(lambda tensor: on(accelerator, tensor), {("cuda", accelerator.index): accelerator.device})

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


def on(accelerator: Accelerator, tensor: Any) -> device.Device | None:
    """Return the device of a tensor: gradients flow through it, or it was copied there."""
    there = getattr(tensor, "requires_grad", False) or getattr(tensor, "is_emulated", False)
    return accelerator.device if there else None


def pretend_cuda(accelerator: Accelerator, *, copy_ms: float) -> None:
    """Have 'cuda' mean the CPU for a script that is not edited; a copy there takes so long, and the host waits for it.

    It waits until the device has done what came before too, as for any copy, unless `non_blocking=True` is asked for:
    that counts as one from pinned memory, and takes no time.
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
            if not kwargs.get("non_blocking", False):
                accelerator.copy(int(copy_ms * 1e6))
            there = here.view_as(here)
            there.is_emulated = True
            return there

        return to

    torch.nn.Module.to = moved(torch.nn.Module.to)
    torch.nn.Module.cuda = lambda self, *_, **__: self
    beneath(torch.Tensor, "to", moved)
    torch.Tensor.is_pinned = lambda self: True
    beneath(torch.Tensor, "cuda", lambda _: lambda self, *_, **__: self.to("cuda"))
    beneath(torch.cuda, "synchronize", lambda _: lambda *_: accelerator.synchronize())
    torch.cuda.is_available = lambda: True
    torch.cuda.Stream, torch.cuda.stream = lambda *_: Stream(accelerator), accelerator.within


def main() -> None:
    """Run a script on an emulated accelerator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = (("forward-ms", 3.0), ("loss-ms", 0.0), ("backward-ms", 6.0), ("update-ms", 1.0), ("copy-ms", 0.0))
    for name, default in parts:
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--late-ms", type=float, default=0.0, help="events pass late by up to so much")
    parser.add_argument("--depth", type=int, default=1024, help="launches that the queue holds")
    parser.add_argument("--launches", type=int, default=1, help="launches of each part of a step")
    parser.add_argument("--profiler", type=float, help="deep windows see kernels, and slow the host by this share")
    parser.add_argument("--stays", type=float, default=0.0, help="share by which it is slowed from then on")
    parser.add_argument("--truth", type=Path, help="write what the device did to this path, rank and .json behind it")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    accelerator = Accelerator(depth=options.depth, late_ns=int(options.late_ms * 1e6))
    install(
        accelerator, forward_ms=options.forward_ms, loss_ms=options.loss_ms, backward_ms=options.backward_ms,
        update_ms=options.update_ms, launches=options.launches,
    )  # fmt: skip
    pretend_cuda(accelerator, copy_ms=options.copy_ms)
    if options.profiler is not None:
        accelerator.profiler = EmulatedProfiler(options.profiler, options.stays)
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
