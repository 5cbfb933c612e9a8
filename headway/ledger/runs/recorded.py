"""Account for what `headway run` recorded: a run folder, several hosts' folders of one run, or one bare trace.

Clocks of several hosts are put on the first one's by the (monotonic,
realtime) pair that each wrote at its start. Times int64 ns.

>>> trace = Trace.from_columns({"rank": [0], "start_ns": [0], "duration_ns": [7]}, name=[0], names=["process"])
>>> recorded_trace_account(trace).wall_ns
7

Which loaders of a run are evaluation's: those for which evaluations waited longer than training did.

>>> from types import SimpleNamespace
>>> waits = {0: {"input.fetch": 5, "eval.input": 1}, 1: {"eval.input": 7}, 2: {}}
>>> evaluation_loaders(SimpleNamespace(loader_ns=waits))
{1}
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from headway.core.files.safe_files import read_json
from headway.core.units import format_fraction, plural
from headway.ledger.booking.account import Account, KernelTimes, SpanFacts, blank_subs, bound_of
from headway.ledger.booking.arrivals import RankLateness
from headway.ledger.booking.rows import RankAccount
from headway.ledger.buckets import BUCKET_CODE_OF_SUB, BUCKETS
from headway.ledger.cause import joined
from headway.ledger.runs.attempts import AttemptBook, RunBook, book_run
from headway.ledger.runs.sampled import WindowSamples, apply_windows, moved, window_shares
from headway.trace.events.intervals import Ints
from headway.trace.events.parts import Parts
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import BY_EVENTS
from headway.trace.recording.basis import BASES
from headway.trace.recording.gaps import slower_since, undisturbed
from headway.trace.recording.run_facts import RankRow, RunFacts

if TYPE_CHECKING:
    from headway.ledger.answers.ledger import Ledger

RECORDED = ("process", "step", "optimizer.step", "input.next")
"""Names that only headway's recorder writes."""

BOUND = {"device": "the device", "input": "waiting for input", "host": "the host"}
"""What bounds a job, in words; other buckets go by their name."""

MOST_RANKS_ASKED = 4
"""Ranks whose windows tell which steps were disturbed: they open at the same steps on all ranks."""

WINDOW_FILE = re.compile(r"r(?P<rank>\d+)-w(?P<number>\d+)\.json(\.gz)?")


@runtime_checkable
class RunSource(Protocol):
    """What `Ledger.of` needs of a run folder; `headway.trace.recording.runs.Run` has it."""

    @property
    def facts(self) -> RunFacts:
        """What run.json says."""
        ...

    def attempts(self) -> Sequence[Trace | Parts]:
        """Return one trace per attempt, oldest first."""
        ...

    def windows(self) -> Sequence[Path]:
        """Return the profiler windows."""
        ...


def recorded_trace_account(trace: Trace | Parts) -> Account:
    """Account for a bare trace of recorded rows; its own facts stand in for run.json."""
    parts = Parts.of(trace)
    facts = RunFacts.of(parts.meta)
    return _summed(book_run([parts], facts, facts.clock_offset_ns), [parts], facts, None)


def recorded_account(runs: Sequence[RunSource]) -> Account:
    """Account for recorded runs that belong together: the hosts of one job."""
    parts = [(run, [Parts.of(attempt) for attempt in run.attempts()]) for run in runs]
    count = max(len(own) for _, own in parts)
    traces = [Parts.joined([own[number] for _, own in parts if number < len(own)]) for number in range(count)]
    facts, offsets = _joined_facts(parts)
    book = book_run(traces, facts, offsets)
    files = [path for run in runs for path in run.windows()]
    windows = None
    if facts.device_type != "cpu":
        windows = window_shares(book, _opened(files, facts.realtime_shift_ns, offsets))
        apply_windows(book, windows)
    account = _summed(book, traces, facts, windows)
    known = {int(match["rank"]) for path in files if (match := WINDOW_FILE.fullmatch(path.name))}
    asked = sorted(known & {one.rank for one in book.attempts[-1].books})[:MOST_RANKS_ASKED]
    if not asked:
        return account
    # What the profiler's library does to a device's launches; a loop on the CPU that slows down has another reason.
    on_device = facts.device_type != "cpu"
    kept = undisturbed_steps(book, asked, len(account.step_wall_ns), on_device=on_device)
    longer = slower_since(account.step_wall_ns, int(np.argmin(kept))) if on_device and not kept.all() else 0.0
    said = (
        f"steps take {format_fraction(longer, 0)} longer since the profiler was first used: its library stays attached"
    )
    return replace(account, undisturbed=kept, notes=(*account.notes, *([said] if longer else [])))


