"""What a device does in each step, by at most a few events per micro-batch, without ever waiting for it.

Events are recorded where the host stands at a batch, behind a model, at the turn to backward, and behind backward and
update, in the stream in which backward began: a loader may be asked under another one. Steps later, when one `query()`
says that the last event of a step has passed, all that the step tells is written: forward and backward as the device
ran them, and when it was at work. Where the host is far behind its device, an event is passed at once: until then the
device had nothing to do.

    host      ready computed turned ended updated     ready computed ...
                |       |      |      |     |           |
    device      +-------+......+------+-----+...........+---
                 forward  idle  backward update    idle

An event B that passes late, though the device had got to A before the host recorded B, found work of its own: launched
somewhere between A and B, and under way from B on. What the device did before B is not known, and written as such:

    host      A                          B
    device    ---A.......... ? ..........-----B-------
                  not known              at work

A device that passes the end of a forward, a backward or an update at once had kept up with its host, which may have
launched its kernels more slowly than they ran. What it did since the event before is not known either: it was at work
for the whole of it at most. (A kind of device that passes events late cannot be told from one that works on.)

Two of the events only tell pauses. They are left out where there can be none: while the host is ahead of its device by
more than it has taken since the last event, and between a model and a backward that follows it at once.

Where the device's clock stands on the host's, and how late its events pass, `device` learns from them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headway.core.machine.interruptions import pass_on
from headway.runtime.host.device import DRAINED_NS, KEPT, Clock, Device, DeviceLateness, device_of
from headway.runtime.recorder.probes import Probes, now
from headway.runtime.recorder.timers import BACKWARD, FORWARD
from headway.trace.events.vocabulary import SPANS

WORK, UNKNOWN = SPANS["device.work"].code, SPANS["device.unknown"].code

READY, COPIED, COMPUTED, UPDATED, FETCHED = -1, -2, -3, -4, -5
"""What marks stand for beside the ends of the two segments: forward may begin, the host waited for a copy to the
device, a model was launched, an update was, a batch came between a model and a backward."""

LAUNCHED = (COMPUTED, FORWARD, BACKWARD, UPDATED)
"""Marks that stand behind launches of the script."""

FORGETS = 0.05
"""How much less the stretches before count with each new one where launches are told from work."""

MOST_MARKS = 64
"""A stretch without an update is written in pieces of so many marks."""

MAX_PENDING = 256
"""Stretches that wait until the device has passed them; beyond, the oldest is given up and counted."""

QUERIES = 2
"""Stretches that are asked for at an update: more than one, so that what has been left over is caught up with."""

FAILURES = 8
"""Stretches in a row that could not be read: then nothing more is timed on that device."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An event that was recorded."""

    event: Any
    """It."""
    host_ns: int
    """The host's clock just before it was recorded."""
    code: int
    """READY, FETCHED, COPIED, COMPUTED, FORWARD (which ends there), BACKWARD (the same) or UPDATED."""
    computed_ns: int = 0
    """Of FORWARD and FETCHED: the host's clock when the model before it had been launched; 0 = not seen."""


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
class UpdateInterval:
    """What was recorded from one update to the next."""

    marks: list[Mark] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    elsewhere: list[Any] = field(default_factory=list)
    """Last marks' events in streams that backward has left since: the last event of the stretch does not follow them.
    """

    def has_passed(self) -> bool:
        """Ask the events behind which there are no others of the stretch in their streams."""
        ends = [self.marks[-1].event, *self.elsewhere, *(pair.end for pair in self.pairs)]
        return all(event.query() for event in ends)


