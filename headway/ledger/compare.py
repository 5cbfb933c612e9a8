"""Two ledgers side by side: what got slower, and by how much per step.

Use it as a regression gate: `Comparison.exit_code` is 3 when the second run
lost more than `threshold` of the first one's step time in any bucket, or in
steps per second. Judged are the steps after the first one, so that runs of
unlike length compare and start-up, of which a short run mostly consists, does
not decide: it is listed, and noted when it grew. `whole=True` judges whole
runs instead: all that happened, per step, and what comes once, per run.

>>> slower = compare_steps({"input": 2.0, "useful": 8.0}, {"input": 3.5, "useful": 8.0}, 0.1)
>>> [row.bucket for row in slower if row.regressed]
['input']
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.core.errors import InputError
from headway.core.units import NS_PER_S, format_fraction, format_rate, format_seconds
from headway.ledger.buckets import BUCKETS
from headway.ledger.ledger import Ledger

ONCE_PER_RUN = ("startup", "restart", "rework", "idle", "unknown")
"""Buckets that are compared per run and device, not per step; they are judged in whole runs only."""

WHOLE = "it counts with --whole only"
"""What a note says of growth that is not judged."""

LOSSES = tuple(bucket for bucket in BUCKETS if bucket not in ("idle", "unknown"))
"""Buckets whose growth can be a regression."""

SCHEMA = "headway.compare/1"


@dataclass(frozen=True, slots=True)
class Change:
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
class Comparison:
    """The second run against the first."""

    steps_per_s: tuple[float, float]
    """Steps per second of both, start-up left out."""

    speedup: float
    """Steps per second of the second over the first."""

    goodput: tuple[float, float]
    """Goodput of both whole runs."""

    step_goodput: tuple[float, float]
    """Useful share of the device time in steps, of both."""

    changes: tuple[Change, ...]
    """Every bucket, in the order of `BUCKETS`."""

    threshold: float
    """Share of the first run's step (or wall) that may be lost without being called a regression."""

    slower: bool
    """Whether steps per second fell by more than the threshold."""

    whole: bool = False
    """Whether whole runs were judged, and not the steps alone."""

    notes: tuple[str, ...] = ()
    """What grew and was not judged."""

    @property
    def regressions(self) -> list[str]:
        """Say in words what got worse; empty when nothing did."""
        found = []
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

    def to_json(self) -> dict[str, Any]:
        """Return the object of schema `headway.compare/1`."""
        return {
            "schema": SCHEMA,
            "steps_per_s": list(self.steps_per_s),
            "speedup": self.speedup,
            "goodput": list(self.goodput),
            "step_goodput": list(self.step_goodput),
            "whole": self.whole,
            "threshold": self.threshold,
            "changes": [
                {
                    "bucket": change.bucket,
                    "per": change.per,
                    "before_s": change.before_s,
                    "after_s": change.after_s,
                    "delta_s": change.delta_s,
                    "regressed": change.regressed,
                }
                for change in self.changes
            ],
            "regressions": self.regressions,
            "notes": list(self.notes),
            "exit_code": self.exit_code,
        }


def compare(before: Ledger, after: Ledger, threshold: float = 0.05, *, whole: bool = False) -> Comparison:
    """Compare two ledgers of the same job; `threshold` is a fraction of the first one's step time (or wall).

    Steps after the first are judged; with `whole`, everything that happened.
    Raises `InputError` when a ledger has no complete step, or on a threshold outside (0, 1).
    """
    if not 0.0 < threshold < 1.0:
        raise InputError(f"threshold is {threshold}; it must lie between 0 and 1. Pass 0.05 for five percent.")
    for label, ledger in (("first", before), ("second", after)):
        if not ledger.steps or not len(ledger.step_wall_ns):
            raise InputError(f"the {label} run has no complete step, so there is no step time. Record a longer one.")
    rates = (steps_per_s(before), steps_per_s(after))
    per_step = _per_step if whole else _in_steps
    in_steps = compare_steps(per_step(before), per_step(after), threshold)
    once = [
        Change(b, "run", first, second, whole and _grew(b, first, second, before, threshold))
        for b in ONCE_PER_RUN
        for first, second in [(_per_device(before, b), _per_device(after, b))]
    ]
    changes = {change.bucket: change for change in [*in_steps, *once]}
    unjudged = [change for change in once if _grew(change.bucket, change.before_s, change.after_s, before, threshold)]
    return Comparison(
        steps_per_s=rates,
        speedup=rates[1] / rates[0],
        goodput=(before.goodput, after.goodput),
        step_goodput=(_step_goodput(before), _step_goodput(after)),
        changes=tuple(changes[bucket] for bucket in BUCKETS),
        threshold=threshold,
        slower=rates[1] < rates[0] * (1.0 - threshold),
        whole=whole,
        notes=() if whole else tuple(_note(change) for change in unjudged),
    )


def _grew(bucket: str, before_s: float, after_s: float, before: Ledger, threshold: float) -> bool:
    """Say whether what comes once grew by more than the threshold allows, as a share of the first run's wall."""
    return bucket in LOSSES and after_s - before_s > threshold * before.wall_ns / NS_PER_S


def _note(change: Change) -> str:
    return (
        f"{change.bucket} grew by {format_seconds(change.delta_s)} per run and device "
        f"({format_seconds(change.before_s)} -> {format_seconds(change.after_s)}): {WHOLE}"
    )


def compare_steps(before_s: Mapping[str, float], after_s: Mapping[str, float], threshold: float) -> list[Change]:
    """Compare seconds per step and device, bucket by bucket; the threshold is a fraction of the first one's sum."""
    allowed = threshold * sum(before_s.values())
    return [Change(b, "step", before_s[b], after_s[b], after_s[b] - before_s[b] > allowed) for b in before_s]


def steps_per_s(ledger: Ledger) -> float:
    """Return steps per second over the steps themselves; 0 without a step.

    Start-up and teardown are left out, and so is step 0 where there are others: it holds the first fork of loader
    workers, lazy imports and cold caches, which come once however long a job is.
    """
    walls = ledger.step_wall_ns[1:] if len(ledger.step_wall_ns) > 1 else ledger.step_wall_ns
    wall_ns = int(walls.sum())
    return len(walls) * NS_PER_S / wall_ns if wall_ns else 0.0


def _in_steps(ledger: Ledger) -> dict[str, float]:
    """Return seconds per device and step of the buckets that happen in steps, over the steps of `steps_per_s`."""
    found = ledger.step_ns[:, 1:] if ledger.step_ns.shape[1] > 1 else ledger.step_ns
    if not found.shape[1]:
        return _per_step(ledger)  # an account that knows no single steps
    mean_s = found.mean(axis=1) / (ledger.devices * NS_PER_S)
    return {b: float(s) for b, s in zip(BUCKETS, mean_s, strict=True) if b not in ONCE_PER_RUN}


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
