"""Deep windows: a few steps under the profiler, as many of them as fit into a budget of time.

A window is three steps. The profiler is switched by its low-level calls (a
tenth of the cost of `torch.profiler`), its JSON and the Flight Recorder's
entries are written by a thread. What windows cost (those calls, the writing,
and how much longer the profiled steps took) is measured, and the next window
waits until all of it together stays below `budget` x the time trained. Which
steps those are, `window_profiler` says: the same for all ranks.

On a device a step may be many thousand launches, and the first window starts
the profiler's library. There the first window is one step
of launches, kernels and copies alone. Those behind it hold the training thread,
by what the one before took, no longer than `HOLD_NS`: the host's operations
join where there is room for them, then more steps; else there are fewer steps,
then no windows. A window closes once the device has got to its end, and the
first of a device that shows no kernel is the last. A job that uses a profiler
itself gets no windows from then on. HEADWAY_WINDOW_AT names a step at which a
window opens whatever the budget says.

The library slows launches as long as it is attached. It leaves behind a window
where it may (`window_profiler`). How much longer steps take from then on is
measured there (`WindowPace`) and counts as cost; from `STAYS` on there is no second
window. A job whose device keeps up with its host's launches gets none but the
one that is asked for.

>>> shape_after(LIGHT, held_ns=5_000_000), shape_after(Shape(1, host=True), held_ns=60_000_000)
(Shape(steps=1, host=True), Shape(steps=1, host=False))
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headway.core.machine.hidden_thread import HiddenThread
from headway.core.machine.interruptions import suppress_own
from headway.runtime.calls.probe_step import graphs_captured
from headway.runtime.host import device
from headway.runtime.host.rank_env import number
from headway.runtime.in_rank.window_profiler import (
    LEAVES_NS,
    WindowPace,
    WindowSchedule,
    await_detached,
    has_kernels,
    low_level_start,
    low_level_stop,
    may_detach,
    opening_step,
    quiet_stderr,
    spacing,
    takes_part,
    tell_kineto,
)
from headway.runtime.recorder.ddp_facts import note_models
from headway.runtime.recorder.flight_answers import flight_entries
from headway.runtime.recorder.probes import NEVER, Probes, now
from headway.trace.events.vocabulary import SPANS
from headway.trace.rings.ring import warn

WINDOW = SPANS["window"].code

STEPS = 3
"""Steps of one window."""

BUDGET = 0.01
"""Fraction of the time trained that windows may cost by default, where a device or several ranks compute.

Those of one process on a host alone have no reader: they would show operators, of which the recording has the calls."""

HOLD_NS = 50_000_000
"""Longest time for which a window of a device may hold the training thread when it ends: collecting and writing."""

MOST_MORE_STEPS = 16
"""Steps for which a window stays open, at most, until a device has got to its end."""

FIRST_COST_NS, FIRST_DEVICE_COST_NS = 10_000_000, 500_000_000
"""Assumed cost of the first window, besides its steps' own slow-down; the second where a device's library starts, which
took 20 to 40 ms on an H100 and another 20 ms to stop (torch 2.11, CUDA 13)."""

FIRST_SLOWDOWN = 0.3
"""Assumed slow-down of the profiled steps, before one was measured."""

STAYS = 0.03
"""Fraction by which steps may take longer behind a window than before it; from there on it was the last."""

MAX_WINDOWS = 32
MAX_BYTES = 256 << 20
"""No window after this many, or after this many bytes of windows."""

OUTSIDE_PROFILERS = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "KINETO_USE_DAEMON")
"""Variables of Nsight Systems, of tools that CUDA loads, and of Kineto's daemon: these have the activities already."""

SCRIPT_PROFILERS = ("profile._prepare_trace", "emit_nvtx.__enter__", "emit_itt.__enter__")
"""Functions of torch.autograd.profiler by which a script profiles, or annotates: torch has one profiler at a time."""

