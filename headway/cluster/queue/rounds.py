"""The round mechanism: from fractions of time to jobs on devices, a round at a time.

A row of the ledger is a job, or two jobs that share devices. For each row and
type it holds the share `x`, the time received since the last decision, and
what the row is still owed from before:

    row    a    b   scale    x[r, j]        time_on[r, j]      owed[r, j]
    0      7   -1     1    [1.0 0.0 0.0]    [540 180 180]      [  0   0   0]
    1      9   -1     8    [0.1 0.2 0.0]    [180 180 180]      [ 90  70   0]
    2      7   12     1    [0.0 0.3 0.0]    [180 540 180]      [  0   0   0]

Types are filled one after the other; on each, rows in order of urgency, gang
or nothing. Two orders are here. `gavel` is the published one exactly: share /
time received, then what is owed, then the share (Narayanan et al., OSDI 2020,
section 5, and the released code). `deficit` serves what is owed, over resets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.cluster.model import Jobs
from headway.core.errors import InputError
from headway.core.tables import pick

Values = NDArray[np.float64]
Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]

LATEST, GRACE_S = 1.6, 3600.0
"""A gang that is this many times as late as jobs are on average is served first; an hour counts for nothing."""

ROUNDS_PER_DECISION = 16 / 3
"""Rounds of a service from one decision to the next at least: Gavel's 1920 s of 360."""

MOMENT_S = 1e-6
"""Times that are no further apart are one: sums of round lengths are not exact."""


@dataclass(slots=True, eq=False)
class CandidateRows:
    """What may run: `r` rows, `W` types. Changed in place between two decisions."""

    a: Indices
    """[r] A job, as index into all jobs."""

    b: Indices
    """[r] The job that shares its devices, or -1."""

    scale: Indices
    """[r] Devices needed."""

    x: Values
    """[r, W] Fraction of time that the last decision gives."""

    rate_a: Values
    """[r, W] Steps per second of job a; 0 = not there."""

    rate_b: Values
    """[r, W] Steps per second of job b."""

    time_on: Values
    """[r, W] Seconds received since the last decision, plus half a round."""

    owed: Values
    """[r, W] Seconds owed from before the last decision."""

    decided: Flags
    """[r] The last decision knew the row."""

    starving: Values
    """[r] By how much a gang is later than it should be; 0 = it is not."""

    @classmethod
    def singles(
        cls, a: Indices, scale: Indices, x: Values, rate: Values, half_s: float, decided: bool
    ) -> CandidateRows:
        """Return rows of jobs alone, with half a round of credit."""
        return cls(
            a, np.full(a.size, -1), scale, x, rate, np.zeros(rate.shape), np.full(rate.shape, half_s),
            np.zeros(rate.shape), np.full(a.size, decided),
            np.zeros(a.size),
        )  # fmt: skip

    @classmethod
    def none(cls, num_types: int) -> CandidateRows:
        """Return no rows."""
        empty, nothing = np.zeros(0, np.int64), np.zeros((0, num_types))
        return cls.singles(empty, empty, nothing, nothing, 0.0, False)

    def keep(self, rows: Flags | Indices) -> None:
        """Drop all rows but these."""
        for name in ("a", "b", "scale", "x", "rate_a", "rate_b", "time_on", "owed", "decided", "starving"):
            setattr(self, name, getattr(self, name)[rows])

    def append(self, more: CandidateRows) -> None:
        """Add rows behind those that are here."""
        for name in ("a", "b", "scale", "x", "rate_a", "rate_b", "time_on", "owed", "decided", "starving"):
            setattr(self, name, np.concatenate((getattr(self, name), getattr(more, name))))

    def of(self, jobs: Indices) -> Indices:
        """[k] Rows of jobs that are here, alone."""
        order = np.argsort(self.a, kind="stable")
        return order[np.searchsorted(self.a, jobs, sorter=order)]

    def lateness(self, now_s: float, jobs: Jobs, left: Values, fastest: Values) -> Values:
        """[r] How late a gang is, where beyond the limit: (age + an hour) / (work done, in time alone, + an hour)."""
        at = self.a
        done_s = (jobs.steps[at] - left[at]) / fastest[at]
        late = (now_s - jobs.arrival_s[at] + GRACE_S) / (done_s + GRACE_S)
        limit = LATEST * late[self.b < 0].mean() if at.size else 1.0
        return np.where((jobs.scale[at] > 1) & (late > limit), late, 0.0)


def runnable(rows: CandidateRows) -> Flags:
    """[r, W] Where a row makes progress: both jobs of it."""
    return np.asarray((rows.rate_a > 0) & ((rows.b < 0)[:, None] | (rows.rate_b > 0)))


def fill(order: Indices, scale: Indices, free: int, first: Indices, second: Indices, taken: Flags) -> list[int]:
    """Return the rows that get devices, in the given order: each that still fits, and none of whose jobs is taken.

    Without pairs, whole prefixes that fit are taken at once: the first row
    that does not fit removes all rows as large as it, so there are at most as
    many passes as gang sizes. `taken` [jobs] is updated.
    """
    chosen: list[int] = []
    if (second[order] >= 0).any():
        for row in order.tolist():
            if not free:
                break
            a, b = first[row], second[row]
            if scale[row] <= free and not taken[a] and not (b >= 0 and taken[b]):
                chosen.append(row)
                free -= int(scale[row])
                taken[a] = True
                if b >= 0:
                    taken[b] = True
        return chosen
    order = order[~taken[first[order]] & (scale[order] <= free)]
    while order.size and free:
        used = np.cumsum(scale[order])
        fits = int(np.searchsorted(used, free, "right"))
        chosen.extend(order[:fits].tolist())
        free -= int(used[fits - 1])
        order = order[fits:]
        order = order[scale[order] <= free]
    taken[first[chosen]] = True
    return chosen


