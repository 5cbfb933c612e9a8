"""The profiler under deep windows: switched by its low-level calls, its library attached no longer than it has to be.

CUPTI slows every launch for as long as it is attached, a quarter of a step of short kernels, also while nothing is
recorded. The profiler's library (kineto) asks two variables of the C environment what to do behind a profile:

    TEARDOWN_CUPTI=1              a thread waits for the next call of the driver, and has CUPTI leave the process there
    DISABLE_CUPTI_LAZY_REINIT     not set: a later profile attaches it again

CUDA graphs do not survive that before CUDA 12.6 (torch/profiler/profiler.py), and were little tried since: where one
was captured CUPTI stays, as it does behind `torch.profiler`. What the script sees in `os.environ` stays as it is.

How long steps take before a window and behind it: a profiler that stays attached slows every step from then on.

    looks        |----|----|----| window |----|----|----|---- ...
                    before                   behind          stays = behind - before, for each step from then on

A look is at every few steps; medians of `LOOKS` stretches between looks are compared. What stays is added up over
windows, with its sign: noise goes both ways.

>>> pace = WindowPace()
>>> for step in range(0, 36, 4): _ = pace.look(step, 100 * step)
>>> pace.closed()
>>> sum(pace.look(step, 4_000 + 120 * (step - 36)) for step in range(40, 76, 4)), pace.stays_ns, pace.longer
(640, 20.0, 0.2)

At which steps windows open: the same on all hosts of a job, without a word between them.

A window opens at a multiple of a power of two of steps, its spacing, and has that step as its number. Each host finds
its spacing from what windows cost it. So equal numbers mean equal steps, and the windows of a host on which they cost
more are some of the others':

    windows cost 10 ms    |   |   |   |   |   |   |   |     every 64th step
    windows cost 20 ms    |       |       |       |         every 128th

While one host profiles, the others wait for its collectives; they profile at the same steps. So hosts that are alike
pay one budget together, and not one each. The ranks of one host agree through 8 bytes in a file, some steps ahead: one
that looks late finds out in time.

>>> spacing(cost_ns=10_000_000, step_ns=20_000_000, budget=0.01, least=20)
64
>>> opening_step(now=103, cycle=2, ahead=10, spacing=64)
128
"""

from __future__ import annotations

import contextlib
import os
import random
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator
from statistics import median
from typing import Any

from headway.core.machine.host import host_id
from headway.runtime.calls.probe_step import graphs_captured
from headway.runtime.host import device
from headway.runtime.recorder.probes import Probes, now

SWITCHES = ("TEARDOWN_CUPTI", "DISABLE_CUPTI_LAZY_REINIT")
"""Variables that kineto asks; where the script, or its user, has set one of them it stays as it is."""

LEAST_CUDA = (12, 6)
"""Version of CUDA from which on CUPTI may leave and come back."""

LEAVES_NS = 200_000_000
"""Time in which CUPTI has left, with some calls of the driver in it."""


def may_detach() -> bool:
    """Whether CUPTI may leave behind a window. False where there is none, as on other kinds of device."""
    version = str(getattr(sys.modules["torch"].version, "cuda", None) or "0.0").split(".")
    known = tuple(int(part) for part in version[:2] if part.isdecimal()) >= LEAST_CUDA
    return known and not graphs_captured() and not any(name in os.environ for name in SWITCHES)


def tell_kineto(detach: bool | None) -> None:
    """Say whether CUPTI leaves behind the profile that begins or ends; None takes back what was said."""
    said = {None: ("", ""), True: ("1", ""), False: ("0", "1")}[detach]
    for name, value in zip(SWITCHES, said, strict=True):
        if name not in os.environ:
            os.putenv(name, value) if value else os.unsetenv(name)


def await_detached(since_ns: int) -> None:
    """Call the driver until CUPTI, which was told to leave at `since_ns`, has had the time to: it leaves inside a call.

    Another profile, or the end of the process, must not meet it on its way out.
    """
    while now() - since_ns < LEAVES_NS and not device.capturing():
        for one in device.seen():
            one.release(one.record())
        time.sleep(LEAVES_NS / 20e9)


def has_kernels(path: str) -> bool:
    """Whether the profiler's JSON at `path` has a row of category 'kernel'."""
    tail = b""
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            if b'"kernel"' in tail + block:
                return True
            tail = block[-16:]
    return False


