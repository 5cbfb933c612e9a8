"""What one load of a batch consists of: blocked, waiting for a core, preparing, collating.

A load's thread CPU time and run delay are measured, so four durations are
known and their order is fixed by convention: fetch, cpu_wait, prep, collate.
They partition the load, garbage collections inside it left out: those have
rows of their own. Times in int64 ns.

A batch that threads of the rank made, or a data server, is one load too: its
parts are summed over all who worked on it, and it ends when it was complete.
So it may have begun later than its row does.

>>> LoadParts.shares(np.array([100]), np.array([60]), np.array([10]), np.array([20]), np.array([0])).tolist()
[[0.3, 0.1, 0.4, 0.2]]

What loaders say beside their spans: audit rows, of which few are enough, and counts, which add up over ranks.

Every batch taken leaves a row with the sum so far. All of them matter while
the rank may be killed, a few when it has ended: the beginning of a pass, its
last row, and one in `EVERY` between, at which pieces of interrupted runs are
cut. `headway.data.loader.audit` reads what is kept.

>>> len(thinned(RecordedRows.blank(3)))
3
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.trace.events.vocabulary import KIND, SPANS
from headway.trace.recording.rows import LOADER_LANE, RecordedRows

CHILDREN = ("input.fetch", "input.cpu_wait", "input.prep", "input.collate")
_INDEX = {name: index for index, name in enumerate(SPANS)}
SHORT_NS = 200_000
"""Loads in the main process below this are measured one in sixteen; the others get the measured ones' shares."""