def undisturbed_steps(book: RunBook, ranks: Iterable[int], count: int, *, on_device: bool) -> NDArray[np.bool_]:
    """Return [count] whether no window of `ranks` disturbed a step of the last attempt."""
    kept = np.ones(count, bool)
    for rank in ranks:
        rows = book.rows(rank)
        steps, windows = (rows.of(name) for name in ("step", "window"))
        spans = rows.start_ns[steps], rows.end_ns[steps], rows.start_ns[windows], rows.end_ns[windows]
        own = undisturbed(*spans, on_device=on_device)
        kept[: len(own)] &= own[:count]
    return kept


def _opened(
    files: Sequence[Path], realtime_shift_ns: int, clock_offset_ns: Mapping[int, int]
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
        shift = realtime_shift_ns if ahead is None else ahead - clock_offset_ns.get(rank, 0)
        windows.setdefault(number, []).append(moved(Trace.open(path), rank, shift))
    return windows


def _window_clock(tables: Path, number: int) -> int | None:
    """Return realtime minus monotonic clock when a window was opened, None when its rank wrote none down."""
    try:
        facts = read_json(tables)["windows"][str(number)]
        return int(facts["realtime_ns"]) - int(facts["clock_ns"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _joined_facts(parts: Sequence[tuple[RunSource, list[Parts]]]) -> tuple[RunFacts, dict[int, int]]:
    """Join the facts of several hosts on the first one's clock; returns them and each rank's clock offset."""
    first = parts[0][0].facts
    offsets = dict(first.clock_offset_ns)
    rows: list[RankRow] = []
    starts, ends = [], []
    for run, traces in parts:
        facts = run.facts
        shift, own = facts.realtime_shift_ns - first.realtime_shift_ns, facts.clock_offset_ns
        for rank in {rank for trace in traces for rank in trace.numbers if rank >= 0}:
            offsets[rank] = own.get(rank, 0) + shift
        starts += [facts.start_ns + shift] if facts.start_ns else []
        ends += [facts.end_ns + shift] if facts.end_ns else []
        rows += [row.moved(own.get(row.rank, 0) + shift) for row in facts.ranks]
    end_ns = max(ends) if len(ends) == len(parts) else None
    joined = structs.replace(first, start_ns=min(starts, default=None), end_ns=end_ns, ranks=tuple(rows))
    return joined, {rank: offset for rank, offset in offsets.items() if offset}


def said_of_steps(traces: Sequence[Parts]) -> list[str]:
    """Return what a reader must know of how steps were counted, where no optimizer counts them."""
    counted_by = sorted({str(trace.meta.get("step_basis") or "optimizer") for trace in traces} - {"optimizer"})
    return [BASES[name] for name in counted_by if name in BASES]


def said_of_devices(traces: Sequence[Parts]) -> list[str]:
    """Return what a reader must know of processes that compute on several devices."""
    timers = {rank: row.get("timers") or {} for trace in traces for rank, row in trace.ranks.items()}
    several = sorted(rank for rank, facts in timers.items() if len(facts.get("devices") or ()) > 1)
    if not several:
        return []
    which = "rank " + ", ".join(map(str, several[:4])) + (", ..." if len(several) > 4 else "")
    return [f"{which} computes on several devices and counts as one: at work while any of them is"]


def _summed(book: RunBook, traces: Sequence[Parts], facts: RunFacts, windows: WindowSamples | None) -> Account:
    """Sum a booked run."""
    last = book.attempts[-1]
    basis = {bucket: "remainder" if bucket == "useful" else "recorded" for bucket in BUCKETS}
    by_events = not last.spans.keys().isdisjoint(BY_EVENTS)
    if by_events:
        basis["useful"] = "device events"
    if windows is not None and windows.num_windows:
        basis.update(dict.fromkeys(("useful", "comm", "input", "host"), windows.basis))
    cut = sum(not one.seen for attempt in book.attempts for one in attempt.books)
    notes = [f"the end of {plural(cut, 'rank')} was not seen: booked up to the last record"] if cut else []
    if facts.end_ns is None and facts.start_ns:
        notes.insert(0, "the run has not ended, or its launcher was killed: this is what its ranks recorded until then")
    notes += said_of_steps(traces)
    notes += said_of_devices(traces)
    step_ns = _by_step(last)
    if by_events:
        bound, share = bound_of(step_ns)
        by, at_work = BOUND.get(bound, bound), f"{format_fraction(share, 0)} of their time"
        if bound == "unknown":
            by = "the device or its host, which the events do not tell (`headway run --window-at 50` does)"
            most = share + float(step_ns[BUCKETS.index("unknown")].sum() / max(step_ns.sum(), 1))
            at_work = f"{at_work} at least, {format_fraction(min(most, 1.0), 0)} at most"
        notes.append(f"steps are bound by {by}: the device is at work {at_work}")
    return Account(
        wall_ns=book.wall[1] - book.wall[0],
        sub_ns={
            rank: np.sum([attempt.sheets[rank].totals() for attempt in book.attempts], axis=0) for rank in book.ranks
        },
        steps=sum(attempt.kept_steps for attempt in book.attempts),
        basis=basis,
        step_ns=step_ns,
        step_wall_ns=last.step_wall_ns,
        lateness=_joined_lateness([attempt.lateness for attempt in book.attempts]),
        spans=_span_facts(book),
        loader_ns=_loader_ns(book),
        loader_calls=dict(sum((Counter(sheet.loader_calls) for sheet in _sheets(book)), start=Counter())),
        script_lines=joined(row.get("script", []) for trace in traces for row in trace.ranks.values()),
        gradient_lines=joined(row.get("gradients", []) for trace in traces for row in trace.ranks.values()),
        loop_lines=joined(row.get("python_loops", []) for trace in traces for row in trace.ranks.values()),
        load_lines=joined(row.get("loads", []) for trace in traces for row in trace.ranks.values()),
        wait_lines=joined(row.get("waits", []) for trace in traces for row in trace.ranks.values()),
        collective_lines=joined(row.get("collectives", []) for trace in traces for row in trace.ranks.values()),
        facts=facts,
        hosts={rank: str(row["host"]) for trace in traces for rank, row in trace.ranks.items() if row.get("host")},
        kernels=windows.kernels if windows is not None else KernelTimes(),
        notes=tuple(notes + list(windows.notes if windows is not None else ())),
    )


def _by_step(attempt: AttemptBook) -> Ints:
    """Sum an attempt's steps over ranks, [len(BUCKETS), n]."""
    result = np.zeros((len(BUCKETS), attempt.num_steps), np.int64)
    for book in attempt.books:
        steps = book.sheet.ns[:, 1:-1]
        np.add.at(result[:, : steps.shape[1]], np.array(BUCKET_CODE_OF_SUB), steps)
        book.sheet.pack()
    return result


def _joined_lateness(parts: Sequence[RankLateness]) -> RankLateness:
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
    return RankLateness(blamed, times, main.median_margin_ns, sum(part.num_collectives for part in parts))


def _loader_ns(book: RunBook) -> dict[int, Ints]:
    """Total what every loader cost over ranks and attempts."""
    total: dict[int, Ints] = {}
    for sheet in _sheets(book):
        for loader, amounts in sheet.loader_ns.items():
            total[loader] = total.get(loader, blank_subs()) + amounts
    return total


def _sheets(book: RunBook) -> list[RankAccount]:
    """Return the sheets of all ranks in all attempts."""
    return [sheet for attempt in book.attempts for sheet in attempt.sheets.values()]


def _span_facts(book: RunBook) -> dict[str, SpanFacts]:
    """Total every recorded name over the attempts."""
    facts: dict[str, SpanFacts] = {}
    for attempt in book.attempts:
        for name, own in attempt.spans.items():
            facts[name] = facts[name] + own if name in facts else own
    return facts


# Which loaders of a run are evaluation's: those for which evaluations waited longer than training did.


def evaluation_loaders(ledger: Ledger) -> set[int]:
    """Return the groups of the loaders that evaluations read."""
    evaluation = set()
    for group, amounts in ledger.loader_ns.items():
        training_ns = sum(ns for sub, ns in amounts.items() if sub.startswith("input."))
        if amounts.get("eval.input", 0) > training_ns:
            evaluation.add(group)
    return evaluation