def low_level_start(*, host: bool = True, detach: bool = False) -> None:
    """Switch the profiler on: for the devices in use, and for the operations of the `host`."""
    from torch._C._autograd import _enable_profiler, _prepare_profiler
    from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, _ExperimentalConfig

    tell_kineto(detach)
    config = ProfilerConfig(ProfilerState.KINETO, False, False, False, False, False, _ExperimentalConfig())
    known = ProfilerActivity.__members__
    activities = {known[name] for name in device.activities() if name in known}
    if host or not activities:
        activities.add(ProfilerActivity.CPU)
    _prepare_profiler(config, activities)
    _enable_profiler(config, activities)


def low_level_stop(*, detach: bool = False) -> Any:
    """Switch the profiler off; the result has `save(path)`, which writes Kineto's JSON.

    None where it is not on, because a signal's handler raised between two calls of a start or a stop: what torch
    returns then ends the process when it is saved.
    """
    from torch._C._autograd import _disable_profiler, _profiler_enabled

    tell_kineto(detach)
    return _disable_profiler() if _profiler_enabled() else None


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


# How long steps take before a window and behind it: a profiler that stays attached slows every step from then on.

LOOKS = 8
"""Stretches between two looks that tell the time of a step."""


class WindowPace:
    """The time of a step between looks, ns, and how much of it windows left behind."""

    def __init__(self) -> None:
        self._stretches = deque[float](maxlen=LOOKS)
        self._last: tuple[int, int] | None = None
        self._before_ns = 0.0
        self.is_measuring = False
        """Whether the steps behind the newest window are still too few to tell."""
        self.stays_ns = self.longer = 0.0
        """How much longer each step takes since the first window; the same as a fraction of the step before the newest.
        """

    def closed(self) -> None:
        """Say that a window was closed."""
        self.is_measuring = bool(self._stretches)
        self._before_ns = median(self._stretches) if self.is_measuring else 0.0
        self._stretches.clear()
        self._last = None

    def look(self, step: int, at_ns: int) -> int:
        """Note that `step` steps were done at `at_ns`; returns what windows cost since the look before, ns."""
        last, self._last = self._last, (step, at_ns)
        if last is None or step <= last[0]:
            return 0
        steps = step - last[0]
        each_ns = (at_ns - last[1]) / steps
        self._stretches.append(each_ns)
        longer_ns = each_ns - self._before_ns if self.is_measuring else self.stays_ns
        if self.is_measuring and len(self._stretches) == LOOKS:
            self.is_measuring = False
            self.stays_ns += median(self._stretches) - self._before_ns
            self.longer = self.stays_ns / self._before_ns
        return max(0, round(longer_ns * steps))


# At which steps windows open: the same on all hosts of a job, without a word between them.

MOST_RANKS = 16
"""Ranks of a job that take part in one window: in larger jobs they take turns."""


def spacing(*, cost_ns: int, step_ns: int, budget: float, least: int) -> int:
    """Return the least power of two of steps (of `step_ns` each) whose `budget` pays for a window of `cost_ns`.

    `least` is the number of steps that a window needs: to be announced, to come, and to be over. With fewer between
    two multiples a host would reach every second or third of them only, and another host the ones between.
    """
    steps = 16
    while (steps < least or steps * step_ns * budget < cost_ns) and steps < 1 << 40:
        steps *= 2
    return steps


def opening_step(*, now: int, cycle: int, ahead: int, spacing: int) -> int:
    """Return the first optimizer step, at least `ahead` cycles after `now`, that ends a multiple of `spacing` cycles.

    A cycle is one turn of all optimizers: `cycle` optimizer steps.
    """
    stride = cycle * spacing
    return -(-(now + ahead * cycle) // stride) * stride


def takes_part(rank: int, num_ranks: int, number: int) -> bool:
    """Whether `rank` records window `number` of a job of `num_ranks`: `MOST_RANKS` or fewer do, others each time.

    >>> sum(takes_part(rank, 1024, 64) for rank in range(1024))
    16
    """
    strides = -(-num_ranks // MOST_RANKS)
    return strides <= 1 or rank % strides == random.Random(number).randrange(strides)


class WindowSchedule:
    """The optimizer step at which the ranks of this host open their next window: 8 bytes in a file."""

    def __init__(self, probes: Probes) -> None:
        recorder = probes.recorder
        self.leads = recorder.rank == 0 if recorder.role else recorder.local_rank == 0
        """Whether this rank writes; a rank that the script spawned itself knows only its rank."""
        self._path = f"{probes.run}/windows/schedule-a{recorder.attempt}-{host_id()}"
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

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