class LoadParts:
    """The arithmetic of a load's parts; all arrays [n] int64 ns."""

    @staticmethod
    def parts_of(
        duration_ns: NDArray[np.int64],
        cpu_ns: NDArray[np.int64],
        delay_ns: NDArray[np.int64],
        collate_ns: NDArray[np.int64],
        gc_ns: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return (fetch, cpu_wait, prep, collate); with the GC they add up to the duration, clocks' grain clipped."""
        # Each is clipped to what the ones before it leave, so that the parts add up whatever the clocks said:
        #
        #     duration   | fetch | delay |           cpu           |
        #     cpu                        | prep | collate |   gc   |
        gc = np.clip(gc_ns, 0, duration_ns)
        cpu = np.clip(cpu_ns, gc, duration_ns)
        delay = np.clip(delay_ns, 0, duration_ns - cpu)
        collate = np.clip(collate_ns, 0, cpu - gc)
        return duration_ns - cpu - delay, delay, cpu - gc - collate, collate

    @staticmethod
    def shares(
        duration_ns: NDArray[np.int64],
        cpu_ns: NDArray[np.int64],
        delay_ns: NDArray[np.int64],
        collate_ns: NDArray[np.int64],
        gc_ns: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Return [1, 4]: each part's share of all the loads together; all prep when there is nothing to go by."""
        totals = np.array([
            part.sum() for part in LoadParts.parts_of(duration_ns, cpu_ns, delay_ns, collate_ns, gc_ns)
        ], dtype=np.float64)  # fmt: skip
        if not totals.sum():
            return np.array([[0.0, 0.0, 1.0, 0.0]])
        shares: NDArray[np.float64] = totals[None, :] / totals.sum()
        return shares


def load_children(rows: RecordedRows) -> RecordedRows:
    """Return the children of every load in `rows` (one process), laid out in order from the load's start."""
    loads = rows.where(rows.name == _INDEX["input.load"])
    if not len(loads):
        return RecordedRows.blank(0)
    parts = np.stack(
        LoadParts.parts_of(loads.duration_ns, loads.cpu_ns, loads.delay_ns, loads.collate_ns, loads.gc_ns), axis=1
    )
    _estimate(loads, parts)
    ends = np.cumsum(parts, axis=1)
    starts = loads.start_ns[:, None] + ends - parts
    children = RecordedRows.concat([_child(loads, name, starts[:, k], parts[:, k]) for k, name in enumerate(CHILDREN)])
    children = _around_collections(rows, loads, children)
    return children.where(children.duration_ns > 0)


def _estimate(loads: RecordedRows, parts: NDArray[np.int64]) -> None:
    """Fill `parts` [n, 4] of the loads that were not measured with the shares of comparable ones that were."""
    unmeasured = loads.cpu_ns < 0
    if not unmeasured.any():
        return
    measured = ~unmeasured & (loads.duration_ns <= SHORT_NS)
    if not measured.any():
        measured = ~unmeasured
    known = loads.where(measured)
    share = LoadParts.shares(known.duration_ns, known.cpu_ns, known.delay_ns, known.collate_ns, known.gc_ns)
    duration = loads.duration_ns[unmeasured]
    estimate = np.floor(duration[:, None] * share).astype(np.int64)
    estimate[:, 2] += duration - estimate.sum(axis=1)
    parts[unmeasured] = estimate


def _child(loads: RecordedRows, name: str, start_ns: NDArray[np.int64], duration_ns: NDArray[np.int64]) -> RecordedRows:
    child = loads.where(np.arange(len(loads)))
    child.name[:], child.kind[:] = _INDEX[name], KIND[SPANS[name].kind]
    child.start_ns[:], child.duration_ns[:], child.bytes[:] = start_ns, duration_ns, 0
    return child


def _around_collections(rows: RecordedRows, loads: RecordedRows, children: RecordedRows) -> RecordedRows:
    """Move the children of loads with collections inside so that they leave the collections' time free.

    A child that reaches into a collection is cut there and goes on behind it.
    """
    collections = rows.where(rows.name == _INDEX["host.gc"])
    touched = np.flatnonzero(loads.gc_ns > 0)
    if not len(touched) or not len(collections):
        return children
    gc_start, gc_end = collections.start_ns, collections.start_ns + collections.duration_ns
    order = np.argsort(gc_start, kind="stable")
    gc_start, gc_end = gc_start[order], gc_end[order]
    keep = np.ones(len(children), bool)
    laid: list[tuple[int, int, int]] = []
    own = len(loads) * np.arange(len(CHILDREN))
    for load in touched.tolist():
        begin = int(loads.start_ns[load])
        end = begin + int(loads.duration_ns[load])
        first, last = np.searchsorted(gc_start, [begin, end])
        if first == last:
            continue
        keep[own + load] = False
        free = _free(begin, end, gc_start[first:last], gc_end[first:last])
        laid += _lay((own + load).tolist(), children.duration_ns[own + load].tolist(), free)
    index, start, duration = np.array(laid, np.int64).reshape(-1, 3).T
    moved = children.where(index)
    moved.start_ns[:], moved.duration_ns[:] = start, duration
    return RecordedRows.concat([children.where(keep), moved])


def _free(begin: int, end: int, gc_start: NDArray[np.int64], gc_end: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the stretches of [begin, end) outside the collections."""
    free, at = [], begin
    for start, stop in zip(gc_start.tolist(), gc_end.tolist(), strict=True):
        if start > at:
            free.append((at, min(start, end)))
        at = max(at, stop)
    if at < end:
        free.append((at, end))
    return free


def _lay(children: list[int], durations_ns: list[int], free: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Lay the children one after the other into the free stretches: (child, start, duration); the rest is cut off."""
    laid = []
    stretches = list(free)
    for child, duration_ns in zip(children, durations_ns, strict=True):
        left = duration_ns
        while left > 0 and stretches:
            start, stop = stretches.pop(0)
            used = min(left, stop - start)
            laid.append((child, start, used))
            left -= used
            if start + used < stop:
                stretches.insert(0, (start + used, stop))
    return laid


def name_workers(parts: list[RecordedRows], lead: RecordedRows) -> None:
    """Give the loads in loader workers their iterator (corr) and loader (group).

    A worker knows only the n-th life of its dataset; the n-th `input.worker`
    row of its pid, written by the main process, names iterator and loader.
    """
    made = lead.where(lead.name == _INDEX["input.worker"])
    for part in parts:
        loads = np.flatnonzero(part.name == _INDEX["input.load"])
        if part is lead or not len(loads):
            continue
        lives = made.where(made.seq == part.process[0])
        lives = lives.where(np.argsort(lives.start_ns, kind="stable"))
        if not len(lives):
            part.group[loads] = -1
            continue
        life = np.clip(part.group[loads], 0, len(lives) - 1)
        part.corr[loads], part.group[loads] = lives.corr[life], lives.group[life]


def place_made(rows: RecordedRows, lanes: list[str]) -> RecordedRows:
    """Return `rows` (one process, in the order of its records) with each `input.made` as the load that it stands for.

    The call that took the batch wrote its `input.next` right behind it, which
    names loader and pass. Batch b of a pass for which W threads work counts as
    the (b // W)-th load of worker b mod W, on a lane of that worker; the call
    and the creation of the iterator are told so too, as if workers were processes.
    """
    made = np.flatnonzero(rows.name == _INDEX["input.made"])
    if not len(made):
        return rows
    workers = np.maximum(rows.peer[made], 1).astype(np.int64)
    batch = rows.seq[made].copy()
    worker = batch % workers
    rows.name[made], rows.peer[made], rows.seq[made] = _INDEX["input.load"], worker, batch // workers
    call = _next_call(rows, made)
    known = call >= 0
    known[known] = rows.seq[call[known]] == batch[known]
    taken, call = made[known], call[known]
    rows.group[taken], rows.corr[taken] = rows.group[call], rows.corr[call]
    rows.peer[call] = worker[known]
    created = rows.name == _INDEX["input.iter"]
    for corr, count in dict(zip(rows.corr[call].tolist(), workers[known].tolist(), strict=True)).items():
        rows.peer[created & (rows.corr == corr)] = count
    for number in np.unique(worker).tolist():
        name = f"{LOADER_LANE}{number}"
        if name not in lanes:
            lanes.append(name)
        rows.lane[made[worker == number]] = lanes.index(name)
    # Their spans may overlap on a lane, each is a sum: as processes of their own they nest on their own.
    rows.process[made] = -2 - np.arange(len(made))
    return rows


def _next_call(rows: RecordedRows, made: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first `input.next` behind each of `made` in its own lane, -1 for none."""
    found = np.full(len(made), -1, np.int64)
    for lane in np.unique(rows.lane[made]):
        calls = np.flatnonzero((rows.name == _INDEX["input.next"]) & (rows.lane == lane))
        mine = np.flatnonzero(rows.lane[made] == lane)
        place = np.searchsorted(calls, made[mine])
        inside = place < len(calls)
        found[mine[inside]] = calls[place[inside]]
    return found


# What loaders say beside their spans: audit rows, of which few are enough, and counts, which add up over ranks.

EVERY = 64
"""Of a pass's rows one in this many is kept."""

_AUDIT = list(SPANS).index("input.audit")


def thinned(rows: RecordedRows) -> RecordedRows:
    """Return the rows of one process, in the order of its records, with few audit rows."""
    notes = np.flatnonzero((rows.name == _AUDIT) & (rows.seq >= 0))
    keep = np.ones(len(rows), bool)
    for number in np.unique(rows.peer[notes]):
        own = notes[rows.peer[notes] == number]
        at = np.arange(1, len(own) + 1)
        keep[own] = (at % EVERY == 0) | (at == len(own))  # one in `EVERY`, and the last
    return rows.where(keep)


def counts_of(ranks: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the input counts of some ranks together: name -> number by key. `ranks` are entries of `Trace.ranks`.

    >>> counts_of([{"input": {"cache": {"hits": 2}}}, {}, {"input": {"cache": {"hits": 3}}}])
    {'cache': {'hits': 5}}
    """
    found: dict[str, Counter[str]] = {}
    for facts in ranks:
        for name, numbers in (facts.get("input") or {}).items():
            found.setdefault(name, Counter()).update(numbers)
    return {name: dict(numbers) for name, numbers in found.items()}