FAST_STEP_NS = 4_000_000
"""Steps shorter than this look at the schedule less often and are announced further ahead."""


def budget_from(environ: Mapping[str, str]) -> float:
    """Return the fraction in HEADWAY_WINDOWS, `BUDGET` when it is missing or no number in [0, 1]."""
    try:
        budget = float(environ.get("HEADWAY_WINDOWS") or BUDGET)
    except ValueError:
        return BUDGET
    return budget if 0 <= budget <= 1 else BUDGET


def asked_step(environ: Mapping[str, str]) -> int | None:
    """Return the step in HEADWAY_WINDOW_AT, None without one.

    >>> asked_step({"HEADWAY_WINDOW_AT": "50"}), asked_step({"HEADWAY_WINDOW_AT": "soon"}), asked_step({})
    (50, None, None)
    """
    text = environ.get("HEADWAY_WINDOW_AT", "")
    return int(text) if text.isdecimal() else None


@dataclass(frozen=True, slots=True)
class Shape:
    """What a window records."""

    steps: int
    """Steps."""

    host: bool
    """Whether the host's operations too, beside launches, kernels and copies."""


LIGHT = Shape(1, host=False)
"""The first window of a device."""

HOST_ROWS = 4
"""Rows of a window with the host's operations, per row of one without: a launch has a few levels of them around it."""


