"""A window of a trace as rows of spans: what the report's timeline draws.

One row per rank and lane, the training thread first. Spans are coloured by
the bucket that their name is booked to (`headway.ledger.buckets`); kinds
colour what the ledger's table does not name, such as profiler kernels. Spans
too short to see are joined with their neighbours and counted, so a page stays
small however long the window is. Times in integer nanoseconds.

>>> from headway.trace.events.trace import Trace
>>> spans = {"start_ns": [0, 40], "duration_ns": [40, 10], "rank": [0, 0], "name": [0, 1], "kind": [5, 7]}
>>> line = timeline(Trace.from_columns(spans, names=["input.next", "optimizer.step"]))
>>> [(row.name, row.bucket.tolist()) for row in line.rows], line.end_ns - line.start_ns
([('rank 0', [2, 0])], 50)
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.units import clean
from headway.ledger.buckets import BUCKET_OF, BUCKETS, bucket_of_sub
from headway.report.page.charts import encode
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND
from headway.trace.sync.clocks import on_common_clock

MOST_SPANS = 12_000
"""Spans drawn; of more, the shortest are joined."""

MOST_ROWS = 28
"""Rows drawn when the caller names no ranks; of more ranks, evenly spread ones are."""

DEEPEST = 6
"""Levels of nesting drawn per row."""

PIXELS = 4_000
"""A span shorter than one of these parts of the window may be joined with its neighbours."""

BUCKET_OF_KIND = {
    "COMPUTE": "useful", "OPTIM": "useful", "COLL": "comm", "SEND": "comm", "RECV": "comm", "HOST": "host",
    "DATA": "input", "CKPT": "checkpoint", "SYNC": "idle",
}  # fmt: skip
"""Kind -> the bucket whose colour it wears when the ledger's table has no entry for the name."""

STEP = "step"
"""The MARK row of a whole step."""

REST_OF_STEP = "compute"
"""Time of a step on a CPU that no row of the training thread covers: the ledger books it as useful, by remainder."""

ANNOTATION = len(BUCKETS)
"""Bucket index of a mark: the profiler's own rows, ranges that a script named."""

HIDDEN = (
    "process", "launcher", "window", "dropped", "region", "eval.mark", "epoch", "segment.forward", "segment.backward",
    "segment.grad",
)  # fmt: skip
"""Bookkeeping that would cover the row it lies in."""

MOST_GROUPED_RANKS = 64
"""Ranks that a page holds for the reader to choose groups among."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that belong together: a data-parallel group, a pipeline."""

    name: str
    """'dp, pp 1', 'mesh_tp 0-7'."""

    ranks: tuple[int, ...]
    """Its ranks."""