class RowOrder(NamedTuple):
    """How rows are ordered on a type, and what is carried over a decision."""

    keys: Callable[[CandidateRows, float, float], tuple[Values, ...]]
    """(rows, seconds since the decision, half a round) -> [r, W] each, most significant first, larger = sooner."""

    carry: Callable[[CandidateRows, float, float], Values]
    """The same -> [r, W] what a row is owed when the next decision is made."""


def lag(rows: CandidateRows, elapsed_s: float, half_s: float) -> Values:
    """[r, W] Seconds that a row should have received by now and has not."""
    return np.asarray(rows.owed + rows.x * elapsed_s - (rows.time_on - half_s))


def gavel_keys(rows: CandidateRows, elapsed_s: float, half_s: float) -> tuple[Values, ...]:
    """Order by share / time received, then what was owed at the decision, then share: the published order.

    Shares are rounded to 9 digits, so that a solver's noise orders nothing.
    """
    share = np.round(rows.x, 9)
    return share / np.maximum(rows.time_on, 1e-9), rows.owed, share


def deficit_keys(rows: CandidateRows, elapsed_s: float, half_s: float) -> tuple[Values, ...]:
    """Order starving gangs first, then rows with a share by what they are owed, then the others by all of it."""
    behind = lag(rows, elapsed_s, half_s)
    urgent = np.broadcast_to(rows.starving[:, None], rows.x.shape)
    return (
        urgent,
        np.asarray(rows.x > 1e-9, np.float64),
        np.where(rows.x > 1e-9, behind, behind.sum(axis=1, keepdims=True)),
    )


ORDERS: Mapping[str, RowOrder] = {"headway": RowOrder(deficit_keys, lag), "gavel": RowOrder(gavel_keys, lag)}
"""Rules of rounds by name."""


def chosen_rows(
    rows: CandidateRows, types: list[int], count: Indices, num_jobs: int, order: RowOrder, strict: bool,
    elapsed_s: float, half_s: float, stays: Indices | None = None,
) -> tuple[Indices, Indices]:  # fmt: skip
    """Fill the types in the given order; return the rows that run [k] and the type of each [k].

    Jobs that `stays` names have devices, beside `count`, and are not chosen.

    A row that no decision knew takes its devices and does not run: the
    published mechanism does that; our own rules give new rows a share.
    """
    keys = order.keys(rows, elapsed_s, half_s)
    may, taken = runnable(rows), np.zeros(num_jobs, np.bool_)
    if strict:
        may = may & (rows.x > 0)
    if stays is not None:
        taken[stays] = True
    found: list[int] = []
    kinds: list[int] = []
    for j in types:
        able = np.flatnonzero(may[:, j])
        sooner = np.lexsort([-key[able, j] for key in reversed(keys)])  # the last key of lexsort leads; ties keep order
        chosen = fill(able[sooner], rows.scale, int(count[j]), rows.a, rows.b, taken)
        found.extend(chosen)
        kinds.extend([j] * len(chosen))
    row, kind = np.array(found, np.int64), np.array(kinds, np.int64)
    runs = rows.decided[row]
    return row[runs], kind[runs]


@dataclass(frozen=True, slots=True)
class Timing:
    """When rounds end and decisions are made."""

    rules: str = "headway"
    """A name of `rounds.ORDERS`."""

    round_s: float = 360.0
    """Longest round."""

    reset_s: float = 1920.0
    """Least time between two decisions."""

    fills: bool = False
    """Devices that fall free within a round go to jobs that wait, to its end; who runs keeps its devices."""

    def __post_init__(self) -> None:
        """Raise `InputError` on an unknown rule or times that are not above 0."""
        pick(ORDERS, self.rules, "rules")
        if not (0 < self.round_s < math.inf and 0 <= self.reset_s < math.inf):
            raise InputError(
                f"round_s is {self.round_s:g}, reset_s {self.reset_s:g}; give finite seconds, rounds above 0."
            )


@dataclass(slots=True, eq=False)
class RunningRows:
    """The `r` rows that have devices now, and what they will have done when they give them back."""

    row: Indices
    """[r] Rows of the ledger."""

    kind: Indices
    """[r] Device type of each."""

    a: Indices
    """[r] A job of each."""

    since_s: Values
    """[r] Since when."""

    seconds: Values
    """[r] How long."""

    steps_a: Values
    """[r] Steps of job a."""

    steps_b: Values
    """[r] Steps of the job that shares its devices."""

    def take(self, rows: Flags) -> RunningRows:
        """Return some of them."""
        return RunningRows(*(getattr(self, name)[rows] for name in self.__slots__))

    def with_more(self, other: RunningRows) -> RunningRows:
        """Return these and others."""
        return RunningRows(*(np.concatenate((getattr(self, n), getattr(other, n))) for n in self.__slots__))


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What a job really did since it got its devices: what a service measures in place of what is predicted."""

    seconds: float
    """How long it had them."""

    steps: float
    """Steps that it did."""

    ended: bool = False
    """It has given them back."""

    done: bool = False
    """It has nothing left to do."""
