"""Two ledgers side by side: what got slower, and by how much per step.

Use it as a regression gate: `RunComparison.exit_code` is 3 when the second run
lost more than `threshold` of the first one's step time in any bucket, or in
steps per second. Judged are the steps after the first one, so that runs of
unlike length compare and start-up, of which a short run mostly consists, does
not decide: it is listed, and noted when it grew. Steps that deep windows made
longer are left out where others are enough. `whole=True` judges whole
runs instead: all that happened, per step, and what comes once, per run.

How sure a difference is follows from the steps themselves. They are cut into
blocks, since neighbours are alike; the blocks' means tell how far the mean of
the run may be off, and two quiet runs of one job differ by `RUN_TO_RUN` besides:

    sd(log speedup)^2 = sd(first)^2 + sd(second)^2 + RUN_TO_RUN^2

The gate closes only where the whole interval lies beyond the threshold. What
other load on the host explains is no difference of the runs: it is inconclusive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.machine.host_load import HostLoad
from headway.core.units import NS_PER_S, format_fraction, format_rate, format_seconds
from headway.ledger.answers.ledger import Ledger
from headway.ledger.buckets import BUCKETS, ONCE_PER_RUN
from headway.sim.graph.intervals import FEWEST_BLOCKS, RUN_TO_RUN, spread, student

WHOLE = "it counts with --whole only"
"""What a note says of growth that is not judged."""

CHANGE_KEYS = ("bucket", "per", "before_s", "after_s", "delta_s", "regressed")
"""Keys of a change in `headway compare --json`."""

LOSSES = tuple(bucket for bucket in BUCKETS if bucket not in ("idle", "unknown"))
"""Buckets whose growth can be a regression."""

SCHEMA = "headway.compare/1"

UNLIKE_CORES = 0.15
"""Cores by which the other load of two runs has to differ to explain a difference: sampling is off by less."""

UNLIKE_SHARE = 0.02
"""The same as a share of the host's cores."""


OTHER_MODEL = 0.01
"""Difference in parameters from which two models are not the same."""


@dataclass(frozen=True, slots=True)
class BucketChange:
    """One bucket in both runs, seconds per device and step (or per device and run)."""

    bucket: str
    """The bucket."""

    per: str
    """'step' or 'run': what the seconds are divided by; steps are those after the first, unless runs are judged."""

    before_s: float
    """Seconds per device in the first run."""

    after_s: float
    """Seconds per device in the second run."""

    regressed: bool
    """Whether it grew by more than the threshold allows."""

    @property
    def delta_s(self) -> float:
        """Seconds added, negative when won."""
        return self.after_s - self.before_s


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The second run against the first."""

    steps_per_s: tuple[float, float]
    """Steps per second of both, start-up left out."""

    speedup: float
    """Steps per second of the second over the first."""

    goodput: tuple[float | None, float | None]
    """Goodput of both whole runs; None where it is not known."""

    step_goodput: tuple[float | None, float | None]
    """Useful share of the device time in steps, of both; None where it is not known."""

    changes: tuple[BucketChange, ...]
    """Every bucket, in the order of `BUCKETS`."""

    threshold: float
    """Share of the first run's step (or wall) that may be lost without being called a regression."""

    slower: bool
    """Whether steps per second fell by more than the threshold."""

    interval: tuple[float, float] | None = None
    """Range of the speedup that holds 95 % of pairs of runs like these; None with fewer than three steps to judge."""

    inconclusive: str = ""
    """What else explains the difference: other load on the host, in words; '' where nothing does."""

    whole: bool = False
    """Whether whole runs were judged, and not the steps alone."""

    notes: tuple[str, ...] = ()
    """What grew and was not judged."""

    useful_examples_per_s: tuple[float, float] | None = None
    """Of both runs, where their batches differ: they are judged instead of the steps; None otherwise."""

    @property
    def verdict(self) -> str:
        """Return 'faster', 'slower', 'inconclusive' (other load explains it) or 'not resolved' (the noise does)."""
        if self.useful_examples_per_s is not None and not self.inconclusive:
            before, after = self.useful_examples_per_s
            # Steps of unlike batches have no common spread: as much as the gate lets pass is not told apart.
            small = abs(after / before - 1) <= self.threshold
            return "not resolved" if small else "faster" if after > before else "slower"
        if self.inconclusive:
            return "inconclusive"
        if self.whole or self.interval is None:
            return "not resolved" if self.interval is None and not self.whole else "slower" if self.slower else "faster"
        low, high = self.interval
        return "faster" if low > 1 else "slower" if high < 1 else "not resolved"

    @property
    def regressions(self) -> list[str]:
        """Say in words what got worse; empty when nothing did."""
        found = []
        if self.useful_examples_per_s is not None and self.verdict == "slower":
            before, after = self.useful_examples_per_s
            change = format_fraction(after / before - 1, signed=True)
            found.append(f"useful examples/s fell from {before:,.0f} to {after:,.0f} ({change})")
        if self.slower:
            before, after = self.steps_per_s
            change = format_fraction(self.speedup - 1, signed=True)
            found.append(f"steps/s fell from {format_rate(before)} to {format_rate(after)} ({change})")
        found += [
            f"{change.bucket} grew by {format_seconds(change.delta_s)} per {change.per} and device "
            f"({format_seconds(change.before_s)} -> {format_seconds(change.after_s)})"
            for change in self.changes
            if change.regressed
        ]
        return found

    @property
    def exit_code(self) -> int:
        """3 when something regressed, else 0."""
        return 3 if self.regressions else 0

    def to_json(self) -> dict[str, object]:
        """Return the object of schema `headway.compare/1`."""
        return {
            "schema": SCHEMA,
            "steps_per_s": list(self.steps_per_s),
            "speedup": self.speedup,
            "useful_examples_per_s": self.useful_examples_per_s and list(self.useful_examples_per_s),
            "interval": list(self.interval) if self.interval else None,
            "verdict": self.verdict,
            "inconclusive": self.inconclusive,
            "goodput": list(self.goodput),
            "step_goodput": list(self.step_goodput),
            "whole": self.whole,
            "threshold": self.threshold,
            "changes": [{name: getattr(change, name) for name in CHANGE_KEYS} for change in self.changes],
            "regressions": self.regressions,
            "notes": list(self.notes),
            "exit_code": self.exit_code,
        }