def rank_groups(trace: Trace) -> tuple[RankGroup, ...]:
    """Return the parallel groups of a trace's ranks: from their coordinates, else from the table of groups.

    Groups of one rank, and the one of all, are left out; at most 200.
    """
    axes = [axis for axis in ("tp", "cp", "ep", "dp", "pp") if all(axis in row for row in trace.ranks.values())]
    found: dict[str, list[int]] = {}
    for axis in axes:
        for rank, row in sorted(trace.ranks.items()):
            others = ", ".join(f"{other} {row[other]}" for other in axes if other != axis)
            found.setdefault(f"{axis} group, {others}" if others else f"{axis} group", []).append(rank)
    if not axes:
        for entry in trace.groups.values():
            name = entry.get("description") or entry.get("name", "")
            found.setdefault(f"group {name}", list(entry.get("ranks") or ()))
    kept = [RankGroup(clean(name), tuple(ranks)) for name, ranks in found.items()]
    return tuple(group for group in kept if 1 < len(group.ranks) < len(trace.ranks))[:200]


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """The spans of one lane, `k` of them, in order of start."""

    name: str
    """'rank 0', 'rank 0 · loader/1', 'rank 3 · stream 7'."""

    start_ns: NDArray[np.int64]
    """[k] Start, counted from the window's start."""

    duration_ns: NDArray[np.int64]
    """[k] Length, cut at the window's ends."""

    depth: NDArray[np.int64]
    """[k] Level of nesting, 0 outermost."""

    bucket: NDArray[np.int64]
    """[k] Index into `BUCKETS`; `ANNOTATION` for marks that are no use of time."""

    name_code: NDArray[np.int64]
    """[k] Index into the timeline's `names`."""

    joined: NDArray[np.int64]
    """[k] How many recorded spans this one stands for."""

    rank: int = -1
    """Whose row it is, -1 = the launcher's."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """A window of a trace, ready to draw."""

    start_ns: int
    """Start of the window on the trace's clock."""

    end_ns: int
    """End of the window."""

    rows: tuple[TimelineRow, ...]
    """One per rank and lane."""

    names: tuple[str, ...]
    """Names of spans."""

    steps: tuple[tuple[int, int], ...] = ()
    """(step, start in ns from the window's start) of rank 0's step boundaries."""

    ranks: tuple[int, ...] = ()
    """Ranks drawn."""

    all_ranks: int = 0
    """Ranks that have spans in the window."""

    hidden: int = 0
    """Spans left out because even joined they were too many: the shortest."""

    links: NDArray[np.int64] = field(default_factory=lambda: np.zeros((2, 0), dtype=np.int64), compare=False)
    """[2, e] Spans, numbered through all rows: the second waited for the first."""

    groups: tuple[RankGroup, ...] = ()
    """Groups that the reader may choose; without a choice `first_ranks` are shown."""

    first_ranks: tuple[int, ...] = ()
    """Ranks shown at first, () = all that are drawn."""

    def to_json(self) -> dict[str, object]:
        """Return the page's object, arrays encoded."""
        rows = [
            {
                "name": row.name, "rank": row.rank, "levels": int(row.depth.max()) + 1 if len(row.depth) else 1,
                "start": encode(row.start_ns, 1), "duration": encode(row.duration_ns, 1),
                "depth": encode(row.depth, 1), "bucket": encode(row.bucket, 1), "code": encode(row.name_code, 1),
                "joined": encode(row.joined, 1),
            }
            for row in self.rows
        ]  # fmt: skip
        return {
            "length": self.end_ns - self.start_ns, "names": list(self.names), "buckets": list(BUCKETS),
            "used": [name for code, name in enumerate(BUCKETS) if any((row.bucket == code).any() for row in self.rows)],
            "rows": rows, "hidden": self.hidden, "ranks": len(self.ranks), "all_ranks": self.all_ranks,
            "steps": [list(step) for step in self.steps], "links": [encode(side, 1) for side in self.links],
            "groups": [[group.name, list(group.ranks)] for group in self.groups], "first": list(self.first_ranks),
        }  # fmt: skip


