"""The rows of one rank in one attempt, in a canonical order, and the borders of its life.

Everything that books a recorded run starts here. Times are aligned: each
rank's clock offset (none on one host) is added to its raw clock, after what
`headway trace align` has found of it.

>>> from headway.trace.events.trace import Trace
>>> trace = Trace.from_columns({"rank": [0, 0], "start_ns": [5, 0]}, name=[0, 1], names=["host.gc", "process"])
>>> [NAMES[rows.name[0]] for rows in rows_by_rank(trace).values()]
['process']

What a rank saved in one attempt, and how many of its steps that kept when the attempt failed.

A save of torch or DCP holds the state of the steps before it as soon as it is
over. One of headway's own holds it from the copy on, but is worth something
only once it is committed; that happens later, in the background, maybe after
the trainer's death. What the next attempt restored tells for certain.

>>> one, two = RankSaves(3, {20: 4, 30: 8}, frozenset({20})), RankSaves(None, {20: 5, 30: 8}, frozenset())
>>> saved_steps([one, two]), saved_steps([one, two], restored=30), saved_steps([one, two], restored=10)
([4, 5], [8, 8], [])

Booked time of one rank: sub-line x step, and what it waited for each of its loaders. Times in int64 ns.

>>> sheet = RankAccount.blank(3)
>>> sheet.book("host.gc", 2, 9)
>>> sheet.ns.sum(axis=0).tolist()
[0, 0, 9, 0, 0]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.integers import narrowed
from headway.ledger.buckets import SUB_CODE, SUBS
from headway.trace.events.intervals import Ints
from headway.trace.events.parts import Parts
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import SPANS
from headway.trace.recording.rows import LOADER_LANE
from headway.trace.recording.run_facts import RankRow
from headway.trace.sync.clocks import aligned_ns

NAMES: tuple[str, ...] = tuple(SPANS)
NAME_ID: dict[str, int] = {name: index for index, name in enumerate(NAMES)}


@dataclass(frozen=True, slots=True)
class RankRows:
    """Columns of one rank's rows, sorted by start; ties are broken by content, never by row order."""

    rank: int
    """The rank."""

    name: Ints
    """[n] Index into `NAMES`, -1 for a name the recorder does not write."""

    start_ns: Ints
    """[n] Aligned start."""

    end_ns: Ints
    """[n] Aligned end."""

    worker: Ints
    """[n] Loader worker whose lane the row is on, -1 = the training thread, -2 = any other lane."""

    columns: Mapping[str, NDArray[Any]]
    """The other trace columns, [n] each."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.start_ns)

    def of(self, *names: str, main: bool = True) -> Ints:
        """Return the indices of rows named so; `main` leaves only those of the training thread."""
        picked = np.isin(self.name, [NAME_ID[name] for name in names])
        if main:
            picked &= self.worker == -1
        return np.flatnonzero(picked)

    def column(self, name: str, rows: Ints) -> Ints:
        """Return int64 values of a column at `rows`."""
        values: Ints = self.columns[name][rows].astype(np.int64)
        return values

    def where(self, rows: Ints, columns: Collection[str]) -> RankRows:
        """Return these rows only, with these of the other columns."""
        kept = {name: self.columns[name][rows] for name in columns}
        return RankRows(self.rank, self.name[rows], self.start_ns[rows], self.end_ns[rows], self.worker[rows], kept)


def rows_by_rank(source: Trace | Parts, clock_offset_ns: Mapping[int, int] | None = None) -> dict[int, RankRows]:
    """Split a recorded trace into the rows of each rank >= 0, ranks in order.

    `clock_offset_ns` maps a rank to what puts its times on the common clock.
    """
    parts = Parts.of(source)
    found = zip(parts.numbers, parts, strict=True)
    return {rank: rows_of(part, rank, clock_offset_ns) for rank, part in found if rank >= 0}


def rows_of(part: Trace, rank: int, clock_offset_ns: Mapping[int, int] | None = None) -> RankRows:
    """Return the rows of one rank, of which `part` holds nothing else."""
    events = part.events
    name, worker = name_codes(part), worker_codes(part)
    start, duration = events["start_ns"], events["duration_ns"]
    keys = [events[key] for key in ("corr", "peer", "seq", "group", "bytes")]
    # lexsort sorts by its last key first: start, then the longer row (it encloses the shorter), then the name; the
    # other keys only make the order one of content, so that two files of one run give the same rows.
    order = np.lexsort((*keys, worker, name, -duration, start))
    shift, known = int((clock_offset_ns or {}).get(rank, 0)), part.ranks.get(rank, {})
    begin, end = (aligned_ns(known, raw[order]) + shift for raw in (start, start + duration))
    # Every column is taken in the same order: row i of one is row i of all.
    columns = {key: events[key][order] for key in ("step", "depth", "group", "seq", "peer", "bytes", "corr")}
    return RankRows(rank, name[order], begin, end, worker[order], columns)


def name_codes(part: Trace) -> Ints:
    """[n] Index into `NAMES` of each row of a recorded trace, -1 for other names."""
    # A name is looked up once per name of the table, not once per row; the last entry answers for code -1.
    table = np.array([NAME_ID.get(name, -1) for name in part.names] + [-1], np.int64)
    codes: Ints = table[part.events["name"]]
    return codes


def worker_codes(part: Trace) -> Ints:
    """[n] `RankRows.worker` of each row of a recorded trace."""
    table = np.array([_worker(lane) for lane in part.lanes] + [-2], np.int64)
    lane = part.events["lane"].astype(np.int64)
    # A lane outside of the table reads the last entry, which is "any other lane".
    codes: Ints = table[np.where((lane >= 0) & (lane < len(part.lanes)), lane, len(part.lanes))]
    return codes


def _worker(lane: str) -> int:
    """Return the loader worker of a lane name, -1 for the training thread, -2 for any other."""
    if lane == "main":
        return -1
    number = lane.removeprefix(LOADER_LANE)
    return int(number) if lane.startswith(LOADER_LANE) and number.isdigit() else -2


@dataclass(frozen=True, slots=True)
class RankLifetime:
    """When one rank did what in one attempt; `from <= born <= first <= last <= record <= died <= until`, all ns."""

    from_ns: int
    """Start of the time that this attempt answers for."""

    born_ns: int
    """Start of the process."""

    first_ns: int
    """Start of step 0; the last record when no step was completed."""

    last_ns: int
    """End of the last complete step."""

    record_ns: int
    """End of the last record that is trusted: the process's end when it ended well."""

    died_ns: int
    """End of the process; the last record when nobody saw it end."""

    until_ns: int
    """End of the time that this attempt answers for."""

    step_start: Ints
    """[k] Start of each complete step."""

    step_end: Ints
    """[k] End of each complete step."""

    seen: bool
    """Whether somebody saw the process end."""

    failed: bool
    """Whether it ended badly, or nobody knows."""

    exited: bool
    """Whether the process ended itself, with an exit code: no signal did."""


