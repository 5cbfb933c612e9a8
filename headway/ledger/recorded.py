"""Account for what `headway run` recorded: a run folder, several hosts' folders of one run, or one bare trace.

Clocks of several hosts are put on the first one's by the (monotonic,
realtime) pair that each wrote at its start. Times int64 ns.

>>> trace = Trace.from_columns({"rank": [0], "start_ns": [0], "duration_ns": [7]}, name=[0], names=["process"])
>>> recorded_trace_account(trace).wall_ns
7
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from headway.ledger.account import Account, SpanFacts
from headway.ledger.arrivals import Lateness
from headway.ledger.attempts import AttemptBook, RunBook, book_run
from headway.ledger.buckets import BUCKET_CODE_OF_SUB, BUCKETS
from headway.ledger.rows import NAME_ID, NAMES
from headway.ledger.sampled import Windows, apply_windows, moved, window_shares
from headway.ledger.timeline import trained_until
from headway.trace.sweep import Ints
from headway.trace.trace import Trace, concat

RECORDED = ("process", "step", "optimizer.step", "input.next")
"""Names that only headway's recorder writes."""

WINDOW_FILE = re.compile(r"r(?P<rank>\d+)-w(?P<number>\d+)\.json(\.gz)?")


@runtime_checkable
class RecordedRun(Protocol):
    """What `Ledger.of` needs of a run folder; `headway.trace.runs.Run` has it."""

    @property
    def meta(self) -> Mapping[str, Any]:
        """The content of run.json."""
        ...

    def attempts(self) -> Sequence[Trace]:
        """Return one trace per attempt, oldest first."""
        ...

    def windows(self) -> Sequence[Path]:
        """Return the profiler windows."""
        ...


def recorded_trace_account(trace: Trace) -> Account:
    """Account for a bare trace of recorded rows; its own facts stand in for run.json."""
    return _summed(book_run([trace], trace.meta, _offsets(trace.meta)), [trace], trace.meta, None)


def recorded_account(runs: Sequence[RecordedRun]) -> Account:
    """Account for recorded runs that belong together: the hosts of one job."""
    parts = [(run, list(run.attempts())) for run in runs]
    count = max(len(traces) for _, traces in parts)
    traces = [concat([own[number] for _, own in parts if number < len(own)]) for number in range(count)]
    meta, offsets = _joined_meta(parts)
    book = book_run(traces, meta, offsets)
    windows = None
    if str(meta.get("device_type", "cpu")) != "cpu":
        files = [path for run in runs for path in run.windows()]
        windows = window_shares(book, _opened(files, meta, offsets))
        apply_windows(book, windows)
    return _summed(book, traces, meta, windows)


def _opened(
    files: Sequence[Path], meta: Mapping[str, Any], clock_offset_ns: Mapping[int, int]
) -> dict[int, list[Trace]]:
    """Read the windows `r<rank>-w<number>.json` by number, their times put on the common monotonic clock.

    The profiler writes realtime. Each window has its own pair of clocks in RUN/tables; lacking that, the run's pair.
    """
    windows: dict[int, list[Trace]] = {}
    for path in files:
        match = WINDOW_FILE.fullmatch(path.name)
        if not match:
            continue
        rank, number = int(match["rank"]), int(match["number"])
        ahead = _window_clock(path.parent.parent / "tables" / f"r{rank}.json", number)
        shift = _realtime(meta) if ahead is None else ahead - clock_offset_ns.get(rank, 0)
        windows.setdefault(number, []).append(moved(Trace.open(path), rank, shift))
    return windows


