"""Two ledgers side by side: what got slower, and by how much per step.

Use it as a regression gate: `Comparison.exit_code` is 3 when the second run
lost more than `threshold` of the first one's step time in any bucket, or in
steps per second. Runs of unlike length compare, because what happens in steps
is divided by their number; what happens once per run is compared per run.

>>> slower = compare_steps({"input": 2.0, "useful": 8.0}, {"input": 3.5, "useful": 8.0}, 0.1)
>>> [row.bucket for row in slower if row.regressed]
['input']
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.core.errors import InputError
from headway.core.units import NS_PER_S, format_seconds
from headway.ledger.buckets import BUCKETS
from headway.ledger.ledger import Ledger

ONCE_PER_RUN = ("startup", "restart", "rework", "idle", "unknown")
"""Buckets that are compared per run and device, not per step."""

LOSSES = tuple(bucket for bucket in BUCKETS if bucket not in ("idle", "unknown"))
"""Buckets whose growth can be a regression."""

SCHEMA = "headway.compare/1"


@dataclass(frozen=True, slots=True)
class Change:
    """One bucket in both runs, seconds per device and step (or per device and run)."""

    bucket: str
    """The bucket."""

    per: str
    """'step' or 'run': what the seconds are divided by."""

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
    """Goodput of both."""

    changes: tuple[Change, ...]
    """Every bucket, in the order of `BUCKETS`."""

    threshold: float
    """Share of the first run's step (or wall) that may be lost without being called a regression."""

    slower: bool
    """Whether steps per second fell by more than the threshold."""

    @property
    def regressions(self) -> list[str]:
        """Say in words what got worse; empty when nothing did."""
        found = []
        if self.slower:
            before, after = self.steps_per_s
            found.append(f"steps/s fell from {before:.4g} to {after:.4g} ({self.speedup - 1:+.1%})")
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
            "exit_code": self.exit_code,
        }


def compare(before: Ledger, after: Ledger, threshold: float = 0.05) -> Comparison:
    """Compare two ledgers of the same job; `threshold` is a fraction of the first one's step time (or wall).

    Raises `InputError` when a ledger has no complete step, or on a threshold outside (0, 1).
    """
    if not 0.0 < threshold < 1.0:
        raise InputError(f"threshold is {threshold}; it must lie between 0 and 1. Pass 0.05 for five percent.")
    for label, ledger in (("first", before), ("second", after)):
        if not ledger.steps or not len(ledger.step_wall_ns):
            raise InputError(f"the {label} run has no complete step, so there is no step time. Record a longer one.")
    rates = (steps_per_s(before), steps_per_s(after))
    in_steps = compare_steps(_per_step(before), _per_step(after), threshold)
    wall_s = before.wall_ns / NS_PER_S
    once = [
        Change(b, "run", first, second, b in LOSSES and second - first > threshold * wall_s)
        for b in ONCE_PER_RUN
        for first, second in [(_per_device(before, b), _per_device(after, b))]
    ]
    changes = {change.bucket: change for change in [*in_steps, *once]}
    return Comparison(
        steps_per_s=rates,
        speedup=rates[1] / rates[0],
        goodput=(before.goodput, after.goodput),
        changes=tuple(changes[bucket] for bucket in BUCKETS),
        threshold=threshold,
        slower=rates[1] < rates[0] * (1.0 - threshold),
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


def _per_step(ledger: Ledger) -> dict[str, float]:
    """Return seconds per step and device of the buckets that happen in steps."""
    count = max(ledger.steps, 1) * ledger.devices * NS_PER_S
    return {bucket: ledger.ledger_ns[bucket] / count for bucket in BUCKETS if bucket not in ONCE_PER_RUN}


def _per_device(ledger: Ledger, bucket: str) -> float:
    """Return seconds per device and run."""
    return ledger.ledger_ns[bucket] / (ledger.devices * NS_PER_S)
