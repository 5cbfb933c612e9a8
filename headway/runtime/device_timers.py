"""What a device does in each step, by at most a few events per micro-batch, without ever waiting for it.

Events are recorded where the host stands at a batch, behind a model, at the turn to backward, and behind backward and
update. Steps later, when one `query()` says that the last event of a step has passed, all that the step tells is
written: forward and backward as the device ran them, and when it was at work. Where the host is far behind its
device, an event is passed at once: until then the device had nothing to do.

    host      ready computed turned ended updated     ready computed ...
                |       |      |      |     |           |
    device      +-------+......+------+-----+...........+---
                 forward  idle  backward update    idle

The clock of a device is put on the host's by bounds: no event passes before it was recorded, nor after it was seen to
have passed. A device that is idle when an event is recorded passes it at once, which makes the bound sharp.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from headway.runtime.device import Device, device_of
from headway.runtime.probes import Probes, now
from headway.runtime.timers import BACKWARD, FORWARD, out_of_compiler
from headway.trace.vocabulary import SPANS

WORK = SPANS["device.work"].code

READY, COPIED, COMPUTED, UPDATED = -1, -2, -3, -4
"""What marks stand for beside the ends of the two segments: forward may begin, the host waited for a copy to the
device, a model was launched, an update was."""

MOST_MARKS = 64
"""A stretch without an update is written in pieces of so many marks."""

MAX_PENDING = 256
"""Stretches that wait until the device has passed them; beyond, the oldest is given up and counted."""

QUERIES = 2
"""Stretches that are asked for at an update: more than one, so that what has been left over is caught up with."""

DRAINED_NS = 200_000
"""An event that passed this soon after it was recorded found the device with nothing to do."""

DRIFT = 20e-6
"""Clocks may drift apart by this fraction of the time."""


class Clock:
    """The clock of one device on the host's, int64 ns."""

    def __init__(self) -> None:
        self.device_ns = 0
        """Moment of the newest event by the device, since the first one."""
        self.ahead_ns: int | None = None
        """The host's clock less the device's; None before the first event."""
        self.slack_ns = -1
        """How far apart the bounds of the newest stretch lay; -1 before the first."""

    def bound(self, passed_ns: list[int], recorded_ns: list[int], seen_ns: int) -> int:
        """Learn from events that passed at `passed_ns` by the device, [k], and were recorded at `recorded_ns`.

        The last one was seen to have passed at `seen_ns`. Returns the host's clock less the device's.
        """
        lowest = max(host - device for host, device in zip(recorded_ns, passed_ns, strict=True))
        highest = seen_ns - passed_ns[-1]
        ahead = lowest
        if self.ahead_ns is not None:
            ahead = max(lowest, self.ahead_ns - round(DRIFT * (passed_ns[-1] - passed_ns[0])))
        self.ahead_ns = min(ahead, highest)
        self.slack_ns = highest - lowest
        return self.ahead_ns


@dataclass(frozen=True, slots=True)
class Mark:
    """An event that was recorded."""

    event: Any
    """It."""
    host_ns: int
    """The host's clock just before it was recorded."""
    code: int
    """READY, COPIED, COMPUTED, FORWARD (which ends there), BACKWARD (the same) or UPDATED."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two events around a stretch that the script named."""

    code: int
    number: int
    begin: Any
    end: Any
    host_ns: int
    """The host's clock when it began."""


@dataclass(slots=True)
class Stretch:
    """What was recorded from one update to the next."""

    marks: list[Mark] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)


