"""Book a whole recorded run: its attempts one after another, every rank in each of them.

The first attempt answers for the time from the launcher's start; each later
one from the end of the one before; the last one until the launcher's exit.
Steps after the last save of a failed attempt are done again, so their compute
is rework. All ranks answer for the same wall, so device time adds up.

>>> kept_steps([5, 3, None], num_steps=7, resumed=True), kept_steps([5, 3], num_steps=7, resumed=False)
(3, 0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from headway.core.files.safe_files import converted
from headway.ledger.booking.account import SpanFacts, no_steps
from headway.ledger.booking.arrivals import Booked, RankLateness, settle
from headway.ledger.booking.rows import (
    NAME_ID,
    NAMES,
    RankAccount,
    RankLifetime,
    RankRows,
    life_of,
    name_codes,
    rows_of,
    saved_steps,
    worker_codes,
)
from headway.ledger.booking.timeline import book_rank, evaluations_of, trained_until
from headway.ledger.buckets import SUB_CODE, SUBS, bucket_of_sub
from headway.trace.events.intervals import Ints, inside
from headway.trace.events.parts import Parts
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import FROM_CACHE, GC_CALLED, IN_BACKGROUND
from headway.trace.recording.basis import ENABLED
from headway.trace.recording.incident import Incident
from headway.trace.recording.run_facts import RankRow, RunFacts

_ANYWHERE = [NAME_ID[name] for name in (*IN_BACKGROUND, "input.load", "input.fetch")]

USEFUL_CODES = [SUB_CODE[sub] for sub in SUBS if bucket_of_sub(sub) == "useful"]


@dataclass(frozen=True, slots=True)
class AttemptBook:
    """One attempt, fully booked."""

    sheets: Mapping[int, RankAccount]
    """Rank -> its sheet; every rank of the run, also those absent from this attempt."""

    books: tuple[Booked, ...]
    """The ranks that left records."""

    lateness: RankLateness
    """Who was late."""

    kept_steps: int
    """Steps whose result was kept."""

    num_steps: int
    """Complete steps."""

    spans: Mapping[str, SpanFacts] = field(default_factory=dict)
    """Recorded name -> its totals on the training threads, of loads anywhere, from the first step to the last one."""

    step_wall_ns: Ints = field(default_factory=no_steps)
    """[k] Mean wall over the ranks of each step that every rank completed, whole ns."""


@dataclass(frozen=True, slots=True)
class RunBook:
    """A run, fully booked."""

    wall: tuple[int, int]
    """Start and end of the wall, ns."""

    attempts: tuple[AttemptBook, ...]
    """Oldest first; the last one ends with the run."""

    rows: Callable[[int], RankRows]
    """Rank -> everything that it recorded in the last attempt, read again."""

    @property
    def ranks(self) -> list[int]:
        """The ranks of the run."""
        return sorted(self.attempts[0].sheets)


@dataclass(frozen=True, slots=True)
class _Outline:
    """What must be known of every rank of an attempt before the first one can be booked."""

    start_ns: int
    """First start of any row, on the common clock."""

    end_ns: int
    """Last end of any row."""

    resumes: bool
    """Whether it loaded or restored state before its first step."""

    restored: int | None
    """Checkpoint of headway's own that it restored then; None = none."""

    trained: bool
    """Whether it made a step."""


def book_run(
    traces: Sequence[Trace | Parts], facts: RunFacts, clock_offset_ns: Mapping[int, int] | None = None
) -> RunBook:
    """Book all attempts, oldest first; of parts one rank is in memory at a time.

    `facts` are what run.json says (may be empty), its times on the common clock; `clock_offset_ns` puts the events of
    a rank on it.
    """
    parts = [Parts.of(trace) for trace in traces]
    outlines = [_outlines(part, clock_offset_ns or {}) for part in parts]
    listed, failures = _listed(facts), _failures(facts.incidents)
    ranks = sorted({rank for outline in outlines for rank in outline} | set(listed))
    low, high = _wall(outlines, listed.values(), facts)
    attempts, from_ns = [], low
    for index, outline in enumerate(outlines):
        final = index == len(outlines) - 1
        ends = max((one.end_ns for one in outline.values()), default=0)
        until = high if final else min(max(from_ns, ends), high)
        books, spans = [], dict[str, SpanFacts]()
        for rank in outline:
            rows = _rows(parts[index], rank, clock_offset_ns)
            row = listed.get(rank) if final else None
            if row is None:
                row, _ = converted({**parts[index].ranks.get(rank, {}), "rank": rank}, RankRow)
            life = life_of(rows, row, from_ns=from_ns, until_ns=until, failed=not final)
            _add_spans(spans, rows, life)
            book = book_rank(rows, life, () if facts.compute is None else facts.compute.calls, restarted=index > 0)
            if not final and index in failures:
                _split_end(book.sheet, life, failures[index])
            elif final and life.exited:
                _book_own_end(book.sheet, life, "restart.script" if index else "startup.script")
            if index - 1 in failures:
                _split_start(book.sheet, life, failures[index - 1])
            books.append(Booked.of(book))
        # An attempt that was killed in its set-up says nothing of what was kept: the one after it does.
        later = [one for one in outlines[index + 1 :] if any(rank.resumes or rank.trained for rank in one.values())]
        following = None if final else (later or outlines[index + 1 :])[0]
        attempts.append(_book_attempt(books, ranks, (from_ns, until), following, spans))
        from_ns = until
    return RunBook((low, high), tuple(attempts), lambda rank: _rows(parts[-1], rank, clock_offset_ns))