def compare(
    before: Ledger,
    after: Ledger,
    threshold: float = 0.05,
    *,
    whole: bool = False,
    loads: tuple[HostLoad | None, HostLoad | None] = (None, None),
    parameters: tuple[int, int] = (0, 0),
) -> RunComparison:
    """Compare two ledgers of the same job; `threshold` is a fraction of the first one's step time (or wall).

    Steps after the first are judged; with `whole`, everything that happened. `loads` are what other processes took of
    the host beside each run: a change that an unlike load explains is inconclusive, and closes no gate. So is one
    between models of other sizes: `parameters` are the numbers that each trains, 0 = not known.
    Raises `InputError` when a ledger has no complete step, or on a threshold outside (0, 1).
    """
    if not 0.0 < threshold < 1.0:
        raise InputError(f"threshold is {threshold}; it must lie between 0 and 1. Pass 0.05 for five percent.")
    for label, ledger in (("first", before), ("second", after)):
        if not ledger.steps or not len(ledger.step_wall_ns):
            raise InputError(f"the {label} run has no complete step, so there is no step time. Record a longer one.")
    rates = (steps_per_s(before), steps_per_s(after))
    once = [
        BucketChange(b, "run", first, second, whole and _grew(b, first, second, before, threshold))
        for b in ONCE_PER_RUN
        for first, second in [(_per_device(before, b), _per_device(after, b))]
    ]
    unjudged = [change for change in once if _grew(change.bucket, change.before_s, change.after_s, before, threshold)]
    if whole:
        interval, in_steps = None, _whole_steps(_per_step(before), _per_step(after), threshold)
        slower = rates[1] < rates[0] * (1.0 - threshold)
    else:
        interval, in_steps = speedup_interval(before, after), _judged_steps(before, after, threshold)
        slower = interval is not None and interval[1] < 1.0 - threshold
    changes = {change.bucket: change for change in [*in_steps, *once]}
    found = RunComparison(
        steps_per_s=rates,
        speedup=rates[1] / rates[0],
        goodput=(_known(before, before.goodput), _known(after, after.goodput)),
        step_goodput=(_known(before, _step_goodput(before)), _known(after, _step_goodput(after))),
        changes=tuple(changes[bucket] for bucket in BUCKETS),
        threshold=threshold,
        slower=slower,
        interval=interval,
        whole=whole,
        notes=() if whole else tuple(_note(change) for change in unjudged),
    )
    return _of_like_models(_beside_loads(found, loads), parameters)