def life_of(rows: RankRows, facts: RankRow, *, from_ns: int, until_ns: int | None, failed: bool) -> RankLifetime:
    """Find the borders of a rank's life from its rows and what run.json says of the rank.

    `until_ns` None means that the attempt ends with the process. `failed` says that the attempt is known to have
    failed whatever the rank's own exit code was.
    """
    steps = rows.of("step")
    process = rows.of("process")
    own = np.flatnonzero(~np.isin(rows.name, [NAME_ID["process"], NAME_ID["launcher"]]))
    latest = int(rows.end_ns[own].max()) if len(own) else from_ns
    earliest = int(rows.start_ns.min()) if len(rows) else from_ns
    born = int(rows.start_ns[process[0]]) if len(process) else facts.start_ns or earliest
    end = int(rows.end_ns[process].max()) if len(process) else 0
    died = end if end > born else facts.end_ns or 0
    # Somebody saw the end if it lies behind the last record, or if there is an exit code.
    seen = died > latest or (died > 0 and facts.exit_code is not None)
    died = max(died, latest)
    failed = failed or facts.exit_code != 0 or not seen
    until = died if until_ns is None else max(until_ns, from_ns)
    # Each border is pressed between its neighbours, from outside inwards:
    #     from <= born <= first <= last <= record <= died <= until
    # so that differences of borders are never negative, whatever a torn file says.
    born = min(max(born, from_ns), until)
    died = min(max(died, born), until)
    step_start, step_end = rows.start_ns[steps], rows.end_ns[steps]
    record = min(max(latest, born), died)
    last = min(max(int(step_end.max()), born), record) if len(steps) else record
    first = min(max(int(step_start.min()), born), last) if len(steps) else record
    return RankLifetime(
        from_ns, born, first, last, record if failed else died, died, until, step_start, step_end, seen, failed,
        exited=(facts.exit_code or 0) > 0 and seen,
    )  # fmt: skip