def _listed(facts: RunFacts) -> dict[int, RankRow]:
    """Return rank -> its row in run.json; of a run that ended well so did the ranks that the script spawned itself."""
    rows = {row.rank: row for row in facts.ranks}
    if facts.exit is None or facts.exit.code != 0:
        return rows
    return {rank: row if row.exit_code is not None else replace(row, exit_code=0) for rank, row in rows.items()}


def _failures(incidents: Iterable[Incident]) -> dict[int, list[tuple[int, str]]]:
    """Return failed attempt -> (end, sub-line) of each phase that followed its failure, as the supervisor noted."""
    return {
        row.attempt: [
            (row.detected_ns, "restart.detect"), (row.located_ns, "restart.locate"), (row.down_ns, "restart.down"),
            (row.decided_ns, "restart.decide"),
        ]
        for row in incidents
    }  # fmt: skip


def _pieces(start_ns: int, end_ns: int, phases: Sequence[tuple[int, str]]) -> dict[str, int]:
    """Split a stretch of time at the ends of phases; what follows the last one is the launch of the next attempt.

    >>> _pieces(0, 100, [(10, "restart.detect"), (15, "restart.locate"), (60, "restart.down"), (61, "restart.decide")])
    {'restart.detect': 10, 'restart.locate': 5, 'restart.down': 45, 'restart.decide': 1, 'restart.launch': 39}
    """
    pieces, at_ns = {}, start_ns
    for until_ns, sub in [*phases, (end_ns, "restart.launch")]:
        until_ns = min(max(until_ns, at_ns), end_ns)
        pieces[sub] = until_ns - at_ns
        at_ns = until_ns
    return pieces


def _split_end(sheet: RankAccount, life: RankLifetime, phases: Sequence[tuple[int, str]]) -> None:
    """Book what followed the last record of a rank that failed, or was stopped for another's failure."""
    end = len(life.step_start) + 1
    for sub in ("unknown.cut_short", "idle.exit"):
        sheet.ns[SUB_CODE[sub], end] = 0
    for sub, duration_ns in _pieces(life.record_ns, life.until_ns, phases).items():
        sheet.book(sub, end, duration_ns)


def _book_own_end(sheet: RankAccount, life: RankLifetime, startup: str) -> None:
    """Book what followed the last record of a rank that failed and ended itself: it was never cut off.

    It writes that record as it begins to end, or, before its first step, when it last imported something.
    """
    end = len(life.step_start) + 1
    sheet.book("idle.teardown" if len(life.step_start) else startup, end, life.died_ns - life.record_ns)
    sheet.book("unknown.cut_short", end, life.record_ns - life.died_ns)


def _split_start(sheet: RankAccount, life: RankLifetime, phases: Sequence[tuple[int, str]]) -> None:
    """Book what came before the process of a later attempt began."""
    sheet.ns[SUB_CODE["restart.launch"], 0] -= life.born_ns - life.from_ns
    for sub, duration_ns in _pieces(life.from_ns, life.born_ns, phases).items():
        sheet.book(sub, 0, duration_ns)


def _rows(parts: Parts, rank: int, clock_offset_ns: Mapping[int, int] | None) -> RankRows:
    """Read the rows of one rank."""
    return rows_of(parts.read({"rank": (rank, rank + 1)}), rank, clock_offset_ns)


def _outlines(parts: Parts, clock_offset_ns: Mapping[int, int]) -> dict[int, _Outline]:
    """Return the outline of each rank >= 0, ranks in order."""
    found = {}
    for rank in parts.numbers:
        part = parts.read({"rank": (rank, rank + 1)}, ("start_ns", "duration_ns", "name", "lane", "seq"))
        if rank < 0 or not len(part):
            continue
        start, main = part.events["start_ns"], worker_codes(part) == -1
        name = np.where(main, name_codes(part), -1)
        steps = start[name == NAME_ID["step"]]
        first = steps.min() if len(steps) else np.iinfo(np.int64).max
        shift = int(clock_offset_ns.get(rank, 0))
        restores = np.flatnonzero((name == NAME_ID["checkpoint.restore"]) & (start <= first))
        found[rank] = _Outline(
            int(start.min()) + shift,
            int((start + part.events["duration_ns"]).max()) + shift,
            len(restores) > 0 or bool((start[name == NAME_ID["checkpoint.load"]] <= first).any()),
            int(part.events["seq"][restores[start[restores].argmax()]]) if len(restores) else None,
            len(steps) > 0,
        )
    return found