def by_useful_examples(found: RunComparison, useful_examples_per_s: tuple[float, float]) -> RunComparison:
    """Judge runs of unlike batches by their useful examples per second: a step of one is other work than the other's.

    What was inconclusive stays so.
    """
    unjudged = tuple(replace(change, regressed=change.regressed and change.per == "run") for change in found.changes)
    return replace(found, changes=unjudged, slower=False, useful_examples_per_s=useful_examples_per_s)


def _of_like_models(found: RunComparison, parameters: tuple[int, int]) -> RunComparison:
    """Take the judgement back where the steps are not the same work, because the model is another one."""
    before, after = parameters
    if not before or not after or abs(after / before - 1) <= OTHER_MODEL:
        return found
    words = f"the second run trains {after:,} parameters, the first {before:,}: a step of it is other work"
    kept = tuple(replace(change, regressed=False) for change in found.changes)
    return replace(found, changes=kept, slower=False, inconclusive=words)


def _beside_loads(found: RunComparison, loads: tuple[HostLoad | None, HostLoad | None]) -> RunComparison:
    """Take back what the other load of the two runs explains by itself: more of it makes a run slower, less faster.

    Where a run found no core free, any difference may come from how others took turns with it.
    """
    words, sign = unlike_loads(*loads)
    grew = found.slower or any(change.regressed for change in found.changes)
    slower, faster = found.verdict == "slower" or grew, found.verdict == "faster"
    full = "; ".join(
        f"other processes wanted {load.demand:.2f} cores beside the {label} run, which used {load.own_cores:.2f} of "
        f"{load.cores}"
        for label, load in zip(("first", "second"), loads, strict=True)
        if load is not None and is_full(load)
    )
    explained = (sign <= 0 and slower) or (sign >= 0 and faster)
    if not explained or not (words or full):
        return found
    kept = tuple(replace(change, regressed=False) for change in found.changes)
    return replace(found, changes=kept, slower=False, inconclusive=words or full)


def is_full(load: HostLoad) -> bool:
    """Whether the job had no core to itself: what others wanted and what it used make up the cores that it has."""
    return load.demand >= UNLIKE_CORES and load.own_cores + load.demand > load.cores_available - UNLIKE_CORES


def unlike_loads(before: HostLoad | None, after: HostLoad | None) -> tuple[str, int]:
    """Say how the hosts of two runs were occupied unlike, and which way that works: -1 = it slows the second run.

    >>> unlike_loads(HostLoad(cores=2, cores_available=2, readings=9),
    ...              HostLoad(cores=2, cores_available=2, other_cores=0.9, readings=9))
    ('other processes wanted 0.90 cores beside the second run, 0.00 beside the first', -1)
    """
    if before is None or after is None or not (before.readings and after.readings):
        return "", 0
    words, slows = [], 0.0
    if abs(after.cores_available - before.cores_available) > 0.01:
        words.append(f"the second run could use {after.cores_available:g} cores, the first {before.cores_available:g}")
        slows += before.cores_available - after.cores_available
    more = after.demand - before.demand
    if abs(more) >= max(UNLIKE_CORES, UNLIKE_SHARE * before.cores):
        words.append(
            f"other processes wanted {after.demand:.2f} cores beside the second run, {before.demand:.2f} beside the "
            "first"
        )
        slows += more
    return "; ".join(words), 0 if not words else -1 if slows > 0 else 1


def speedup_interval(before: Ledger, after: Ledger) -> tuple[float, float] | None:
    """Return the range of the second run's steps per second over the first one's; None with too few steps."""
    first, second = (spread(_judged(ledger, ledger.step_wall_ns)) for ledger in (before, after))
    if first is None or second is None or not (first.mean and second.mean):
        return None
    parts = first.sd / first.mean, second.sd / second.mean
    half = student(min(first.freedom, second.freedom)) * math.hypot(*parts)
    half = math.hypot(half, student(math.inf) * RUN_TO_RUN)
    ratio = first.mean / second.mean
    return ratio * math.exp(-half), ratio * math.exp(half)


def _judged_steps(before: Ledger, after: Ledger, threshold: float) -> list[BucketChange]:
    """Compare seconds per step and device of each bucket; it regressed where all of its interval is past the gate."""
    first, second = _in_steps(before), _in_steps(after)
    step_s = sum(first.values())
    found = []
    for bucket in first:
        row = BUCKETS.index(bucket)
        judged = [_judged(ledger, ledger.step_ns[row]) / ledger.devices for ledger in (before, after)]
        spreads = [spread(steps_ns / NS_PER_S) for steps_ns in judged]
        known = [one for one in spreads if one is not None]
        half = math.inf
        if len(known) == 2:
            half = student(min(one.freedom for one in known)) * math.hypot(*(one.sd for one in known))
            half = math.hypot(half, student(math.inf) * RUN_TO_RUN * step_s)
        grown = second[bucket] - first[bucket]
        found.append(BucketChange(bucket, "step", first[bucket], second[bucket], grown - half > threshold * step_s))
    return found


