"""Which remedies were in force in a run, and which it had to do without: what `applied` of run.json says, with care.

>>> row = {"name": "host.gc", "facts": {"every_steps": 100}, "reason_not_applied": None}
>>> refused = {"name": "data.cache", "parameters": {"bytes": 9}, "reason_not_applied": "not pure"}
>>> in_force({"applied": [row, refused, "damaged"]})
{'host.gc': {'every_steps': 100}}
>>> given_up({"applied": [row, refused, "damaged"]})
{'data.cache': GivenUp(parameters={'bytes': 9}, reason='not pure')}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

READING, DATASET = "reading", "dataset"
"""Values of `about` beside a reason: why a dataset's batches may not be read ahead; why they may not be kept either.

A reason without one is about the remedy itself, as it was given."""


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


def in_force(meta: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return remedy -> its facts, for those that were applied and not withdrawn while the run went on."""
    return {str(row["name"]): dict(facts) for row, facts in _rows(meta) if not _why_without(row, facts)}


def given_up(meta: Mapping[str, Any]) -> dict[str, GivenUp]:
    """Return the remedies that the run refused or withdrew, with what they were given and why."""
    found = {}
    for row, facts in _rows(meta):
        reason, given = _why_without(row, facts), row.get("parameters", facts)
        if reason and isinstance(given, Mapping):
            found[str(row["name"])] = GivenUp(dict(given), reason)
    return found


def unfit(meta: Mapping[str, Any]) -> list[Unfit]:
    """Return what remedies found of datasets, of the reasons that hold for other remedies too."""
    return [
        Unfit(str(row["name"]), str(entry.get("dataset")), str(entry["about"]), str(reason))
        for row, facts in _rows(meta)
        for entry in (*_entries(facts, "loaders"), *_entries(facts, "withdrawn"))
        if entry.get("about") in (READING, DATASET)
        and (reason := entry.get("reason_not_applied") or entry.get("reason"))
    ]


def _why_without(row: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Return why a run was without a remedy in the end; '' where some loader had it to the last."""
    if reason := row.get("reason_not_applied") or row.get("withdrawn"):
        return str(reason)
    reasons = [entry.get("reason", "withdrawn") for entry in _entries(facts, "withdrawn")]
    if not reasons:
        last = {entry.get("dataset"): entry.get("reason_not_applied") for entry in _entries(facts, "loaders")}
        reasons = list(last.values()) if all(last.values()) else []
    return "; ".join(dict.fromkeys(map(str, reasons)))


def _rows(meta: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the row of each remedy with its facts: not that of the whole plan, nor one of an older run without any."""
    rows = meta.get("applied")
    for row in rows if isinstance(rows, list) else ():
        facts = row.get("facts", {} if "parameters" in row else None) if isinstance(row, Mapping) else None
        if isinstance(facts, Mapping) and "name" in row:
            yield row, facts


def _entries(facts: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return the entries of a list among the facts of a remedy that can be read."""
    entries = facts.get(key)
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
