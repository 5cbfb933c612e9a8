"""When a standstill is proven, so that a job may be ended for it although nobody gave a timeout.

Two things prove one, if they are so at each of `LOOKS` looks: a rank that runs no code while others do (stopped, a
zombie, in uninterruptible sleep); and a rank that is updates ahead of all others, which wait in operations of many
ranks with the same stacks each time: it has skipped what they wait for. A rank that is merely not there yet proves
nothing, however long it takes: it may evaluate, or read, without a word. For that one a user gives a timeout.

>>> waits = {"rank": 0, "state": "S", "op": "comm.wait", "step": 7, "stack": "in wait", "since_ns": 7}
>>> proven([[waits, {**waits, "rank": 1, "op": None, "step": step}] for step in (40, 60, 80)])
[1]
>>> proven([[waits, {**waits, "rank": 1, "op": None}]] * 3), proven([[waits, {**waits, "rank": 1, "state": "T"}]] * 3)
([], [1])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LOOKS = 3
"""So many looks must agree."""

LOOK_S = 1.0
"""Seconds between two of them."""

HALTED = frozenset("TZXD")
"""States of a process that runs no code: stopped, zombie, gone, in uninterruptible sleep. One that a debugger holds
(`t`) is none of them: somebody looks at it."""

AHEAD_STEPS = 2
"""Updates by which ranks that wait for each other at every step can never be apart."""


def proven(looks: Sequence[Sequence[Mapping[str, Any]]]) -> list[int]:
    """Return the ranks that a standstill is proven to be due to, [] where it is not proven.

    `looks` are the rows of the hang watch, oldest first.
    """
    if len(looks) < LOOKS or any([row["rank"] for row in look] != [row["rank"] for row in looks[0]] for look in looks):
        return []
    by_rank = list(zip(*looks, strict=True))
    halted = [rows[0]["rank"] for rows in by_rank if all(str(row["state"])[:1] in HALTED for row in rows)]
    if halted:
        return halted if len(halted) < len(by_rank) else []
    waiting = [rows for rows in by_rank if all(_waits_as(row, rows[0]) for row in rows)]
    rest = [rows for rows in by_rank if rows not in waiting]
    reached = max((rows[0]["step"] for rows in waiting), default=None)
    if len(rest) != 1 or reached is None or any(row["step"] < reached + AHEAD_STEPS for row in rest[0]):
        return []
    return [rest[0][0]["rank"]]


def _waits_as(row: Mapping[str, Any], first: Mapping[str, Any]) -> bool:
    """Say whether a rank waits in an operation of many ranks, as it did at the first look."""
    same = all(row.get(key) == first.get(key) for key in ("op", "since_ns", "step", "stack"))
    return same and str(row["op"] or "").startswith("comm.")