def _judged(ledger: Ledger, steps: NDArray[Any]) -> NDArray[Any]:
    """Return the steps, [..., n], that are judged: where there are others, without the first one and those that deep
    windows made longer."""
    kept = np.arange(steps.shape[-1]) > 0
    if ledger.undisturbed is not None:
        kept[: len(ledger.undisturbed)] &= ledger.undisturbed[: len(kept)]
    kept = kept if kept.sum() >= FEWEST_BLOCKS else np.arange(len(kept)) >= min(1, len(kept) - 1)
    return np.asarray(steps[..., kept])


def _grew(bucket: str, before_s: float, after_s: float, before: Ledger, threshold: float) -> bool:
    """Say whether what comes once grew by more than the threshold allows, as a share of the first run's wall."""
    return bucket in LOSSES and after_s - before_s > threshold * before.wall_ns / NS_PER_S


def _note(change: BucketChange) -> str:
    return (
        f"{change.bucket} grew by {format_seconds(change.delta_s)} per run and device "
        f"({format_seconds(change.before_s)} -> {format_seconds(change.after_s)}): {WHOLE}"
    )


def _whole_steps(before_s: dict[str, float], after_s: dict[str, float], threshold: float) -> list[BucketChange]:
    """Compare seconds per step and device, bucket by bucket; the threshold is a fraction of the first one's sum."""
    allowed = threshold * sum(before_s.values())
    return [BucketChange(b, "step", before_s[b], after_s[b], after_s[b] - before_s[b] > allowed) for b in before_s]


def steps_per_s(ledger: Ledger) -> float:
    """Return steps per second over the steps themselves; 0 without a step.

    Start-up and teardown are left out, and so is step 0 where there are others: it holds the first fork of loader
    workers, lazy imports and cold caches, which come once however long a job is.
    """
    walls = _judged(ledger, ledger.step_wall_ns)
    wall_ns = int(walls.sum())
    return len(walls) * NS_PER_S / wall_ns if wall_ns else 0.0


def whole_speedup(before: Ledger, after: Ledger) -> float | None:
    """Return how many times as fast training went over all steps, the first included; None without a step.

    What a remedy costs once, such as starting workers, lies in step 0: runs of unlike length are compared by what the
    shorter one's number of steps took.
    """
    steps = min(len(before.step_wall_ns), len(after.step_wall_ns))
    kept = np.ones(steps, bool)
    for ledger in (before, after):
        kept &= True if ledger.undisturbed is None else ledger.undisturbed[:steps]
    first, second = (float(ledger.step_wall_ns[:steps][kept].sum()) for ledger in (before, after))
    return first / second if second else None


def _in_steps(ledger: Ledger) -> dict[str, float]:
    """Return seconds per device and step of the buckets that happen in steps, over the steps of `steps_per_s`."""
    found = _judged(ledger, ledger.step_ns)
    if not found.shape[1]:
        return _per_step(ledger)  # an account that knows no single steps
    mean_s = found.mean(axis=1) / (ledger.devices * NS_PER_S)
    return {b: float(s) for b, s in zip(BUCKETS, mean_s, strict=True) if b not in ONCE_PER_RUN}


def _known(ledger: Ledger, share: float) -> float | None:
    """Return a share of useful work where the ledger tells it."""
    return share if ledger.tells_goodput else None


def _step_goodput(ledger: Ledger) -> float:
    """Return the useful share of the device time in steps."""
    seconds = _in_steps(ledger)
    return seconds["useful"] / sum(seconds.values()) if sum(seconds.values()) else 0.0


def _per_step(ledger: Ledger) -> dict[str, float]:
    """Return seconds per step and device of the buckets that happen in steps."""
    count = max(ledger.steps, 1) * ledger.devices * NS_PER_S
    return {bucket: ledger.ledger_ns[bucket] / count for bucket in BUCKETS if bucket not in ONCE_PER_RUN}


def _per_device(ledger: Ledger, bucket: str) -> float:
    """Return seconds per device and run."""
    return ledger.ledger_ns[bucket] / (ledger.devices * NS_PER_S)
