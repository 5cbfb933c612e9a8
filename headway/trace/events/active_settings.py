"""Which remedies were in force in a run, and which it had to do without: the rows of `applied` in run.json, typed.

A row of an older run lacks keys; what is not of its type in a damaged one is left out.

>>> row = {"name": "host.gc", "facts": {"every_steps": 100}, "reason_not_applied": None}
>>> refused = {"name": "data.cache", "parameters": {"bytes": 9}, "reason_not_applied": "not pure"}
>>> rows = applied_rows([row, refused, "damaged"])
>>> active_settings(rows)
{'host.gc': {'every_steps': 100}}
>>> given_up(rows)
{'data.cache': GivenUp(parameters={'bytes': 9}, reason='not pure')}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headway.core.files.safe_files import converted

READING, DATASET = "reading", "dataset"
"""Values of `about` beside a reason: why a dataset's batches may not be read ahead; why they may not be kept either.

A reason without one is about the remedy itself, as it was given."""


NO_MODEL = "the script made no model that it could be applied to"
"""Why a run was without a remedy of distributed models."""


class LoaderDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What a remedy decided about a loader, when it was first read or later."""

    dataset: str | None = None
    """Name of the dataset's class."""
    line: str | None = None
    """The line of the script that constructs the loader, where the decision says it."""
    num_workers: int | None = None
    """Workers that it was given."""
    about: str | None = None
    """`READING` or `DATASET`."""
    reason_not_applied: str | None = None
    """Why the loader was left alone."""
    had_it: bool | None = None
    """Whether a loader that is left alone had the remedy before."""
    reason: str | None = None
    """Why the remedy was withdrawn from it."""


class AppliedRow(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one remedy of a plan."""

    name: str = ""
    applied: bool = False
    """Whether it was in effect at some time; only the ranks say so."""
    parameters: dict[str, Any] | None = None
    """What it was given; None in a row of an older run, and in that of the whole plan."""
    facts: dict[str, Any] | None = None
    """What it did; `loaders` and `withdrawn` among them are lists of decisions."""
    reason_not_applied: str | None = None
    withdrawn: str | None = None
    """Why it was taken away while the run went on."""
    predicted_speedup: float | None = None
    interval: tuple[float, float] | None = None
    """Range of that."""
    measured_speedup: float | None = None
    """Of the steps after the first ones, against the baseline; None where several remedies were applied."""
    measured_with_start: float | None = None
    """Of as many steps, the first included."""
    inconclusive: str | None = None
    """Why what was measured says nothing of the remedy: other load on the host explains it."""

    def decisions(self, key: str) -> list[LoaderDecision]:
        """Return the decisions in a list among the facts that can be read."""
        entries = (self.facts or {}).get(key)
        rows = entries if isinstance(entries, list) else []
        return [converted(entry, LoaderDecision)[0] for entry in rows if isinstance(entry, Mapping)]

    @property
    def unused(self) -> str:
        """Why a remedy of distributed models had nothing to act on; '' where it had, or is of another kind."""
        facts = self.facts or {}
        return NO_MODEL if facts.get("models") == 0 and not facts.get("had_it") else ""

    @property
    def why_without(self) -> str:
        """Why the run was without it in the end; '' where some loader had it to the last."""
        if reason := self.reason_not_applied or self.withdrawn:
            return reason
        if self.unused:
            return self.unused
        reasons = [entry.reason or "withdrawn" for entry in self.decisions("withdrawn")]
        if not reasons:
            last: dict[str | None, str | None] = {}
            for entry in self.decisions("loaders"):
                # A loader that never had it takes it from no other: one that evaluates often reads the same class.
                if entry.had_it or not entry.reason_not_applied or entry.dataset not in last:
                    last[entry.dataset] = entry.reason_not_applied
            reasons = [reason for reason in last.values() if reason] if all(last.values()) else []
        return "; ".join(dict.fromkeys(reasons))


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A remedy that a run refused, or had for a while."""

    parameters: Mapping[str, Any]
    """What it was given."""

    reason: str
    """Why the run was without it."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """What a remedy found of a dataset while a run went on."""

    remedy: str
    """Which remedy found it."""

    dataset: str
    """Name of the dataset's class."""

    about: str
    """`READING` or `DATASET`."""

    reason: str
    """What was found."""

    line: str | None = None
    """The line that constructs the loader that it was found with; None where that is not said."""


def applied_rows(rows: object) -> tuple[AppliedRow, ...]:
    """Return the row of each remedy: not that of the whole plan, nor one of an older run that says nothing of it."""
    listed = rows if isinstance(rows, list) else []
    found = [converted(row, AppliedRow)[0] for row in listed if isinstance(row, Mapping)]
    return tuple(row for row in found if row.name and (row.facts is not None or row.parameters is not None))


def active_settings(rows: Sequence[AppliedRow]) -> dict[str, dict[str, Any]]:
    """Return remedy -> its facts, for those that were applied and not withdrawn while the run went on."""
    return {row.name: row.facts or {} for row in rows if not row.why_without}


def given_up(rows: Sequence[AppliedRow]) -> dict[str, GivenUp]:
    """Return the remedies that the run refused or withdrew, with what they were given and why."""
    return {
        row.name: GivenUp((row.facts if row.parameters is None else row.parameters) or {}, reason)
        for row in rows
        if (reason := row.why_without)
    }


def unfit(rows: Sequence[AppliedRow]) -> list[Unfit]:
    """Return what remedies found of datasets, of the reasons that hold for other remedies too."""
    return [
        Unfit(row.name, str(entry.dataset), entry.about, reason, entry.line)
        for row in rows
        for entry in (*row.decisions("loaders"), *row.decisions("withdrawn"))
        if entry.about in (READING, DATASET) and (reason := entry.reason_not_applied or entry.reason)
    ]
