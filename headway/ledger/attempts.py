"""Book a whole recorded run: its attempts one after another, every rank in each of them.

The first attempt answers for the time from the launcher's start; each later
one from the end of the one before; the last one until the launcher's exit.
Steps after the last save of a failed attempt are done again, so their compute
is rework. All ranks answer for the same wall, so device time adds up.

>>> kept_steps([5, 3, None], num_steps=7, resumed=True), kept_steps([5, 3], num_steps=7, resumed=False)
(3, 0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.ledger.arrivals import Lateness, settle
from headway.ledger.buckets import SUB_CODE, SUBS, bucket_of_sub
from headway.ledger.rows import Rows, life_of, rows_by_rank
from headway.ledger.timeline import RankBook, Sheet, book_rank
from headway.trace.sweep import Ints
from headway.trace.trace import Trace

USEFUL_CODES = [SUB_CODE[sub] for sub in SUBS if bucket_of_sub(sub) == "useful"]


@dataclass(frozen=True, slots=True)
class AttemptBook:
    """One attempt, fully booked."""

    sheets: Mapping[int, Sheet]
    """Rank -> its sheet; every rank of the run, also those absent from this attempt."""

    books: tuple[RankBook, ...]
    """The ranks that left records."""

    lateness: Lateness
    """Who was late."""

    kept_steps: int
    """Steps whose result was kept."""

    num_steps: int
    """Complete steps."""


@dataclass(frozen=True, slots=True)
class RunBook:
    """A run, fully booked."""

    wall: tuple[int, int]
    """Start and end of the wall, ns."""

    attempts: tuple[AttemptBook, ...]
    """Oldest first; the last one ends with the run."""

    @property
    def ranks(self) -> list[int]:
        """The ranks of the run."""
        return sorted(self.attempts[0].sheets)


def book_run(
    traces: Sequence[Trace], meta: Mapping[str, Any], clock_offset_ns: Mapping[int, int] | None = None
) -> RunBook:
    """Book the traces of all attempts, oldest first.

    `meta` is what run.json says (may be empty), its times on the common clock; `clock_offset_ns` puts the events of
    a rank on it.
    """
    tables = [rows_by_rank(trace, clock_offset_ns) for trace in traces]
    listed = {int(row["rank"]): row for row in meta.get("ranks") or []}
    ranks = sorted({rank for table in tables for rank in table} | set(listed))
    low, high = _wall(tables, listed, meta)
    attempts, from_ns = [], low
    for index, table in enumerate(tables):
        final = index == len(tables) - 1
        until = high if final else min(max(from_ns, _end_of(table)), high)
        books = []
        for rows in table.values():
            facts = {**traces[index].ranks.get(rows.rank, {}), **(listed.get(rows.rank, {}) if final else {})}
            life = life_of(rows, facts, from_ns=from_ns, until_ns=until, failed=not final)
            books.append(book_rank(rows, life, restarted=index > 0))
        following = None if final else tables[index + 1]
        attempts.append(_book_attempt(books, ranks, (from_ns, until), following))
        from_ns = until
    return RunBook((low, high), tuple(attempts))


def _wall(
    tables: Sequence[Mapping[int, Rows]], facts: Mapping[int, Mapping[str, Any]], meta: Mapping[str, Any]
) -> tuple[int, int]:
    """Return launcher start and exit, or the nearest that is known."""
    starts = [int(rows.start_ns.min()) for table in tables for rows in table.values()]
    ends = [int(rows.end_ns.max()) for table in tables for rows in table.values()]
    ends += [int(row["end_ns"]) for row in facts.values() if row.get("end_ns")]
    low = int(meta["start_ns"]) if meta.get("start_ns") else min(starts, default=0)
    high = int(meta["end_ns"]) if meta.get("end_ns") else max(ends, default=low)
    return low, max(low, high)


def _end_of(table: Mapping[int, Rows]) -> int:
    """Return the last end of any row of an attempt."""
    return max((int(rows.end_ns.max()) for rows in table.values()), default=0)


def _book_attempt(
    books: Sequence[RankBook],
    ranks: Sequence[int],
    span: tuple[int, int],
    following: Mapping[int, Rows] | None,
) -> AttemptBook:
    """Settle the waits of one attempt, move what was lost to rework, and fill in the ranks without records."""
    lateness = settle(books) if books else Lateness()
    num_steps = max((len(book.life.step_start) for book in books), default=0)
    kept = num_steps
    sheets = {book.rows.rank: book.sheet for book in books}
    if following is not None:
        resumed = any(_loads_before_steps(rows) for rows in following.values())
        kept = kept_steps([_saved_step(book) for book in books], num_steps=num_steps, resumed=resumed)
        for book in books:
            _to_rework(book.sheet, kept)
            _after_failure(book.sheet)
    for rank in ranks:
        if rank not in sheets:
            sheets[rank] = Sheet.blank(num_steps)
            lost = "unknown.missing" if following is None else "idle.absent"
            sheets[rank].book(lost, 0, span[1] - span[0])
    return AttemptBook(sheets, tuple(books), lateness, kept, num_steps)


def kept_steps(saved: Sequence[int | None], *, num_steps: int, resumed: bool) -> int:
    """Return how many steps of a failed attempt were kept: those before the last save that every saving rank made.

    `saved` holds for each rank the step during which its last complete save was made, None = it saved nothing.
    Without a load before the next attempt's first step (`resumed` False) nothing was kept.
    """
    known = [step for step in saved if step is not None]
    return max(0, min(*known, num_steps)) if resumed and known else 0


def _saved_step(book: RankBook) -> int | None:
    """Return the number of complete steps before a rank's last complete save."""
    saves = book.rows.of("checkpoint.save")
    saves = saves[book.rows.end_ns[saves] <= book.life.record_ns]
    if not len(saves):
        return None
    return int(np.searchsorted(book.life.step_end, book.rows.start_ns[saves[-1]], side="right"))


def _loads_before_steps(rows: Rows) -> bool:
    """Return whether a rank loaded state before its first step."""
    loads, steps = rows.of("checkpoint.load"), rows.of("step")
    first = rows.start_ns[steps].min() if len(steps) else np.iinfo(np.int64).max
    return bool((rows.start_ns[loads] <= first).any())


def _to_rework(sheet: Sheet, kept: int) -> None:
    """Move the compute of steps that will be done again to rework."""
    lost = slice(kept + 1, sheet.ns.shape[1])
    sheet.ns[SUB_CODE["rework.steps"], lost] += sheet.ns[USEFUL_CODES, lost].sum(axis=0)
    sheet.ns[USEFUL_CODES, lost] = 0


def _after_failure(sheet: Sheet) -> None:
    """What follows the processes of a failed attempt is the way to the next one."""
    for sub in ("idle.exit", "idle.teardown", "unknown.cut_short"):
        column: Ints = sheet.ns[SUB_CODE[sub]]
        sheet.ns[SUB_CODE["restart.down"]] += column
        sheet.ns[SUB_CODE[sub]] = 0