class DeviceTimers:
    """Marks moments on one device, and writes what lay between them once it has passed."""

    def __init__(self, emit: Callable[..., None], device: Device, number: int = 0) -> None:
        self._emit, self._device, self._number = emit, device, number
        self._open, self._pending = Stretch(), deque[Stretch]()
        self._previous: Any = None  # the last event that was written
        self._last_ns: int | None = None  # its moment by the device; None where what followed it was given up
        self._depth, self._is_ready = 0, False
        self.clock = Clock()
        """Where its events stand on the host's clock."""
        self.dropped = 0
        """Stretches that were given up."""
        self.broken = False
        """Whether the device refused: then nothing is timed on it any more."""

    @property
    def usable(self) -> bool:
        """Whether an event may be recorded now: not while a graph is captured, of which it would become part."""
        return not (self.broken or self._device.is_capturing)

    def mark(self) -> Any:
        """Record an event on the device and return it."""
        return self._device.record()

    def ready(self) -> None:
        """Say that forward may begin: the batch is there."""
        self._is_ready = True
        self._note(READY)

    def copied(self) -> None:
        """Say that the host waited for a copy to the device: it may have waited until all work before was done."""
        if self._is_ready:
            self._note(COPIED)

    def begun(self) -> None:
        """Say that a forward begins: where no batch was seen to come, it may begin now."""
        if not self._is_ready:
            self.ready()

    def computed(self) -> None:
        """Say that a model is launched: what the script does before backward begins is no work of the device."""
        if self._is_ready and self._depth == 0:
            self._note(COMPUTED)

    def turned(self) -> None:
        """Say that backward begins, which ends the forward before it; one inside another is part of it."""
        self._depth += 1
        if self._depth == 1:
            self._note(FORWARD)

    def ended(self) -> None:
        """Say that backward is launched; the next forward begins behind it, unless `ready` says later."""
        if self._depth == 1:
            self._note(BACKWARD)
        self._depth = max(self._depth - 1, 0)  # a capture may have begun, or ended, in between

    def updated(self) -> None:
        """Say that an update is launched, and write what has passed."""
        self._is_ready = False
        self._note(UPDATED)

    def add(self, code: int, number: int, begin: Any, end: Any, host_ns: int) -> None:
        """Add two events that `mark` recorded; the record is (code, start, duration, number, `host_ns`)."""
        self._open.pairs.append(Pair(code, number, begin, end, host_ns))

    def _note(self, code: int) -> None:
        host_ns = now()
        self._open.marks.append(Mark(self.mark(), host_ns, code))
        if code == UPDATED or len(self._open.marks) >= MOST_MARKS:
            self._close()
            self.resolve()

    def _close(self) -> None:
        if len(self._pending) >= MAX_PENDING:
            self._give_back(self._pending.popleft())
            self.dropped, self._last_ns = self.dropped + 1, None
        self._pending.append(self._open)
        self._open = Stretch()

    def resolve(self, most: int = QUERIES) -> None:
        """Write the oldest stretches whose last event has passed, `most` of them; nothing is waited for."""
        for _ in range(min(most, len(self._pending))):
            if not self._pending[0].marks[-1].event.query():
                return
            self._write(self._pending.popleft(), now())

    def finish(self) -> None:
        """Write all that has passed by now."""
        if self._open.marks:
            self._close()
        self.resolve(len(self._pending))

    def _write(self, stretch: Stretch, seen_ns: int) -> None:
        marks, clock, previous = stretch.marks, self.clock, self._previous
        passed = []
        for mark in marks:
            # From mark to mark: the answer is float32 milliseconds, exact to 60 ns over a second.
            clock.device_ns += round(previous.elapsed_time(mark.event) * 1e6) if previous is not None else 0
            passed.append(clock.device_ns)
            previous = mark.event
        ahead_ns = clock.bound(passed, [mark.host_ns for mark in marks], seen_ns)
        self._write_marks(marks, passed, ahead_ns)
        for pair in stretch.pairs:
            start = passed[0] + ahead_ns + round(marks[0].event.elapsed_time(pair.begin) * 1e6)
            duration = round(pair.begin.elapsed_time(pair.end) * 1e6)
            self._emit(pair.code, start, duration, pair.number, pair.host_ns)
        if self._previous is not None:
            self._device.release(self._previous)
        self._previous, self._last_ns = marks.pop().event, passed[-1]
        self._give_back(stretch)

    def _write_marks(self, marks: list[Mark], passed: list[int], ahead_ns: int) -> None:
        """Write the segments, and when the device was at work; `passed` are the moments of the marks by the device."""
        last_ns = passed[0] if self._last_ns is None else self._last_ns
        begun_ns, worked_from, last = last_ns, last_ns, marks[0]
        for mark, moment in zip(marks, passed, strict=True):
            if mark.code in (FORWARD, BACKWARD) and moment > begun_ns:
                self._emit(mark.code, begun_ns + ahead_ns, moment - begun_ns, 1, mark.host_ns)
            # Nothing was launched between what it was given last and this.
            waits = mark.code in (READY, COPIED) or (mark.code == FORWARD and last.code == COMPUTED)
            if waits and moment + ahead_ns - mark.host_ns <= DRAINED_NS:
                self._worked(worked_from + ahead_ns, last_ns + ahead_ns, last)
                worked_from = moment
            last, last_ns = mark, moment
            begun_ns = begun_ns if mark.code == COMPUTED else moment
        self._worked(worked_from + ahead_ns, last_ns + ahead_ns, last)

    def _worked(self, start_ns: int, end_ns: int, last: Mark) -> None:
        if end_ns > start_ns:
            self._emit(WORK, start_ns, end_ns - start_ns, self._number, last.host_ns)

    def _give_back(self, stretch: Stretch) -> None:
        for mark in stretch.marks:
            self._device.release(mark.event)
        for pair in stretch.pairs:
            self._device.release(pair.begin)
            self._device.release(pair.end)


