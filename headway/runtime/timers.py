"""Always-on timers of the two critical segments of a step, forward and backward, without ever synchronising.

Backward is the call of `torch.autograd.backward`; forward is what lies
between a batch (or an update) and the backward that follows, so on the host
clock it is derived when the run is finalised (`headway.trace.segments`) and
costs nothing here. On CUDA the host only launches: pairs of events are
recorded around the segments and resolved steps later, when `query()` says
that they have passed, on the host's clock by a reference event with a paired
stamp. A device without events keeps the host clock, and the tables say so.
`HEADWAY_TIMERS=off` leaves all of this and the progress page out.
"""

from __future__ import annotations

import _thread
import functools
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from headway.runtime.gradients import BACKWARD as BY_BACKWARD
from headway.runtime.gradients import leaf_of
from headway.runtime.probes import Probes, now
from headway.trace.progress_page import OP, SINCE_NS
from headway.trace.vocabulary import SPANS

FORWARD, BACKWARD = SPANS["segment.forward"].code, SPANS["segment.backward"].code

LOOK_EVERY = 64
"""A power of two: at every so many updates a loss on the CPU is read for the progress page."""

MAX_PENDING = 1024
"""Pairs of events that wait to be resolved; beyond, the oldest is given up and counted."""

ANCHOR_NS = 1_000_000_000
"""Age at which the reference event is made anew: float32 milliseconds and two clocks drift apart."""

ANCHOR_POLLS = 200
"""How often a new reference event is asked before the old one is kept."""


