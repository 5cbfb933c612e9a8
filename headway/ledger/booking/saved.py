"""What a rank saved in one attempt, and how many of its steps that kept when the attempt failed.

A save of torch or DCP holds the state of the steps before it as soon as it is
over. One of headway's own holds it from the copy on, but is worth something
only once it is committed; that happens later, in the background, maybe after
the trainer's death. What the next attempt restored tells for certain.

>>> one, two = RankSaves(3, {20: 4, 30: 8}, frozenset({20})), RankSaves(None, {20: 5, 30: 8}, frozenset())
>>> saved_steps([one, two]), saved_steps([one, two], restored=30), saved_steps([one, two], restored=10)
([4, 5], [8, 8], [])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headway.ledger.booking.rows import RankLifetime, RankRows
from headway.trace.events.sweep import Ints


@dataclass(frozen=True, slots=True)
class RankSaves:
    """The saves of one rank in one attempt."""

    step: int | None
    """Complete steps before its last complete save by torch or DCP; None = there is none."""

    copied: Mapping[int, int]
    """Checkpoint of headway's own -> complete steps before its copy."""

    committed: frozenset[int]
    """Those of which this rank knows that they were committed."""

    @classmethod
    def of(cls, rows: RankRows, life: RankLifetime) -> RankSaves:
        """Read them from the rows of a rank, as far as its records are trusted."""
        stock, copies = (_ended(rows, life, rows.of(f"checkpoint.{name}")) for name in ("save", "snapshot"))
        commits = _ended(rows, life, rows.of("checkpoint.commit", main=False))
        steps = _steps_before(rows, life, stock[-1:])
        copied = dict(zip(rows.column("seq", copies).tolist(), _steps_before(rows, life, copies).tolist(), strict=True))
        return cls(int(steps[0]) if len(steps) else None, copied, frozenset(rows.column("seq", commits).tolist()))


def saved_steps(saves: Sequence[RankSaves], *, restored: int | None = None) -> list[int | None]:
    """Return for each rank the complete steps that its last save holds, None where it saved nothing.

    `restored` is the checkpoint of headway's own that the next attempt went on from, None when it was none of those;
    [] when that was not made in this attempt.
    """
    if restored is not None:
        return [one.copied[restored] for one in saves if restored in one.copied]
    committed = frozenset[int]().union(*(one.committed for one in saves))
    made = {number: steps for one in saves for number, steps in one.copied.items() if number in committed}
    newest = max(made, key=lambda number: made[number], default=-1)
    known = [[step for step in (one.step, one.copied.get(newest)) if step is not None] for one in saves]
    return [max(steps, default=None) for steps in known]


def _ended(rows: RankRows, life: RankLifetime, picked: Ints) -> Ints:
    """Return the rows that ended while records were trusted."""
    return picked[rows.end_ns[picked] <= life.record_ns]


def _steps_before(rows: RankRows, life: RankLifetime, picked: Ints) -> Ints:
    """[n] Complete steps before each row; one inside an update (a hook behind it) holds what the update made."""
    moment, updates = rows.start_ns[picked], rows.of("optimizer.step")
    if len(updates):
        at = np.searchsorted(rows.start_ns[updates], moment, side="right") - 1
        end = np.where(at >= 0, rows.end_ns[updates[np.maximum(at, 0)]], 0)
        moment = np.maximum(moment, end)
    return np.searchsorted(life.step_end, moment, side="right").astype(np.int64)