class AllTimers:
    """The timers of each device on which a loss of this process lay."""

    def __init__(self, probes: Probes) -> None:
        self._probes = probes
        self._timers: dict[Device, DeviceTimers] = {}

    def of(self, tensor: Any) -> DeviceTimers | None:
        """Return the timers of the device that holds `tensor`, made at first use; None for the host's memory."""
        device = device_of(tensor)
        if device is None:
            return None
        timers = self._timers.get(device)
        if timers is None:
            timers = self._timers[device] = DeviceTimers(self._probes.emit, device, len(self._timers))
            self._probes.tables["timers"] = {"clock": "device events"}
        return timers

    def __bool__(self) -> bool:
        """Whether a loss on a device was seen."""
        return bool(self._timers)

    def ready(self) -> None:
        """Say so to all of them, see `DeviceTimers`."""
        self._each(DeviceTimers.ready)

    def copied(self) -> None:
        """Say so to all of them, see `DeviceTimers`."""
        self._each(DeviceTimers.copied)

    def begun(self) -> None:
        """Say so to all of them, see `DeviceTimers`."""
        self._each(DeviceTimers.begun)

    def computed(self) -> None:
        """Say so to all of them, see `DeviceTimers`."""
        self._each(DeviceTimers.computed)

    def updated(self) -> None:
        """Say so to all of them, see `DeviceTimers`."""
        self._each(DeviceTimers.updated)

    def event(self) -> tuple[DeviceTimers, Any] | None:
        """Return the first timers and an event that was recorded now, None where that is impossible."""
        made: list[tuple[DeviceTimers, Any]] = []
        if self._timers:
            self.act(next(iter(self._timers.values())), lambda one: made.append((one, one.mark())))
        return made[0] if made else None

    def _each(self, act: Callable[[DeviceTimers], None]) -> None:
        for timers in self._timers.values():
            self.act(timers, act)

    def act(self, timers: DeviceTimers, act: Callable[[DeviceTimers], None]) -> None:
        """Do something with events where that is possible now; the first failure ends all timing on that device."""
        try:
            if timers.usable:
                act(timers)
        except Exception as cause:
            timers.broken = True
            self._probes.failed("segments on the device", cause)

    def facts(self) -> dict[str, Any]:
        """Return what the tables say of timing on devices, after a last look at what has passed."""
        self._each(DeviceTimers.finish)
        every = list(self._timers.values())
        return {
            "clock": "device events",
            "devices": [repr(device) for device in self._timers],
            "clock_slack_ns": max(timers.clock.slack_ns for timers in every),
            "given_up": sum(timers.dropped for timers in every),
        }


def timers_of(probes: Probes) -> AllTimers:
    """Return the timers of this process's devices."""
    if probes.device_timers is None:
        probes.device_timers = AllTimers(probes)
    every: AllTimers = probes.device_timers
    return every


def device_backward(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `torch.autograd.backward` where the host has devices: events around what begins on one of them."""
    every = timers_of(probes)
    ours: list[Callable[..., Any]] = [device_of, timers_of, *_methods(AllTimers, DeviceTimers, Device, Clock)]
    for function in ours:
        out_of_compiler(function)

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        """Run backward between two events."""
        root = args[0] if args else kwargs.get("tensors")
        timers = every.of(root[0] if isinstance(root, (list, tuple)) and root else root)
        if timers is None:
            return original(*args, **kwargs)
        every.act(timers, DeviceTimers.turned)
        try:
            return original(*args, **kwargs)
        finally:
            every.act(timers, DeviceTimers.ended)

    return out_of_compiler(backward)


def _methods(*owners: type) -> list[FunctionType]:
    """Return the functions in these classes, those of properties included."""
    found = [getattr(value, "fget", value) for owner in owners for value in vars(owner).values()]
    return [function for function in found if isinstance(function, FunctionType)]


def batch_ready(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `_BaseDataLoaderIter.__next__` where the host has devices: forward may begin when the batch is there."""
    every = timers_of(probes)

    @functools.wraps(original)
    def __next__(self: Any) -> Any:  # noqa: N807  # the name it has in torch
        """Get the batch, then mark its moment on the devices."""
        batch = original(self)
        if every:
            every.ready()
        return batch

    return __next__


def join_updates(register: Callable[..., Any], probes: Probes) -> Callable[[], None]:
    """Join the hooks behind every optimizer step: there what has passed is written."""
    every = timers_of(probes)

    def updated(*_: object) -> None:
        import torch  # not above: that is in the middle of torch's own import, before it has a compiler

        if not torch.compiler.is_compiling() and every:
            every.updated()

    undo: Callable[[], None] = register(updated).remove
    return undo