def shape_after(shape: Shape, *, held_ns: int, may_add_host: bool = True) -> Shape | None:
    """Return the shape of a window after one of `shape` that held the training thread; None for no window at all.

    `may_add_host` is False where a window with the host's operations held it for too long before.
    """
    if held_ns <= HOLD_NS:
        if may_add_host and not shape.host and HOST_ROWS * held_ns <= HOLD_NS * shape.steps:
            return Shape(1, host=True)
        return Shape(max(1, min(STEPS, shape.steps * HOLD_NS // max(held_ns, 1))), shape.host)
    if shape.steps > 1:
        return Shape(max(1, shape.steps * HOLD_NS // held_ns), shape.host)
    return LIGHT if shape.host else None


class WindowRecorder:
    """Opens and closes the windows of one rank. `listen` is called at optimizer steps, see `Probes.wake`."""

    def __init__(self, probes: Probes, budget: float) -> None:
        self.probes, self.budget = probes, budget
        self.count = 0
        """Windows so far."""
        self.cost_ns = 0
        """What they cost so far, also those in which this rank took no part."""
        self.shape = Shape(STEPS, host=True)
        """Of the next window."""
        self._may_add_host = True
        self._is_asked = bool(os.environ.get("HEADWAY_WINDOWS"))
        outside = next((name for name in OUTSIDE_PROFILERS if os.environ.get(name)), "")
        self.stopped = f"a profiler from outside: {outside} is set" if outside else ""
        self.stopped = self.stopped if budget > 0 else "HEADWAY_WINDOWS=0"
        """Why there are no more windows; '' while there may be."""
        self._pace = WindowPace()
        self._told_ns = self._detached_ns = 0
        """When the profiler's library was told last what to do behind a window; the same where that was to leave."""
        self._bytes = 0
        self._last_cost_ns = self._held_ns = 0
        self._seen: list[int] = []
        self._cycle = 0
        self._asked = asked_step(os.environ)
        self._first_ns = self._first_step = self._profiled_ns = 0
        self._open: _Open | None = None
        self._plan: WindowSchedule | None = None
        self._writers: list[HiddenThread] = []
        self._undos = [self._watch(name) for name in SCRIPT_PROFILERS]
        if not self.stopped:
            os.register_at_fork(before=self.drop)
            probes.listeners.append(self.listen)
            probes.due[0] = probes.steps[0] + 1

    def listen(self, optimizer: int) -> int:
        """Look at the end of an optimizer step; returns how many more until the next look."""
        if self._open is not None:  # first: a profiler that nobody stops fills the memory
            if self._open.thread == threading.get_ident() and self._is_done(self._open):
                self._close()
            return self._cycle
        if self.stopped or not self.probes.leads:
            return NEVER
        if not self._cycle:
            return self._learn(optimizer)
        step = self.probes.steps[0]
        if self._asked is not None:
            left = self._asked * self._cycle - step
            if left <= 0:
                self._asked = None
                return self._begin() if left == 0 else self._cycle
            return min(left, self._look(step))
        return self._look(step)

    def _look(self, step: int) -> int:
        """Look at the schedule; returns the optimizer steps until the next look."""
        start = self._schedule.read()
        if device.activities():
            self.cost_ns += self._pace.look(step // self._cycle, now())
            if self._told_ns and now() - self._told_ns > LEAVES_NS:
                tell_kineto(None)  # it has asked by now; programs that the script starts inherit nothing of it
                self._told_ns = 0
            if self._pace.longer >= STAYS and self._asked is None:
                self.stopped = f"steps take {self._pace.longer:.0%} longer behind a window: its library stays attached"
        elif not self._is_asked and num_ranks() == 1:
            return self._pause()
        # Where launches bound steps each of them that the library slows counts, and it is not known to leave.
        timers = self.probes.device_timers
        if self.stopped or (timers and timers.keep_up):
            return self._pause()
        if start == step:
            return self._begin()
        if start > step:
            return min(start - step, self._pause())
        if self._schedule.leads:
            self._announce(step)
        return self._pause()

    def _learn(self, optimizer: int) -> int:
        """Find the optimizers of one cycle: a step ends when the first one repeats."""
        if optimizer in self._seen:
            self._cycle = len(self._seen)
            self._first_ns, self._first_step = now(), self.probes.steps[0]
            # Steps count from the first: the last optimizer of a cycle has a multiple of the cycle's length.
            return self._cycle - self.probes.steps[0] % self._cycle
        self._seen.append(optimizer)
        return 1

    def _pause(self) -> int:
        """Return the optimizer steps until the next look at the schedule, in whole cycles."""
        return self._paces()[0] * self._cycle - self.probes.steps[0] % self._cycle

    def _paces(self) -> tuple[int, int]:
        """Return the cycles between two looks at the schedule, and those by which a window is announced ahead."""
        return (16, 40) if self._step_ns() < FAST_STEP_NS else (4, 10)

    def _step_ns(self) -> int:
        """Mean time of a step so far, windows included."""
        cycles = max(1, (self.probes.steps[0] - self._first_step) // self._cycle)
        return (now() - self._first_ns) // cycles

    def _announce(self, step: int) -> None:
        """Say at which step the next window opens, if the budget will have paid for it by then."""
        if self.count >= MAX_WINDOWS or self._bytes >= MAX_BYTES:
            self.stopped = f"{self.count} windows, {self._bytes} bytes"
        if self.stopped or self._pace.is_measuring or any(writer.is_alive() for writer in self._writers):
            return
        step_ns = max(self._step_ns(), 1)
        cost_ns = self._expected_cost_ns(step_ns)
        looks, ahead = self._paces()
        least = looks + ahead + self.shape.steps
        stride = spacing(cost_ns=cost_ns, step_ns=step_ns, budget=self.budget, least=least)
        opens = opening_step(now=step, cycle=self._cycle, ahead=ahead, spacing=stride)
        trained_ns = now() - self._first_ns + (opens - step) // self._cycle * step_ns
        if self.cost_ns + cost_ns <= self.budget * trained_ns:
            self._schedule.write(opens)

    def _fit(self) -> None:
        """Set `shape`, or stop, by how long the newest window of a device held the training thread."""
        if not device.activities():
            return
        if not self._last_cost_ns:  # the first that this rank records
            self.shape = LIGHT
        elif self._held_ns:
            held_ns, self._held_ns = self._held_ns, 0
            shape = shape_after(self.shape, held_ns=held_ns, may_add_host=self._may_add_host)
            self._may_add_host = self._may_add_host and not (self.shape.host and shape == LIGHT)
            if shape is None:
                self.stopped = f"a window of one step holds the training thread for {held_ns // 10**6} ms"
            else:
                self.shape = shape

    def _expected_cost_ns(self, step_ns: int) -> int:
        if self._last_cost_ns:
            return max(self._last_cost_ns * 6 // 5, FIRST_COST_NS // 10)
        first = FIRST_DEVICE_COST_NS if device.activities() else FIRST_COST_NS
        return first + int(FIRST_SLOWDOWN * self.shape.steps * step_ns)

    @property
    def _schedule(self) -> WindowSchedule:
        if self._plan is None:
            self._plan = WindowSchedule(self.probes)
        return self._plan

    def _begin(self) -> int:
        import torch

        if torch._C._autograd._profiler_enabled():
            self.stopped = "the script runs a profiler"
            return NEVER
        if device.capturing():
            return self._cycle  # starting the profiler would spoil the script's graph
        step = self.probes.steps[0] // self._cycle
        if not takes_part(self.probes.recorder.rank, num_ranks(), step):
            self.count += 1
            # The others' window holds up this rank as well; one that has recorded none knows no better than a guess.
            self.cost_ns += self._expected_cost_ns(self._step_ns())
            return self._cycle
        if self._detached_ns and graphs_captured():
            self.stopped = "a graph was captured since the profiler's library left: it must not come back"
            return NEVER
        started, usual = now(), self._step_ns()
        self._fit()
        if self.stopped:
            return NEVER
        # The first start on a device loads a library, which takes seconds and may crash: its message must arrive.
        quiet = quiet_stderr() if self._last_cost_ns or not device.activities() else contextlib.nullcontext()
        # Known before it is open: a signal's handler may raise in between, and nobody would close it then.
        self._open = window = _Open(step, self.shape.steps, started, time.time_ns(), 0, usual)
        with quiet:
            low_level_start(host=self.shape.host, detach=may_detach())
        window.start_ns, window.realtime_ns, window.opening_ns = now(), time.time_ns(), now() - started
        return self.shape.steps * self._cycle

    def _is_done(self, window: _Open) -> bool:
        """Whether a device has got to the end of a window, whose kernels may run when its host is steps ahead.

        host     | window | ...    | ...    | closes
        device            [ kernels of the window ]
        """
        if device.capturing():
            return False
        try:
            if window.end is None:
                window.end = device.Point()
            elif window.more_steps >= MOST_MORE_STEPS:
                return True
            if window.end.is_reached():
                return True
        except Exception as cause:  # a device without events
            self.probes.failed("windows", cause)
            return True
        window.more_steps += 1
        return False

    def _close(self) -> None:
        end, window = now(), self._open
        if window is None:
            return
        result = self._stop(detach=may_detach())
        if result is None:
            self.stopped = "a signal's handler raised while the profiler was switched"
            return
        self._pace.closed()
        duration, self._held_ns = end - window.start_ns, now() - end
        number, rank = window.number, self.probes.recorder.rank
        self.probes.emit(WINDOW, window.start_ns, duration, number, window.realtime_ns)
        self._last_cost_ns = (
            window.opening_ns + now() - end + max(0, duration - (window.steps + window.more_steps) * window.usual_ns)
        )
        self.cost_ns += self._last_cost_ns
        self.count += 1
        facts = {
            "start_ns": window.start_ns, "duration_ns": duration, "clock_ns": window.start_ns,
            "realtime_ns": window.realtime_ns, "cost_ns": self._last_cost_ns,
        }  # fmt: skip
        self.probes.tables.setdefault("windows", {})[str(number)] = facts
        with suppress_own():  # Notes for what-ifs: without them those refuse, nothing else is lost.
            note_models(self.probes)
        stem = f"{self.probes.run}/windows/r{rank}-w{number}"
        # A plain thread, waited for by `finish`: a daemon could be cut off in the middle of a file.
        writer = HiddenThread(lambda: self._write(result, stem, facts), name="headway-windows")
        self._writers = [*(w for w in self._writers if w.is_alive()), writer]
        writer.start()

    def _stop(self, *, detach: bool) -> Any:
        self._told_ns = now()
        self._detached_ns = self._told_ns if detach else self._detached_ns
        with quiet_stderr():
            result = low_level_stop(detach=detach)
        self._open = None
        return result

    def _write(self, result: Any, stem: str, facts: dict[str, int]) -> None:
        """Write one window's files; runs in a thread, whose time counts as cost: it holds the interpreter."""
        started = now()
        try:
            os.makedirs(os.path.dirname(stem), exist_ok=True)
            result.save(f"{stem}.json")
            self._bytes += os.path.getsize(f"{stem}.json")
            if device.activities() and not has_kernels(f"{stem}.json"):
                self.stopped = "the profiler shows no kernel of the device"
            entries = flight_entries()
            if entries:
                with open(f"{stem}.flight.json", "wb") as file:
                    file.write(entries)
                self._bytes += len(entries)
        except Exception as cause:
            self.stopped = f"{type(cause).__name__}: {cause}"
            self.probes.failed("windows", cause)
        spent = now() - started
        facts["cost_ns"] += spent
        self._held_ns += spent
        self._last_cost_ns += spent
        self.cost_ns += spent

    def _watch(self, name: str) -> Callable[[], None]:
        """Stop for good as soon as the script calls what begins a profile of its own; returns the undo."""
        from headway.runtime.calls.patches import replace_attribute

        def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def begin(*args: Any, **kwargs: Any) -> Any:
                """Make way, then begin what the script asked for."""
                self.abort("the script runs a profiler")
                return original(*args, **kwargs)

            return begin

        try:
            return replace_attribute(f"torch.autograd.profiler:{name}", wrapper)
        except Exception as cause:
            self.stopped = f"{type(cause).__name__}: {cause}"
            return lambda: None

    def abort(self, reason: str) -> None:
        """Drop an open window and open no more; what follows is a profile of the script, or the end."""
        self.stopped = reason
        self.drop(detach=False)
        with suppress_own():
            await_detached(self._detached_ns)
        tell_kineto(None)

    def drop(self, *, detach: bool = True) -> None:
        """Drop an open window: also before a fork, for a child would go on profiling for ever.

        The profiler belongs to the thread that started it: from another one it cannot be stopped, nor is it inherited.
        """
        if self._open is not None and self._open.thread == threading.get_ident():
            start = now()
            with suppress_own():
                self._stop(detach=detach and may_detach())
                self.probes.worked(start)

    def finish(self) -> None:
        """Close what is open, wait for the files (10 s at most), and take the patch out."""
        for undo in self._undos:
            undo()
        reason = self.stopped or "the job ended"
        self.abort(reason)
        for writer in self._writers:
            writer.join(10)
        self.probes.tables["windows_stopped"] = reason
        if self._asked is not None and self.probes.recorder.rank == 0:
            warn(f"step {self._asked} was not reached: --window-at opened no deep window")


class _Open:
    """A window that is being recorded."""

    __slots__ = ("end", "more_steps", "number", "opening_ns", "realtime_ns", "start_ns", "steps", "thread", "usual_ns")

    def __init__(
        self, number: int, steps: int, start_ns: int, realtime_ns: int, opening_ns: int, usual_ns: int
    ) -> None:
        self.number, self.steps = number, steps
        self.start_ns, self.realtime_ns, self.opening_ns, self.usual_ns = start_ns, realtime_ns, opening_ns, usual_ns
        self.thread = threading.get_ident()
        self.more_steps = 0
        """Steps for which it stayed open because a device had not got to its end."""
        self.end: device.Point | None = None
        """Its end on the devices; None before its last step has ended."""


def num_ranks() -> int:
    """Return how many ranks the job has: those of the process group, else what the launch line says, else 1."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    return number(os.environ, "world_size") or 1