def _wall(outlines: Sequence[Mapping[int, _Outline]], rows: Iterable[RankRow], facts: RunFacts) -> tuple[int, int]:
    """Return launcher start and exit, or the nearest that is known."""
    starts = [one.start_ns for outline in outlines for one in outline.values()]
    ends = [one.end_ns for outline in outlines for one in outline.values()]
    ends += [row.end_ns for row in rows if row.end_ns]
    low = facts.start_ns or min(starts, default=0)
    high = facts.end_ns or max(ends, default=low)
    return low, max(low, high)


def _add_spans(spans: dict[str, SpanFacts], rows: RankRows, life: RankLifetime) -> None:
    """Add the totals of one rank's names on its training thread, and of what was done for it in the background.

    'host.collect' is the part of 'host.gc' that the script called for, 'host.compile.cached' that of 'host.compile'
    which torch's cache cut short, and 'eval.graphs' the forwards of evaluation that had gradients enabled.
    """
    main = ((rows.worker == -1) | np.isin(rows.name, _ANYWHERE)) & (rows.name >= 0) & (rows.start_ns >= life.first_ns)
    main &= (rows.name != NAME_ID["host.gc"]) | (rows.start_ns < trained_until(rows, life))
    picks = {NAMES[code]: main & (rows.name == code) for code in np.unique(rows.name[main]).tolist()}
    marked = rows.columns["corr"]
    enabled = main & (rows.name == NAME_ID["forward"]) & (rows.columns["seq"] & ENABLED > 0)
    parts = {
        "eval.graphs": enabled & inside(rows.start_ns, evaluations_of(rows)),
        "host.collect": main & (rows.name == NAME_ID["host.gc"]) & (marked >= GC_CALLED),
        "host.compile.cached": main & (rows.name == NAME_ID["host.compile"]) & (marked == FROM_CACHE),
    }
    for name, picked in {**picks, **{part: rows for part, rows in parts.items() if rows.any()}}.items():
        duration = (rows.end_ns - rows.start_ns)[picked]
        size = int(rows.columns["bytes"][picked].sum())
        own = SpanFacts(len(duration), int(duration.sum()), int(duration.max()), size)
        spans[name] = own + spans[name] if name in spans else own


def _book_attempt(
    books: Sequence[Booked],
    ranks: Sequence[int],
    span: tuple[int, int],
    following: Mapping[int, _Outline] | None,
    spans: Mapping[str, SpanFacts],
) -> AttemptBook:
    """Settle the waits of one attempt, move what was lost to rework, and fill in the ranks without records."""
    lateness = settle(books) if books else RankLateness()
    num_steps = max((len(book.step_wall_ns) for book in books), default=0)
    kept = num_steps
    sheets = {book.rank: book.sheet for book in books}
    if following is not None:
        resumed = any(outline.resumes for outline in following.values())
        restored = min((one.restored for one in following.values() if one.restored is not None), default=None)
        saved = saved_steps([book.saves for book in books], restored=restored)
        kept = kept_steps(saved, num_steps=num_steps, resumed=resumed)
        for book in books:
            again = slice(kept + 1, book.sheet.columns)  # steps that will be done again
            book.sheet.ns[SUB_CODE["rework.steps"], again] += book.sheet.ns[USEFUL_CODES, again].sum(axis=0)
            book.sheet.ns[USEFUL_CODES, again] = 0
            _after_failure(book.sheet)
            book.sheet.pack()
    for rank in ranks:
        if rank not in sheets:
            sheets[rank] = RankAccount.blank(num_steps)
            lost = "unknown.missing" if following is None else "idle.absent"
            sheets[rank].book(lost, 0, span[1] - span[0])
            sheets[rank].pack()
    return AttemptBook(sheets, tuple(books), lateness, kept, num_steps, spans, _step_walls(books))


def _step_walls(books: Sequence[Booked]) -> Ints:
    """Return the mean wall of each step that every rank completed."""
    walls = [book.step_wall_ns for book in books if len(book.step_wall_ns)]
    if not walls:
        return no_steps()
    total = np.zeros(min(len(wall) for wall in walls), np.int64)
    for wall in walls:
        total += wall[: len(total)]
    return total // len(walls)


def kept_steps(saved: Sequence[int | None], *, num_steps: int, resumed: bool) -> int:
    """Return how many steps of a failed attempt were kept: those before the last save that every saving rank made.

    `saved` holds for each rank the steps before its last complete save, None = it saved nothing.
    Without a load before the next attempt's first step (`resumed` False) nothing was kept.
    """
    known = [step for step in saved if step is not None]
    return max(0, min(*known, num_steps)) if resumed and known else 0


def _after_failure(sheet: RankAccount) -> None:
    """What follows the processes of a failed attempt is the way to the next one."""
    for sub in ("idle.exit", "idle.teardown", "unknown.cut_short"):
        column: Ints = sheet.ns[SUB_CODE[sub]]
        sheet.ns[SUB_CODE["restart.down"]] += column
        sheet.ns[SUB_CODE[sub]] = 0