def backward(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `torch.autograd.backward`: its time on the host; a backward inside a backward is sorted out later.

    The record of the update that follows carries it: a record less per step. Earlier micro-batches get their own.
    """
    emit, cells, steps, last = probes.emit, probes.page.cells, probes.steps, probes.last_backward
    gradients, forwarding, trainer, gap = probes.gradients, probes.forwarding, probes.trainer, probes.gap
    begun, optimized, ident = gradients.begun, gradients.optimized, _thread.get_ident
    gradients.watched[0] = True
    probes.tables["timers"] = {"clock": "host"}
    for function in (look_at, probes.page.seen_loss, probes.failed, gradients.began, gradients.ended, leaf_of, begin,
                     gradients._chosen, probes.advance, probes.wake, gap.note_loop):  # fmt: skip
        out_of_compiler(function)

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        """Run backward and record how long that took."""
        begun[0] += 1
        trainer[0] = ident()
        fresh = 0 if optimized[0] else begin(probes, args[0] if args else kwargs.get("tensors"))
        outer, forwarding[0] = forwarding[0], True
        page, start = cells[0], now()
        page[SINCE_NS] = start
        page[OP] = BACKWARD
        try:
            result = original(*args, **kwargs)
        finally:
            forwarding[0] = outer
        try:
            page[OP] = 0
            if last[1]:
                emit(BACKWARD, last[0], last[1], 0, -1, last[2])
            last[0], last[1], last[2] = start, now() - start, fresh
            if not optimized[0]:
                gradients.ended()
                gap.open[0] = True
                if gap.asks[0]:
                    gap.note_loop()
            if not steps[0] & (LOOK_EVERY - 1):
                look_at(args[0], probes)
        except Exception as cause:
            probes.failed("segment.backward", cause)
        return result

    return out_of_compiler(backward)


def begin(probes: Probes, roots: Any) -> int:
    """Return 1 if a backward from `roots` begins a new cycle of gradients; that ends a step if nothing else does."""
    try:
        fresh, ended = probes.gradients.began(roots)
        if ended:
            probes.advance(BY_BACKWARD)
    except Exception as cause:
        probes.failed("fresh gradients", cause)
        return 0
    return fresh


def out_of_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have torch.compile run the frame of `function` as it is: code that it cannot trace, where it breaks anyway.

    Without this a compiled region that calls `backward()`, which always breaks the graph, would have the compiler try
    the clock and the stores as well. What `function` calls is compiled as ever.
    """
    import torch

    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        action = frames._FrameAction
        strategy = frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
        frames.set_code_exec_strategy(function.__code__, strategy)
    elif hasattr(frames, "skip_code"):  # before torch 2.7
        frames.skip_code(function.__code__)
    return function


def look_at(root: Any, probes: Probes) -> None:
    """Keep the loss that a backward began from, where reading it disturbs nobody; note a device without events."""
    torch = sys.modules["torch"]
    if type(root) is not torch.Tensor:
        return
    kind = root.device.type
    if kind == "cpu" and root.numel() == 1 and not torch._C._len_torch_dispatch_stack():
        probes.page.seen_loss(float(root.detach()))
    elif kind not in ("cpu", "cuda"):
        reason = f"{kind} has no events that headway can time by: segments are the host's launching time"
        probes.tables["timers"] = {"clock": "host", "reason": reason}


class DeviceTimers:
    """Times segments on a device by pairs of events; `resolve` writes those that have passed."""

    def __init__(self, emit: Callable[..., None], event: Callable[[], Any], anchor: Callable[[Any], None]) -> None:
        """`event()` makes an event that can be timed; `anchor(event)` records one where nothing is queued before it."""
        self._emit, self._event, self._record_anchor = emit, event, anchor
        self._pending: deque[tuple[int, int, Any, Any, int]] = deque()
        self._begin: Any = None
        self._turn: Any = None
        self._turned_ns = self._depth = 0
        self._reference: tuple[Any, int] | None = None
        self.dropped = 0
        """Pairs that were given up."""
        self.error_ns = -1
        """Half the time that pairing the present reference event with the host's clock took; -1 before the first."""
        self.broken = False
        """Whether the device refused: then nothing is timed on it any more."""

    def mark(self) -> Any:
        """Record an event in the current stream and return it."""
        event = self._event()
        event.record()
        return event

    def ready(self) -> None:
        """Say that forward may begin: the batch is there, or the update is queued."""
        self._begin = self.mark()

    def turned(self) -> None:
        """Say that backward begins, which ends the forward before it; one inside another is part of it."""
        self._depth += 1
        if self._depth > 1:
            return
        self._turn, self._turned_ns = self.mark(), now()
        if self._begin is not None:
            self.add(FORWARD, 1, self._begin, self._turn, self._turned_ns)

    def ended(self) -> None:
        """Say that backward is launched; the next forward begins behind it, unless `ready` says later."""
        self._depth -= 1
        if self._depth == 0:
            self._begin = self.mark()
            self.add(BACKWARD, 1, self._turn, self._begin, self._turned_ns)

    def add(self, code: int, number: int, begin: Any, end: Any, launched_ns: int) -> None:
        """Queue a pair; its record gets `number` and, as a second one, the moment of its launch on the host."""
        if len(self._pending) >= MAX_PENDING:
            self._pending.popleft()
            self.dropped += 1
        self._pending.append((code, number, begin, end, launched_ns))

    def updated(self) -> None:
        """Resolve what has passed; forward may begin again."""
        self.resolve()
        self.ready()

    def resolve(self) -> None:
        """Write every pair whose end has passed, oldest first; nothing is waited for."""
        while self._pending and self._pending[0][3].query():
            reference = self._anchored()
            if reference is None:
                return
            code, number, begin, end, launched_ns = self._pending.popleft()
            start_ns = reference[1] + round(reference[0].elapsed_time(begin) * 1e6)
            self._emit(code, start_ns, round(begin.elapsed_time(end) * 1e6), number, launched_ns)

    def _anchored(self) -> tuple[Any, int] | None:
        """Return a reference event and its moment on the host's clock; None while the device answers too late."""
        if self._reference is not None and now() - self._reference[1] < ANCHOR_NS:
            return self._reference
        event = self._event()
        before = now()
        self._record_anchor(event)
        for _ in range(ANCHOR_POLLS):
            if event.query():
                after = now()
                self.error_ns = (after - before) // 2
                self._reference = (event, before + self.error_ns)
                break
        return self._reference


def device_timers(probes: Probes) -> DeviceTimers:
    """Return the process's device timers, made at first use; call it where CUDA is initialised."""
    if probes.device_timers is None:
        import torch

        cuda: Any = torch.cuda
        side = cuda.Stream()  # nothing else runs there: its events pass at once, whatever the device works on
        probes.device_timers = DeviceTimers(
            probes.emit, lambda: cuda.Event(enable_timing=True), lambda event: event.record(side)
        )
        probes.tables["timers"] = {"clock": "device events"}
    timers: DeviceTimers = probes.device_timers
    return timers


def device_backward(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `torch.autograd.backward` where there is a CUDA device: events around what begins on it."""

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        """Run backward between two events."""
        if not getattr(args[0] if args else None, "is_cuda", False):
            return original(*args, **kwargs)
        on_device(probes, lambda: device_timers(probes).turned())
        try:
            return original(*args, **kwargs)
        finally:
            on_device(probes, lambda: device_timers(probes).ended())

    return out_of_compiler(backward)


def batch_ready(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `_BaseDataLoaderIter.__next__` where there is a CUDA device: forward begins when the batch is there."""

    @functools.wraps(original)
    def __next__(self: Any) -> Any:  # noqa: N807  # the name it has in torch
        """Get the batch, then mark its moment on the device."""
        batch = original(self)
        if probes.device_timers is not None:
            on_device(probes, probes.device_timers.ready)
        return batch

    return __next__


def join_updates(register: Callable[..., Any], probes: Probes) -> Callable[[], None]:
    """Join the hooks behind every optimizer step: there old pairs are resolved, and forward may begin again."""
    import torch

    is_compiling = torch.compiler.is_compiling

    def updated(*_: object) -> None:
        if not is_compiling() and probes.device_timers is not None:
            on_device(probes, probes.device_timers.updated)

    undo: Callable[[], None] = register(updated).remove
    return undo


def on_device(probes: Probes, act: Callable[[], None]) -> None:
    """Do something with events where that is possible now; the first failure ends all timing on the device."""
    timers = probes.device_timers
    try:
        if (timers is None or not timers.broken) and usable():
            act()
    except Exception as cause:
        if probes.device_timers is not None:
            probes.device_timers.broken = True
        probes.failed("segments on the device", cause)


def event_of(probes: Probes) -> Any:
    """Return an event recorded now by device timers that are in use, None where that is impossible."""
    made: list[Any] = []
    on_device(probes, lambda: made.append(probes.device_timers.mark()))
    return made[0] if made else None


def usable() -> bool:
    """Say whether an event may be recorded now: not while a CUDA graph is captured, where it would become part."""
    cuda = sys.modules["torch"].cuda
    return bool(cuda.is_initialized()) and not cuda.is_current_stream_capturing()


def device_facts(timers: DeviceTimers) -> dict[str, Any]:
    """Return what the tables say of timing on the device, after a last look at what has passed."""
    if not timers.broken:
        timers.resolve()
    return {"clock": "device events", "reference_error_ns": timers.error_ns, "given_up": timers.dropped}


def flush_backward(probes: Probes) -> None:
    """Write the backward that no update followed."""
    start, duration, fresh = probes.last_backward
    if duration:
        probes.last_backward[1] = 0
        probes.emit(BACKWARD, start, duration, 0, -1, fresh)