def _window_clock(tables: Path, number: int) -> int | None:
    """Return realtime minus monotonic clock when a window was opened, None when its rank wrote none down."""
    try:
        facts = json.loads(tables.read_text())["windows"][str(number)]
        return int(facts["realtime_ns"]) - int(facts["clock_ns"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _offsets(meta: Mapping[str, Any]) -> dict[int, int]:
    """Return the clock offsets that a merged run's facts carry."""
    return {int(rank): int(offset) for rank, offset in (meta.get("clock_offset_ns") or {}).items()}


def _joined_meta(parts: Sequence[tuple[RecordedRun, list[Trace]]]) -> tuple[dict[str, Any], dict[int, int]]:
    """Join the facts of several hosts on the first one's clock; returns them and each rank's clock offset."""
    first = parts[0][0].meta
    offsets = _offsets(first)
    rows: list[dict[str, Any]] = []
    starts, ends = [], []
    for run, traces in parts:
        shift = _realtime(run.meta) - _realtime(first) if run.meta is not first else 0
        own = _offsets(run.meta)
        for rank in {int(rank) for trace in traces for rank in np.unique(trace.events["rank"]) if rank >= 0}:
            offsets[rank] = own.get(rank, 0) + shift
        starts.append(run.meta["start_ns"] + shift if run.meta.get("start_ns") else None)
        ends.append(run.meta["end_ns"] + shift if run.meta.get("end_ns") else None)
        for row in run.meta.get("ranks") or []:
            moved = own.get(int(row["rank"]), 0) + shift
            times = {key: row[key] + moved for key in ("start_ns", "end_ns") if row.get(key)}
            rows.append({**row, **times})
    known_starts, known_ends = [s for s in starts if s], [e for e in ends if e]
    joined = {
        **first,
        "start_ns": min(known_starts) if known_starts else None,
        "end_ns": max(known_ends) if len(known_ends) == len(parts) else None,
        "ranks": rows,
    }
    return joined, {rank: offset for rank, offset in offsets.items() if offset}


def _realtime(meta: Mapping[str, Any]) -> int:
    """Return realtime minus monotonic clock of a host, 0 when it is not known."""
    return int(meta["realtime_ns"]) - int(meta["start_ns"]) if meta.get("realtime_ns") and meta.get("start_ns") else 0


def _summed(book: RunBook, traces: Sequence[Trace], meta: Mapping[str, Any], windows: Windows | None) -> Account:
    """Sum a booked run."""
    last = book.attempts[-1]
    basis = {bucket: "remainder" if bucket == "useful" else "recorded" for bucket in BUCKETS}
    if windows is not None and windows.num_windows:
        basis.update(dict.fromkeys(("useful", "comm", "input", "host"), windows.basis))
    cut = sum(not one.life.seen for attempt in book.attempts for one in attempt.books)
    notes = [f"the end of {cut} processes was not seen: they are booked up to their last record"] if cut else []
    return Account(
        wall_ns=book.wall[1] - book.wall[0],
        sub_ns={
            rank: np.sum([attempt.sheets[rank].ns.sum(axis=1) for attempt in book.attempts], axis=0)
            for rank in book.ranks
        },
        steps=sum(attempt.kept_steps for attempt in book.attempts),
        basis=basis,
        step_ns=_by_step(last),
        step_wall_ns=_step_walls(last),
        lateness=_joined_lateness([attempt.lateness for attempt in book.attempts]),
        spans=_span_facts(book),
        meta=meta,
        hosts={rank: str(row["host"]) for trace in traces for rank, row in trace.ranks.items() if row.get("host")},
        notes=tuple(notes + list(windows.notes if windows is not None else ())),
    )


def _by_step(attempt: AttemptBook) -> Ints:
    """Sum an attempt's steps over ranks, [len(BUCKETS), n]."""
    result = np.zeros((len(BUCKETS), attempt.num_steps), np.int64)
    for book in attempt.books:
        steps = book.sheet.ns[:, 1:-1]
        np.add.at(result[:, : steps.shape[1]], np.array(BUCKET_CODE_OF_SUB), steps)
    return result


def _step_walls(attempt: AttemptBook) -> Ints:
    """Return the mean wall of each step that every rank completed."""
    walls = [book.life.step_end - book.life.step_start for book in attempt.books if len(book.life.step_start)]
    if not walls:
        return np.zeros(0, np.int64)
    common = min(len(wall) for wall in walls)
    mean: Ints = np.sum([wall[:common] for wall in walls], axis=0) // len(walls)
    return mean


def _joined_lateness(parts: Sequence[Lateness]) -> Lateness:
    """Add up the lateness of several attempts; medians are those of the attempt with the most collectives."""
    if len(parts) == 1:
        return parts[0]
    blamed: dict[int, dict[str, int]] = {}
    times: dict[int, int] = {}
    for part in parts:
        for rank, amounts in part.blamed_ns.items():
            row = blamed.setdefault(rank, {})
            for bucket, amount in amounts.items():
                row[bucket] = row.get(bucket, 0) + amount
        for rank, number in part.times_last.items():
            times[rank] = times.get(rank, 0) + number
    main = max(parts, key=lambda part: part.num_collectives)
    return Lateness(blamed, times, main.median_margin_ns, sum(part.num_collectives for part in parts))


def _span_facts(book: RunBook) -> dict[str, SpanFacts]:
    """Total every recorded name on the training threads, from the first step to the end of training."""
    facts: dict[str, SpanFacts] = {}
    for attempt in book.attempts:
        for one in attempt.books:
            rows = one.rows
            main = (rows.worker == -1) & (rows.name >= 0) & (rows.start_ns >= one.life.first_ns)
            main &= (rows.name != NAME_ID["host.gc"]) | (rows.start_ns < trained_until(rows, one.life))
            for code in np.unique(rows.name[main]).tolist():
                picked = main & (rows.name == code)
                duration = (rows.end_ns - rows.start_ns)[picked]
                old = facts.get(NAMES[code], SpanFacts(0, 0, 0, 0))
                facts[NAMES[code]] = SpanFacts(
                    old.count + len(duration),
                    old.total_ns + int(duration.sum()),
                    max(old.max_ns, int(duration.max())),
                    old.total_bytes + int(rows.columns["bytes"][picked].sum()),
                )
    return facts