def timeline(
    trace: Trace, *, start_ns: int | None = None, end_ns: int | None = None, steps: Iterable[int] | None = None,
    ranks: Iterable[int] | None = None, most_spans: int = MOST_SPANS, links: NDArray[np.int64] | None = None,
    groups: Sequence[RankGroup] = (),
) -> Timeline:  # fmt: skip
    """Return the spans of `trace` between `start_ns` and `end_ns`, or of these `steps`; the whole trace by default.

    `ranks` chooses whose rows are drawn; for an ideal timeline pass the
    recorded one's `.ranks`. With `groups` all ranks are drawn, up to
    `MOST_GROUPED_RANKS`, for the reader to choose among. Clocks that were
    aligned are put on one; the window is a stretch of that one. `links` [2, e] are
    rows of `trace`, the second waited for the first
    (`headway.ledger.waited_for`). Raises `InputError` when the window ends
    before it starts.
    """
    trace = on_common_clock(trace)
    first_ns, last_ns = (trace if steps is None else trace.select(steps=steps)).span_ns
    start, end = first_ns if start_ns is None else start_ns, last_ns if end_ns is None else end_ns
    if end < start:
        raise InputError(f"the window ends {start - end} ns before it starts. Swap start_ns and end_ns.")
    events = trace.events
    ends = events["start_ns"] + events["duration_ns"]
    drawn = (ends > start) & (events["start_ns"] < end) & (events["duration_ns"] > 0) & (events["depth"] < DEEPEST)
    present = np.unique(events["rank"][drawn])
    first = _spread(present, np.unique(np.stack([events["rank"], events["lane"]])[:, drawn], axis=1).shape[1])
    if ranks is not None:  # those named, all where the reader chooses among them, else evenly spread ones
        chosen = np.array(sorted(set(ranks)), dtype=np.int64)
    else:
        chosen = present.astype(np.int64) if groups and len(present) <= MOST_GROUPED_RANKS else first
    row = np.flatnonzero(np.isin(events["rank"], chosen))
    trace = trace.where(row)
    drawn, events = drawn[row], trace.events
    drawn &= ~trace.named(*HIDDEN, STEP) & ~((events["kind"] == KIND["MARK"]) & (events["name"] < 0))
    spans = _clipped(trace.where(drawn), row[drawn], start, end)
    if trace.meta.get("device_type", "cpu") == "cpu":
        spans = _with_remainder(spans, trace, start, end)
    place = _lane_places(trace.lanes)[np.clip(spans["lane"], 0, None)]
    order = np.lexsort((-spans["duration"], spans["start"], spans["depth"], place, spans["rank"]))
    spans = {column: values[order] for column, values in spans.items()}
    row_of = _runs(np.stack([spans["rank"], place[order]]))
    spans, row_of, missing = _fitted(spans, row_of, most_spans, shortest=max(1, (end - start) // PIXELS))
    names = (*(clean(name) for name in trace.names), REST_OF_STEP)
    marks = _step_starts(trace, start, end)
    drawn_ranks = tuple(np.intersect1d(chosen, present).tolist())
    return Timeline(
        start, end, _rows(spans, row_of, trace), names, marks, drawn_ranks, len(present), missing,
        _links_of(spans["row"], links), tuple(groups), tuple(first.tolist()) if groups else (),
    )  # fmt: skip


def _links_of(row: NDArray[np.int64], links: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Return [2, e] numbers of spans for pairs of rows of which both are drawn on their own; `row` [k] by span."""
    if links is None or not links.size or not len(row):
        return np.zeros((2, 0), dtype=np.int64)
    place = np.full(max(int(row.max()), int(links.max())) + 1, -1, dtype=np.int64)
    place[row[row >= 0]] = np.flatnonzero(row >= 0)
    pairs = place[links]
    return np.asarray(pairs[:, (pairs >= 0).all(axis=0)])


def _spread(ranks: NDArray[Any], rows: int) -> NDArray[np.int64]:
    """Return all ranks when their `rows` fit, else evenly spread ones, the first and the last among them."""
    if rows <= MOST_ROWS or len(ranks) < 3:
        return np.asarray(ranks, dtype=np.int64)
    number = max(2, MOST_ROWS * len(ranks) // rows)
    return np.asarray(ranks[np.unique(np.linspace(0, len(ranks) - 1, number).round().astype(np.int64))], dtype=np.int64)


def _clipped(window: Trace, row: NDArray[np.int64], start: int, end: int) -> dict[str, NDArray[np.int64]]:
    """Return int64 columns of the spans, cut at the window and counted from its start; `row` says where they stand."""
    events = window.events
    begin = np.maximum(events["start_ns"], start)
    same = {"depth": "depth", "code": "name", "lane": "lane", "rank": "rank"}
    return {
        "start": begin - start, "duration": np.minimum(events["start_ns"] + events["duration_ns"], end) - begin,
        "bucket": _buckets(window), "joined": np.ones(len(window), dtype=np.int64), "row": row,
        **{column: events[name].astype(np.int64) for column, name in same.items()},
    }  # fmt: skip


def _buckets(trace: Trace) -> NDArray[np.int64]:
    """Return [n] bucket indices: by name where the ledger's table has it, else by kind."""
    unknown = BUCKETS.index("unknown")
    by_kind = np.full(256, unknown, dtype=np.int64)
    by_kind[KIND["MARK"]] = ANNOTATION
    for kind, bucket in BUCKET_OF_KIND.items():
        by_kind[KIND[kind]] = BUCKETS.index(bucket)
    by_name = np.full(len(trace.names) + 1, -1, dtype=np.int64)
    for code, name in enumerate(trace.names):
        bucket = bucket_of_sub(BUCKET_OF[name].sub) if name in BUCKET_OF else name.partition(".")[0]
        by_name[code] = BUCKETS.index(bucket) if bucket in BUCKETS else -1
    named = by_name[trace.events["name"]]
    return np.asarray(np.where(named >= 0, named, by_kind[trace.events["kind"]]))


def _with_remainder(
    spans: dict[str, NDArray[np.int64]], trace: Trace, start: int, end: int
) -> dict[str, NDArray[np.int64]]:
    """Add, per rank, the gaps that the training thread's outermost spans leave inside steps."""
    marks = trace.where(trace.named(STEP))
    main = trace.lanes.index("main") if "main" in trace.lanes else -1
    added: dict[str, list[NDArray[np.int64]]] = {column: [values] for column, values in spans.items()}
    for rank in np.unique(marks.events["rank"]):
        mine = marks.events["rank"] == rank
        first = max(int(marks.events["start_ns"][mine].min()), start) - start
        last = min(int((marks.events["start_ns"] + marks.events["duration_ns"])[mine].max()), end) - start
        outer = (spans["rank"] == rank) & (spans["lane"] == main)
        gaps = _gaps(spans["start"][outer], spans["duration"][outer], first, last)
        # The code after the last name of the trace is `REST_OF_STEP`, with which the table of names ends. A gap is no
        # row of the trace: row -1.
        constant = {"depth": 0, "bucket": BUCKETS.index("useful"), "code": len(trace.names), "joined": 1}
        constant |= {"lane": main, "rank": int(rank), "row": -1}
        for column, value in constant.items():
            added[column].append(np.full(len(gaps), value, dtype=np.int64))
        added["start"].append(gaps[:, 0])
        added["duration"].append(gaps[:, 1] - gaps[:, 0])
    return {column: np.concatenate(parts) for column, parts in added.items()}


def _gaps(start: NDArray[np.int64], duration: NDArray[np.int64], first: int, last: int) -> NDArray[np.int64]:
    """Return [g, 2]: the parts of [first, last) that no span covers."""
    order = np.argsort(start, kind="stable")
    begins = np.concatenate([start[order], [last]])
    covered = np.maximum.accumulate(np.concatenate([[first], (start + duration)[order]]))
    gaps = np.stack([covered, np.minimum(begins, last)], axis=1)
    return np.asarray(gaps[gaps[:, 1] > gaps[:, 0]])


def _lane_places(lanes: Sequence[str]) -> NDArray[np.int64]:
    """Return [lanes] places: the training thread first, then lanes by name, 'stream 7' before 'stream 20'."""
    words = [
        [(0, int(w), "") if w.isdecimal() else (1, 0, w) for w in re.split(r"([0-9]+)", lane) if w] for lane in lanes
    ]
    natural = sorted(range(len(lanes)), key=lambda lane: (lanes[lane] != "main", words[lane]))
    place = np.zeros(max(1, len(lanes)), dtype=np.int64)
    place[natural] = np.arange(len(natural))
    return place


def _runs(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [n] numbers of runs of equal columns of `keys` [m, n]."""
    if keys.shape[1] == 0:
        return np.zeros(0, dtype=np.int64)
    changed = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    return np.concatenate([[0], np.cumsum(changed)])


def _fitted(
    spans: dict[str, NDArray[np.int64]], row_of: NDArray[np.int64], most: int, *, shortest: int
) -> tuple[dict[str, NDArray[np.int64]], NDArray[np.int64], int]:
    """Return at most `most` spans: joined ever more coarsely, then without the shortest; and how many went missing."""
    for _ in range(5):
        if len(row_of) <= most:
            return spans, row_of, 0
        spans, row_of = _join(spans, row_of, shortest=shortest)
        shortest *= 4
    kept = np.sort(np.argsort(-spans["duration"], kind="stable")[:most])
    hidden = int(spans["joined"].sum() - spans["joined"][kept].sum())
    return {column: values[kept] for column, values in spans.items()}, row_of[kept], hidden


def _join(
    spans: dict[str, NDArray[np.int64]], row_of: NDArray[np.int64], *, shortest: int
) -> tuple[dict[str, NDArray[np.int64]], NDArray[np.int64]]:
    """Join neighbours of one row, depth and bucket that are short and close; sums of spans are kept in 'joined'."""
    ends = spans["start"] + spans["duration"]
    short = spans["duration"] < shortest
    apart = np.ones(len(row_of), dtype=bool)
    same = (row_of[1:] == row_of[:-1]) & (spans["depth"][1:] == spans["depth"][:-1])
    same &= (spans["bucket"][1:] == spans["bucket"][:-1]) & short[1:] & short[:-1]
    # A chain may grow far longer than `shortest`: what matters is that its gaps cannot be seen.
    apart[1:] = ~(same & (spans["start"][1:] - ends[:-1] < shortest))
    first = np.flatnonzero(apart)
    out = {column: values[first] for column, values in spans.items()}
    out["duration"] = np.maximum.reduceat(ends, first) - out["start"]
    out["joined"] = np.add.reduceat(spans["joined"], first)
    out["row"] = np.where(out["joined"] > 1, -1, out["row"])
    return out, row_of[first]


def _rows(spans: dict[str, NDArray[np.int64]], row_of: NDArray[np.int64], trace: Trace) -> tuple[TimelineRow, ...]:
    """Cut the sorted columns into rows and name them."""
    cuts = np.concatenate([[True], row_of[1:] != row_of[:-1], [True]]) if len(row_of) else np.zeros(0, dtype=bool)
    edges: list[int] = np.flatnonzero(cuts).tolist()
    rows: list[TimelineRow] = []
    for begin, stop in itertools.pairwise(edges):
        part = {column: values[begin:stop] for column, values in spans.items()}
        rank, lane = int(part["rank"][0]), int(part["lane"][0])
        lane_name = trace.lanes[lane] if 0 <= lane < len(trace.lanes) else str(lane)
        owner = f"rank {rank}" if rank >= 0 else "launcher"
        name = owner if lane_name == "main" else f"{owner} · {clean(lane_name)}"
        start, duration, depth, bucket = (part[column] for column in ("start", "duration", "depth", "bucket"))
        rows.append(TimelineRow(name, start, duration, depth, bucket, part["code"], part["joined"], rank))
    return tuple(rows)


def _step_starts(trace: Trace, start: int, end: int) -> tuple[tuple[int, int], ...]:
    """Return (step, start from the window's start) of the first rank that has MARK rows 'step'."""
    marks = trace.where(trace.named(STEP))
    if not len(marks):
        return ()
    marks = marks.where(marks.events["rank"] == marks.events["rank"].min())
    inside = (marks.events["start_ns"] >= start) & (marks.events["start_ns"] < end)
    pairs = zip(marks.events["step"][inside].tolist(), (marks.events["start_ns"][inside] - start).tolist(), strict=True)
    return tuple(sorted(pairs, key=lambda pair: pair[1]))