class DeviceTimers:
    """Marks moments on one device, and writes what lay between them once it has passed."""

    def __init__(self, emit: Callable[..., None], device: Device, number: int = 0) -> None:
        self._emit, self._device, self._number = emit, device, number
        self._open, self._pending = UpdateInterval(), deque[UpdateInterval]()
        self._stream: Any = None  # in which backward began last
        self._previous: Any = None  # the last event that was written
        self._last_ns: int | None = None  # its moment by the device; None where what followed it was given up
        self._open_ns = 0  # what lies between its moment and the end of the work that was written
        self._depth, self._in_forward = 0, False
        self.is_ready = False
        """Whether forward may begin, since a batch came."""
        self.is_reducing = False
        """Whether the end of the backward under way is marked: its host waits for gradients to be reduced."""
        self._reduced: tuple[int, ...] | None = None  # the record of that wait, which is the training thread's
        self._updated_ns, self._computed_ns = 0, 0  # the host's clock at the newest update, and behind the newest model
        self._paused, self._pause_ns = 0, 0  # stretches, still, in which the moment behind a model is marked; its pause
        self._failures = 0
        self.clock, self.lateness = Clock(), DeviceLateness()
        """Where its events stand on the host's clock, and how late they pass."""
        self._kept_up_ns = self._worked_ns = 0.0  # time with launches that had run at once, time at work; newest most
        self.dropped = 0
        """Stretches that were given up."""
        self.broken = False
        """Whether the device refused: then nothing is timed on it any more."""

    @property
    def usable(self) -> bool:
        """Whether an event may be recorded now: not while a graph is captured, of which it would become part."""
        return not (self.broken or self._device.is_capturing)

    @property
    def keeps_up(self) -> bool:
        """Whether for most of the time in which it may work what was launched had run by the host's next event."""
        return self._kept_up_ns > self._worked_ns

    def mark(self) -> Any:
        """Record an event on the device, in the current stream, and return it."""
        return self._device.record()

    def ready(self) -> None:
        """Say that forward may begin: the batch is there."""
        self.is_ready = True
        if not self._must_be_busy():
            # One that comes between a model and a backward was fetched ahead: the forward goes on behind it.
            self._note(FETCHED, self._computed_ns) if self._in_forward else self._note(READY)

    def copied(self) -> None:
        """Say that the host waited for a copy to the device: it may have waited until all work before was done."""
        if self.is_ready:
            self._note(COPIED)

    def begun(self) -> None:
        """Say that a forward begins: where no batch was seen to come, it may begin now."""
        if not self.is_ready:
            self.ready()

    def replaying(self) -> None:
        """Say that a whole step is replayed in the current stream: it was captured, and warmed up, in another one."""
        self._follow(self._device.stream())
        self.begun()

    def computed(self) -> None:
        """Say that a model is launched: what the script does before backward begins is no work of the device."""
        if self.is_ready and self._depth == 0:
            self._in_forward, self._computed_ns = True, now()
            if self._paused and not self._must_be_busy(self._pause_ns):
                self._note(COMPUTED)

    def turned(self) -> None:
        """Say that backward begins, which ends the forward before it; one inside another is part of it."""
        self._depth += 1
        if self._depth == 1:
            self._follow(self._device.stream())
            computed_ns = self._computed_ns if self._in_forward else 0
            self._pause_ns = now() - computed_ns if computed_ns else 0
            self._paused = KEPT if self._pause_ns > DRAINED_NS else max(self._paused - 1, 0)
            self._in_forward = False
            self._note(FORWARD, computed_ns)

    def reducing(self) -> None:
        """Say that backward is launched, and its host begins to wait for gradients that are reduced over the host."""
        if self._depth == 1 and not self.is_reducing:
            self._note(BACKWARD)
            self.is_reducing = True

    def reduced(self, record: tuple[int, ...]) -> None:
        """Say that they are: the device has been idle since it was done. `record` is written when backward ends.

        Callbacks of a backward may run on a thread of a device, while the training thread waits.
        """
        self._note(COPIED)
        self._reduced = record

    def ended(self) -> None:
        """Say that backward is launched; the next forward begins behind it, unless `ready` says later."""
        if self._depth == 1 and not self.is_reducing:
            self._note(BACKWARD)
        elif self._depth == 1:
            self.is_reducing, record, self._reduced = False, self._reduced, None
            if record is not None:
                self._emit(*record)
        self._depth = max(self._depth - 1, 0)  # a capture may have begun, or ended, in between

    def updated(self) -> None:
        """Say that an update is launched, and write what has passed."""
        self.is_ready = self._in_forward = False
        self._note(UPDATED)

    def add(self, code: int, number: int, begin: Any, end: Any, host_ns: int) -> None:
        """Add two events that `mark` recorded; the record is (code, start, duration, number, `host_ns`)."""
        self._open.pairs.append(Pair(code, number, begin, end, host_ns))

    def _follow(self, stream: Any) -> None:
        """Record what comes in `stream`."""
        if self._stream != stream and self._open.marks:
            self._open.elsewhere.append(self._open.marks[-1].event)
        self._stream = stream

    def _must_be_busy(self, more_ns: int = 0) -> bool:
        """Whether the device cannot have got through what it was given before the newest update, `more_ns` from now."""
        return 2 * (now() - self._updated_ns + more_ns) < self.lateness.ahead_ns

    def _note(self, code: int, computed_ns: int = 0) -> None:
        self._stream = self._stream or self._device.stream()
        host_ns = now()
        self._updated_ns = host_ns if code == UPDATED else self._updated_ns
        self._open.marks.append(Mark(self._device.record(self._stream), host_ns, code, computed_ns))
        if code == UPDATED or len(self._open.marks) >= MOST_MARKS:
            self._close()
            self.resolve()

    def _close(self) -> None:
        if len(self._pending) >= MAX_PENDING:
            self._give_up(self._pending.popleft())
        self._pending.append(self._open)
        self._open = UpdateInterval()

    def resolve(self, most: int = QUERIES) -> None:
        """Write the oldest stretches whose events have passed, `most` of them; nothing is waited for.

        One that cannot be read is given up. Raises what torch raised when that happens `FAILURES` times in a row.
        """
        for _ in range(min(most, len(self._pending))):
            stretch = self._pending[0]
            try:
                if not stretch.has_passed():
                    return
                self._write(stretch, now())
                self._failures = 0
            except Exception as cause:
                pass_on(cause)
                self._failures += 1
                self._pending.popleft()  # its events are not used again
                self.dropped, self._previous, self._last_ns = self.dropped + 1, None, None
                if self._failures >= FAILURES:
                    raise
            else:
                self._pending.popleft()

    def finish(self) -> None:
        """Write all that has passed by now."""
        if self._open.marks:
            self._close()
        self.resolve(len(self._pending))

    def _write(self, stretch: UpdateInterval, seen_ns: int) -> None:
        marks, clock, previous = stretch.marks, self.clock, self._previous
        passed, device_ns = list[int](), clock.device_ns
        for mark in marks:
            # From mark to mark: the answer is float32 milliseconds, exact to 60 ns over a second.
            device_ns += round(previous.elapsed_time(mark.event) * 1e6) if previous is not None else 0
            passed.append(device_ns)
            previous = mark.event
        first = marks[0].event
        spans = [(first.elapsed_time(one.begin), one.begin.elapsed_time(one.end)) for one in stretch.pairs]
        clock.device_ns = device_ns
        ahead_ns = clock.bound(passed, [mark.host_ns for mark in marks], seen_ns)
        self._write_marks(marks, passed, ahead_ns)
        for pair, (offset_ms, duration_ms) in zip(stretch.pairs, spans, strict=True):
            start = passed[0] + ahead_ns + round(offset_ms * 1e6)
            self._emit(pair.code, start, round(duration_ms * 1e6), pair.number, pair.host_ns)
        if self._previous is not None:
            self._device.release(self._previous)
        self._previous, self._last_ns = marks.pop().event, passed[-1]
        self._give_back(stretch)

    def _write_marks(self, marks: list[Mark], passed: list[int], ahead_ns: int) -> None:
        """Write the segments, and when the device was at work; `passed` are the moments of the marks by the device."""
        last_ns = passed[0] if self._last_ns is None else self._last_ns
        self._open_ns = 0 if self._last_ns is None else self._open_ns
        begun_ns, worked_from, last, kept_up_ns = last_ns, last_ns - self._open_ns, marks[0], 0
        fuzz_ns = self.lateness.fuzz_ns

        def write(code: int, start_ns: int, end_ns: int, launched_ns: int) -> None:
            if end_ns > start_ns:
                self._worked_ns += end_ns - start_ns if code == WORK else 0
                self._emit(code, start_ns + ahead_ns, end_ns - start_ns, self._number, launched_ns)

        for mark, moment in zip(marks, passed, strict=True):
            if mark.code in (FORWARD, BACKWARD) and moment > begun_ns:
                self._emit(mark.code, begun_ns + ahead_ns, moment - begun_ns, 1, mark.host_ns)
            recorded, launched_ns = mark.host_ns - ahead_ns, last.host_ns
            drained_ns = recorded  # when the device may have got through all that it had been given; none where it is B
            if mark.code in (READY, COPIED):
                drained_ns = last_ns
            elif mark.computed_ns:
                launched_ns = mark.computed_ns  # the forward was under way until it was launched at least
                drained_ns = max(last_ns, launched_ns - ahead_ns)
            late_ns = moment - recorded
            if drained_ns < recorded:
                if mark.code == READY:
                    self.lateness.at_ready(late_ns)
                if late_ns <= max(DRAINED_NS, fuzz_ns):
                    # Without an event behind the model nobody knows how long the device worked on it.
                    known_ns = (last_ns if mark.computed_ns and last.code != COMPUTED else drained_ns) - fuzz_ns
                    write(WORK, worked_from, known_ns, launched_ns)
                    write(UNKNOWN, max(worked_from, known_ns), drained_ns, launched_ns)
                    kept_up_ns += max(drained_ns - max(worked_from, known_ns), 0)
                    worked_from = recorded if fuzz_ns else moment
                else:
                    write(WORK, worked_from, drained_ns, launched_ns)
                    write(UNKNOWN, drained_ns, recorded, launched_ns)
                    worked_from = recorded
            elif late_ns <= DRAINED_NS and not fuzz_ns and mark.code in LAUNCHED:
                write(WORK, worked_from, last_ns, launched_ns)
                write(UNKNOWN, max(worked_from, last_ns), moment, mark.host_ns)
                kept_up_ns += moment - max(worked_from, last_ns)
                worked_from = moment
            last, last_ns = mark, moment
            begun_ns = begun_ns if mark.code in (COMPUTED, FETCHED) else moment
        self._open_ns = min(fuzz_ns, max(last_ns - worked_from, 0))
        write(WORK, worked_from, last_ns - self._open_ns, last.host_ns)
        self._kept_up_ns = (1 - FORGETS) * (self._kept_up_ns + kept_up_ns)
        self._worked_ns *= 1 - FORGETS
        if marks[-1].code == UPDATED:
            self.lateness.at_update(passed[-1] + ahead_ns - marks[-1].host_ns)

    def _give_up(self, stretch: UpdateInterval) -> None:
        self._give_back(stretch)
        self.dropped, self._last_ns = self.dropped + 1, None

    def _give_back(self, stretch: UpdateInterval) -> None:
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

    @property
    def keep_up(self) -> bool:
        """Whether some device gets through most launches as fast as they come: then they bound its steps."""
        return any(timers.keeps_up for timers in self._timers.values())

    def ready(self) -> None:
        """Say so to all of them, see `DeviceTimers`."""
        self._each(DeviceTimers.ready)

    def copied(self) -> None:
        """Say so to all of them, see `DeviceTimers`."""
        self._each(DeviceTimers.copied)

    def begun(self) -> None:
        """Say so to those that no batch has made ready, see `DeviceTimers`."""
        for timers in self._timers.values():
            if not timers.is_ready:
                self.act(timers, DeviceTimers.begun)

    def replaying(self) -> None:
        """Say so to all of them, see `DeviceTimers`."""
        self._each(DeviceTimers.replaying)

    def computed(self) -> None:
        """Say so to all of them, see `DeviceTimers`."""
        self._each(DeviceTimers.computed)

    def updated(self) -> None:
        """Say so to all of them, see `DeviceTimers`."""
        self._each(DeviceTimers.updated)

    def reducing(self, tensor: Any) -> None:
        """Say so to those of the device of `tensor`, see `DeviceTimers`."""
        timers = self.of(tensor)
        if timers is not None:
            self.act(timers, DeviceTimers.reducing)

    def reduced(self, tensor: Any, record: tuple[int, ...]) -> None:
        """The same; the record is written now where nothing is timed there."""
        timers = self.of(tensor)
        if timers is None or not timers.is_reducing:
            self._probes.emit(*record)
        else:
            self.act(timers, lambda one: one.reduced(record))

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
            self._probes.failed("segments on the device", cause)
            timers.broken = True

    def facts(self) -> dict[str, object]:
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
