"""A drill: which fault strikes which rank when, and how the incidents of the run answer to that.

The run plays one fault per attempt (`headway.fault.runtime.injectors`); each is to be seen, with its class and,
where it has one, its rank. An incident in an attempt without a fault is a false alarm.

>>> schedule(["kill", "stop"], world=4, seed=1) == schedule(["kill", "stop"], world=4, seed=1)
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway.core.errors import InputError
from headway.core.rng import stream
from headway.core.tables import pick
from headway.fault.runtime.injectors import FAULTS, GIVEN_UP_CODE
from headway.trace.recording.incident import Incident

FIRST_STEP = 12
"""Earliest step of an attempt that a fault follows: until then steps compile, allocate and connect."""

APART = 6
"""Steps by which each fault comes later than the one before: a job that saves nothing makes progress all the same, and
is not stopped for making none."""


NOTHING_TO_STRIKE = "the job has nothing that it could strike"
"""Why a fault whose step was reached was not played."""


def schedule(faults: Sequence[str], *, world: int, seed: int) -> list[tuple[str, int, int]]:
    """Return (fault, rank, step of its attempt) for each fault, in the order given. Raises `InputError` on a name."""
    for name in faults:
        pick(FAULTS, name, "fault")
    if not faults or len({*faults}) < len(faults):
        raise InputError(f"the faults are {', '.join(faults) or 'none'}; name each one once, such as kill,stop.")
    draws = stream(seed, "drill")
    return [
        (name, int(draws.integers(world)), FIRST_STEP + APART * index + int(draws.integers(APART)))
        for index, name in enumerate(faults)
    ]


def score(
    faults: Sequence[str], marks: Sequence[Mapping[str, Any]], incidents: Sequence[Incident], *, steps: int
) -> tuple[list[dict[str, Any]], int]:
    """Return a row for each fault, and the number of false alarms.

    `marks` are what the ranks noted before each fault struck. A fault without one was never reached: the run ended
    after `steps` steps of its last attempt. One whose `injected_ns` is None found nothing to strike, such as a job
    without a loader. Neither was played: `ok` is None, and `not_played` says why.
    """
    rows = []
    for index, name in enumerate(faults):
        mark = marks[index] if index < len(marks) else None
        why = f"the run ended at step {steps} before it" if mark is None else NOTHING_TO_STRIKE
        rows.append(_row(name, mark, incidents, why))
    played = {mark["attempt"] for mark in marks}
    return rows, sum(one.attempt not in played for one in incidents)


def _row(name: str, mark: Mapping[str, Any] | None, incidents: Sequence[Incident], why: str) -> dict[str, Any]:
    fault = FAULTS[name]
    at_ns = mark["injected_ns"] if mark is not None else None
    row: dict[str, Any] = {
        "name": name, "rank": mark["rank"] if mark is not None and fault.blames else None, "injected_ns": at_ns,
        "detected_ns": None, "class": None, "ranks": [], "action": None, "recover_s": None,
        "ok": None if at_ns is None else False, "not_played": why if at_ns is None else None,
    }  # fmt: skip
    if mark is None or at_ns is None:
        return row
    found = next((one for one in incidents if one.attempt == mark["attempt"] and one.detected_ns >= at_ns), None)
    if found is None or f"exit code {GIVEN_UP_CODE}" in found.evidence:
        return row
    blamed = found.suspects.ranks
    row |= {
        "detected_ns": found.detected_ns, "class": found.cls, "ranks": blamed, "action": found.action,
        "recover_s": found.downtime_s, "ok": found.cls == fault.cls and (not fault.blames or blamed == [mark["rank"]]),
    }  # fmt: skip
    return row
