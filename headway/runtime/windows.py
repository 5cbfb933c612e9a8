"""Deep windows: a few steps under the profiler, as many of them as fit into a budget of time.

A window is three steps. The profiler is switched by its low-level calls (a
tenth of the cost of `torch.profiler`), its JSON and the Flight Recorder's
entries are written by a thread. What windows cost (those calls, the writing,
and how much longer the profiled steps took) is measured, and the next window
waits until all of it together stays below `budget` x the time trained.

Ranks of one host open their windows at the same step: the leader announces it
some steps ahead in RUN/windows/schedule-<host>. A job that uses a profiler
itself gets no windows from then on.

>>> announced_step(now=103, cycle=2, ahead=10)
124
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from headway.runtime import device
from headway.runtime.ddp_facts import note_models
from headway.runtime.probes import NEVER, Probes, now
from headway.trace.vocabulary import SPANS

WINDOW = SPANS["window"].code

STEPS = 3
"""Steps of one window."""

BUDGET = 0.01
"""Fraction of the time trained that windows may cost by default."""

FIRST_COST_NS = 10_000_000
"""Assumed cost of the first window, besides its steps' own slow-down."""

FIRST_SLOWDOWN = 0.3
"""Assumed slow-down of the profiled steps, before one was measured."""

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


def announced_step(*, now: int, cycle: int, ahead: int) -> int:
    """Return the optimizer step at which a window announced at step `now` opens, in whole cycles."""
    return (now // cycle + ahead) * cycle + (cycle if now % cycle else 0)


class Windows:
    """Opens and closes the windows of one rank. `listen` is called at optimizer steps, see `Probes.wake`."""

    def __init__(self, probes: Probes, budget: float) -> None:
        self.probes, self.budget = probes, budget
        self.count = 0
        """Windows so far."""
        self.cost_ns = 0
        """What they cost so far."""
        outside = next((name for name in OUTSIDE_PROFILERS if os.environ.get(name)), "")
        self.stopped = f"a profiler from outside: {outside} is set" if outside else ""
        self.stopped = self.stopped if budget > 0 else "HEADWAY_WINDOWS=0"
        """Why there are no more windows; '' while there may be."""
        self._bytes = 0
        self._last_cost_ns = 0
        self._seen: list[int] = []
        self._cycle = 0
        self._first_ns = self._first_step = self._profiled_ns = 0
        self._open: _Open | None = None
        self._plan: Schedule | None = None
        self._writers: list[threading.Thread] = []
        self._undos = [self._watch(name) for name in SCRIPT_PROFILERS]
        if not self.stopped:
            os.register_at_fork(before=self.drop)
            probes.listeners.append(self.listen)
            probes.due[0] = probes.steps[0] + 1

    def listen(self, optimizer: int) -> int:
        """Look at the end of an optimizer step; returns how many more until the next look."""
        if self._open is not None:  # first: a profiler that nobody stops fills the memory
            if self._open.thread == threading.get_ident():
                self._close()
            return self._cycle
        if self.stopped or not self.probes.leads:
            return NEVER
        if not self._cycle:
            return self._learn(optimizer)
        step, start = self.probes.steps[0], self._schedule.read()
        if start == step:
            return self._begin()
        if start > step:
            return start - step
        if self._schedule.leads and self._affordable():
            ahead = 40 if self._step_ns() < FAST_STEP_NS else 10
            self._schedule.write(announced_step(now=step, cycle=self._cycle, ahead=ahead))
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
        looks = 16 if self._step_ns() < FAST_STEP_NS else 4
        return looks * self._cycle - self.probes.steps[0] % self._cycle

    def _step_ns(self) -> int:
        """Mean time of a step so far, windows included."""
        cycles = max(1, (self.probes.steps[0] - self._first_step) // self._cycle)
        return (now() - self._first_ns) // cycles

    def _affordable(self) -> bool:
        if self.count >= MAX_WINDOWS or self._bytes >= MAX_BYTES:
            self.stopped = f"{self.count} windows, {self._bytes} bytes"
            return False
        if any(writer.is_alive() for writer in self._writers):
            return False
        guess = FIRST_COST_NS + int(FIRST_SLOWDOWN * STEPS * self._step_ns())
        cost = max(self._last_cost_ns * 6 // 5, FIRST_COST_NS // 10) if self.count else guess
        return self.cost_ns + cost <= self.budget * (now() - self._first_ns)

    @property
    def _schedule(self) -> Schedule:
        if self._plan is None:
            self._plan = Schedule(self.probes)
        return self._plan

    def _begin(self) -> int:
        import torch

        if torch._C._autograd._profiler_enabled():
            self.stopped = "the script runs a profiler"
            return NEVER
        if device.capturing():
            return self._cycle  # starting the profiler would spoil the script's graph
        started = now()
        usual = self._step_ns()
        with quiet_stderr():
            low_level_start()
        self._open = _Open(now(), time.time_ns(), now() - started, usual)
        return STEPS * self._cycle

    def _close(self) -> None:
        window, self._open = self._open, None
        if window is None:
            return
        end = now()
        with quiet_stderr():
            result = low_level_stop()
        duration = end - window.start_ns
        number, rank = self.count, self.probes.recorder.rank
        self.probes.emit(WINDOW, window.start_ns, duration, number, window.realtime_ns)
        self._last_cost_ns = window.opening_ns + now() - end + max(0, duration - STEPS * window.usual_ns)
        self.cost_ns += self._last_cost_ns
        self.count += 1
        facts = {
            "start_ns": window.start_ns, "duration_ns": duration, "clock_ns": window.start_ns,
            "realtime_ns": window.realtime_ns, "cost_ns": self._last_cost_ns,
        }  # fmt: skip
        self.probes.tables.setdefault("windows", {})[str(number)] = facts
        with contextlib.suppress(Exception):  # Notes for what-ifs: without them those refuse, nothing else is lost.
            note_models(self.probes)
        stem = f"{self.probes.run}/windows/r{rank}-w{number}"
        # A plain thread, waited for by `finish`: a daemon could be cut off in the middle of a file.
        writer = threading.Thread(target=self._write, args=(result, stem, facts), name="headway windows", daemon=True)
        self._writers = [*(w for w in self._writers if w.is_alive()), writer]
        writer.start()

    def _write(self, result: Any, stem: str, facts: dict[str, int]) -> None:
        """Write one window's files; runs in a thread, whose time counts as cost: it holds the interpreter."""
        started = now()
        try:
            os.makedirs(os.path.dirname(stem), exist_ok=True)
            result.save(f"{stem}.json")
            self._bytes += os.path.getsize(f"{stem}.json")
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
        self._last_cost_ns += spent
        self.cost_ns += spent

    def _watch(self, name: str) -> Callable[[], None]:
        """Stop for good as soon as the script calls what begins a profile of its own; returns the undo."""
        from headway.runtime.patches import replace_attribute

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
        """Drop an open window and open no more."""
        self.stopped = reason
        self.drop()

    def drop(self) -> None:
        """Drop an open window: also before a fork, for a child would go on profiling for ever.

        The profiler belongs to the thread that started it: from another one it cannot be stopped, nor is it inherited.
        """
        if self._open is not None and self._open.thread == threading.get_ident():
            self._open, start = None, now()
            with contextlib.suppress(Exception):
                with quiet_stderr():
                    low_level_stop()
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


class _Open:
    """A window that is being recorded."""

    __slots__ = ("opening_ns", "realtime_ns", "start_ns", "thread", "usual_ns")

    def __init__(self, start_ns: int, realtime_ns: int, opening_ns: int, usual_ns: int) -> None:
        self.start_ns, self.realtime_ns, self.opening_ns, self.usual_ns = start_ns, realtime_ns, opening_ns, usual_ns
        self.thread = threading.get_ident()


class Schedule:
    """The optimizer step at which the ranks of this host open their next window: 8 bytes in a file."""

    def __init__(self, probes: Probes) -> None:
        recorder = probes.recorder
        self.leads = recorder.rank == 0 if recorder.role else recorder.local_rank == 0
        """Whether this rank writes; a rank that the script spawned itself knows only its rank."""
        self._path = f"{probes.run}/windows/schedule-a{recorder.attempt}-{socket.gethostname()}"
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def read(self) -> int:
        """Return the announced step, -1 when there is none."""
        data = os.pread(self._descriptor, 8, 0)
        return struct.unpack("<q", data)[0] if len(data) == 8 else -1

    def write(self, step: int) -> None:
        """Announce the next window; through a descriptor of its own, for the script may have closed and reused ours."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, struct.pack("<q", step), 0)
        finally:
            os.close(descriptor)


def low_level_start() -> None:
    """Switch the profiler on: for the CPU, and for the devices in use.

    CUPTI stays attached afterwards, as `torch.profiler` has it too: CUDA graphs do not survive its coming and going.
    That is said to the profiler's library in the C environment alone: what the script sees in `os.environ` stays.
    """
    from torch._C._autograd import _enable_profiler, _prepare_profiler
    from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, _ExperimentalConfig

    for name, value in {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}.items():
        if name not in os.environ:
            os.putenv(name, value)
    config = ProfilerConfig(ProfilerState.KINETO, False, False, False, False, False, _ExperimentalConfig())
    known = ProfilerActivity.__members__
    activities = {ProfilerActivity.CPU, *(known[name] for name in device.activities() if name in known)}
    _prepare_profiler(config, activities)
    _enable_profiler(config, activities)


def low_level_stop() -> Any:
    """Switch the profiler off; the result has `save(path)`, which writes Kineto's JSON."""
    from torch._C._autograd import _disable_profiler

    return _disable_profiler()


FLIGHT_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Functions of torch that return a Flight Recorder's entries: NCCL has one of its own beside that of other backends."""


def flight_entries() -> bytes:
    """Return the Flight Recorders' entries as JSON, empty when no process group exists: of the one that has the most.

    Raises what torch raises.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return b""
    module = sys.modules["torch._C._distributed_c10d"]
    dumps = [bytes(getattr(module, name)()) for name in FLIGHT_DUMPS if hasattr(module, name)]
    return max(dumps, key=lambda dump: dump.count(b'"state"'), default=b"")


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Keep the profiler's "USDT:" lines, which it prints from C++, off stderr; what else comes is passed on."""
    try:
        sys.stderr.flush()
        kept = os.dup(2)
        memory = os.memfd_create("headway-stderr")  # never a disk, which may be full when the profiler has to stop
    except (OSError, ValueError, AttributeError):
        yield
        return
    with os.fdopen(memory, "w+b") as aside:
        os.dup2(aside.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            aside.seek(0)
            rest = b"".join(line for line in aside if not line.startswith(b"USDT:"))
            if rest:
                with contextlib.suppress(OSError):
                    os.write(2, rest)