# What a rank saved in one attempt, and how many of its steps that kept when the attempt failed.


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
    # One rank that knows of the commit is enough: it happened for all of them at once.
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
        # at[i]: the last update that began before row i, -1 if none did. A row inside an update moves to its end.
        at = np.searchsorted(rows.start_ns[updates], moment, side="right") - 1
        end = np.where(at >= 0, rows.end_ns[updates[np.maximum(at, 0)]], 0)
        moment = np.maximum(moment, end)
    return np.searchsorted(life.step_end, moment, side="right").astype(np.int64)


class RankAccount:
    """Booked time of one rank: sub-line x column, where column 0 is before the first step, k + 1 is step k."""

    __slots__ = ("_columns", "_lines", "_ns", "loader_calls", "loader_ns")

    def __init__(self, ns: Ints) -> None:
        self._ns: Ints | None = ns
        self.loader_ns: dict[int, Ints] = {}
        """Loader (group; -1 = not known) -> [len(SUBS)] ns that the training thread spent on it."""
        self.loader_calls: dict[int, int] = {}
        """Loader -> calls of next(loader) by training, evaluations left out."""
        self._columns = int(ns.shape[1])
        self._lines: dict[int, tuple[Ints, Ints]] = {}

    @classmethod
    def blank(cls, num_steps: int) -> RankAccount:
        """Return a sheet with nothing booked."""
        return cls(np.zeros((len(SUBS), num_steps + 2), np.int64))

    @property
    def ns(self) -> Ints:
        """[len(SUBS), num_steps + 2] Nanoseconds; the last column is what follows the last step."""
        if self._ns is None:
            self._ns = np.zeros((len(SUBS), self._columns), np.int64)
            for line, (columns, amounts) in self._lines.items():
                self._ns[line, columns if len(columns) else slice(None)] = amounts
        return self._ns

    @property
    def columns(self) -> int:
        """num_steps + 2."""
        return self._columns

    def totals(self) -> Ints:
        """[len(SUBS)] Nanoseconds over all columns; a packed sheet stays packed."""
        if self._ns is not None:
            whole: Ints = self._ns.sum(axis=1)
            return whole
        sums = np.zeros(len(SUBS), np.int64)
        for line, (_, amounts) in self._lines.items():
            sums[line] = amounts.sum(dtype=np.int64)
        return sums

    def pack(self) -> None:
        """Keep no more than what is booked, in narrow types, until `ns` is asked for again.

        A sub-line is kept as columns and their amounts, or whole (without columns) where that takes less.
        """
        if self._ns is None:
            return
        self._lines = {}
        for line in np.flatnonzero(self._ns.any(axis=1)).tolist():
            columns = np.flatnonzero(self._ns[line])
            some = 2 * len(columns) < self._columns
            kept = self._ns[line, columns] if some else self._ns[line]
            self._lines[line] = (narrowed(columns) if some else columns[:0], narrowed(kept))
        self._ns = None

    def book(self, sub: str, column: int, duration_ns: int) -> None:
        """Add one amount."""
        self.ns[SUB_CODE[sub], column] += duration_ns

    def book_all(self, sub: Ints | int, column: Ints, duration_ns: Ints) -> None:
        """Add many: `sub` codes [n] or one code, `column` [n], `duration_ns` [n]."""
        np.add.at(self.ns, (np.broadcast_to(sub, column.shape), column), duration_ns)

    def book_loader(self, sub: Ints | int, loader: Ints, duration_ns: Ints) -> None:
        """Add what was spent on loaders: `sub` codes [n] or one code, `loader` [n], `duration_ns` [n]."""
        codes = np.broadcast_to(sub, loader.shape)
        for group in np.unique(loader).tolist():
            own = loader == group
            total = self.loader_ns.setdefault(group, np.zeros(len(SUBS), np.int64))
            np.add.at(total, codes[own], duration_ns[own])
