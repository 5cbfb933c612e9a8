"""What every way of accounting returns: sub-lines per rank, and how far they can be trusted.

Recorded runs (`attempts.py`), profiler traces (`kernels.py`) and operation
traces (`root_cause.py`) build an `Account`; `ledger.py` sums it.

>>> {sub: int(ns) for sub, ns in zip(SUBS, booked("host.gc", 7), strict=True) if ns}
{'host.gc': 7}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.ledger.booking.arrivals import RankLateness
from headway.ledger.buckets import BUCKETS, SUB_CODE, SUBS
from headway.ledger.cause import SampledLine
from headway.trace.events.intervals import Ints
from headway.trace.recording.run_facts import RunFacts


def blank_subs() -> Ints:
    """Return [len(SUBS)] zeros."""
    return np.zeros(len(SUBS), np.int64)


def blank_steps() -> Ints:
    """Return [len(BUCKETS), 0]: no step is known."""
    return np.zeros((len(BUCKETS), 0), np.int64)


def no_steps() -> Ints:
    """Return [0]: no step is known."""
    return np.zeros(0, np.int64)


STEADY = 10
"""Steps after the first one that say by themselves what bounds the steps."""

BUSY = 0.75
"""Share of the steps' time at work from which on a device bounds them."""


def bound_of(step_ns: Ints) -> tuple[str, float]:
    """Return what bounds the steps [len(BUCKETS), n], and the share of their time in which the device is at work.

    That is 'device' where it is at work for most of the time, else the bucket that takes most of the rest; 'unknown'
    where time in which it may have been at work would decide, '' without steps. The first step, in which libraries are
    loaded and kernels chosen, is left out where enough others follow.

    >>> step_ns = blank_steps()
    >>> bound_of(step_ns)
    ('', 0.0)
    """
    steady_ns = step_ns[:, step_ns.shape[1] > STEADY :]
    total = dict(zip(BUCKETS, steady_ns.sum(axis=1).tolist(), strict=True))
    steps_ns = sum(total.values())
    if not steps_ns:
        return "", 0.0
    share = total.pop("useful") / steps_ns
    # The device may have worked through all of `unknown` or none of it:
    #     0 ---- share ---- BUSY ---- share + unknown ---- 1     both answers are possible only in this case
    if share < BUSY <= share + total["unknown"] / steps_ns:
        return "unknown", share
    return "device" if share >= BUSY else max(total, key=lambda bucket: total[bucket]), share


@dataclass(frozen=True, slots=True)
class SpanFacts:
    """Totals of one recorded name on the training threads of all ranks; of background work, on the saver's lane."""

    count: int
    """Rows."""

    total_ns: int
    """Sum of their durations; overlaps are counted twice."""

    max_ns: int
    """Longest one."""

    total_bytes: int
    """Sum of their bytes, 0 where none were recorded."""

    def __add__(self, other: SpanFacts) -> SpanFacts:
        """Return the totals of both."""
        longest = max(self.max_ns, other.max_ns)
        return SpanFacts(
            self.count + other.count, self.total_ns + other.total_ns, longest, self.total_bytes + other.total_bytes
        )


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """What the kernels took that profiler windows showed inside `useful`, over whole steps of all ranks."""

    ns: Mapping[str, int] = field(default_factory=dict)
    """Name of a kernel -> the time in which it alone, or it first, had the device."""

    count: Mapping[str, int] = field(default_factory=dict)
    """Name of a kernel -> how often it was launched."""

    num_steps: int = 0
    """Steps, each of one device."""

    def __add__(self, more: KernelTimes) -> KernelTimes:
        """Return what both showed."""
        ns, count = (dict(Counter(getattr(self, name)) + Counter(getattr(more, name))) for name in ("ns", "count"))
        return KernelTimes(ns, count, self.num_steps + more.num_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class BookedTime:
    """What is told of booked time whether it stands by rank (`Account`) or is summed (`Ledger`)."""

    wall_ns: int
    """Launcher start to exit: what each device is accounted for."""

    steps: int
    """Optimizer steps whose result was kept."""

    basis: Mapping[str, str]
    """Bucket -> how it is known: 'recorded', 'remainder', 'sampled ...', 'replayed', 'kernels'."""

    step_ns: Ints = field(default_factory=blank_steps)
    """[len(BUCKETS), n] Device-ns of each bucket in each step of the last attempt, over all ranks."""

    step_wall_ns: Ints = field(default_factory=no_steps)
    """[n] Wall of each step of the last attempt: the mean over ranks, whole ns."""

    undisturbed: NDArray[np.bool_] | None = None
    """[n] Steps that no deep window made longer; None = all of them."""

    lateness: RankLateness = field(default_factory=RankLateness)
    """Who waited for whom, over all attempts."""

    spans: Mapping[str, SpanFacts] = field(default_factory=dict)
    """Recorded name -> its totals."""

    loader_calls: Mapping[int, int] = field(default_factory=dict)
    """Loader (group of the run's loader facts; -1 = not known) -> calls of next(loader) by training, over all ranks."""

    script_lines: tuple[SampledLine, ...] = ()
    """Where training threads were seen between the steps, most time first."""

    gradient_lines: tuple[SampledLine, ...] = ()
    """Where training threads were seen between a backward and the update, most time first."""

    loop_lines: tuple[SampledLine, ...] = ()
    """Loops of the script that training threads were seen in, in forwards and losses, most time first; what was in none
    has the line ''."""

    load_lines: tuple[SampledLine, ...] = ()
    """Where training threads were seen in the loads of loaders without workers, most time first."""

    wait_lines: tuple[SampledLine, ...] = ()
    """Where training threads were seen to wait for their devices, most time first."""

    collective_lines: tuple[SampledLine, ...] = ()
    """Blocking collectives of the script behind the first step, all of them timed, most time first."""

    facts: RunFacts = field(default_factory=RunFacts)
    """Facts of the run: run.json, or the trace's own."""

    hosts: Mapping[int, str] = field(default_factory=dict)
    """Rank -> host, where known."""

    kernels: KernelTimes = field(default_factory=KernelTimes)
    """What windows of a device showed of its kernels; empty without one."""

    notes: tuple[str, ...] = ()
    """What a reader must know to judge the numbers, such as why `unknown` is large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account(BookedTime):
    """Booked time of every rank; each adds up to `wall_ns`."""

    sub_ns: Mapping[int, Ints]
    """Device (rank) -> [len(SUBS)] ns."""

    loader_ns: Mapping[int, Ints] = field(default_factory=dict)
    """Loader -> [len(SUBS)] ns that training threads spent on it, over all ranks."""

    def __post_init__(self) -> None:
        """Check that no nanosecond was lost or counted twice."""
        for rank, amounts in self.sub_ns.items():
            # The ledger's law: sub-lines partition the wall of each device, to the nanosecond.
            booked = int(amounts.sum())
            assert booked == self.wall_ns, f"rank {rank}: {booked} ns booked of {self.wall_ns}"
            assert int(amounts.min()) >= 0, f"rank {rank}: {SUBS[int(amounts.argmin())]} is negative"


def booked(sub: str, duration_ns: int) -> Ints:
    """Return sub-lines [len(SUBS)] that hold one amount."""
    amounts = blank_subs()
    amounts[SUB_CODE[sub]] = duration_ns
    return amounts
