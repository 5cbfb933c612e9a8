"""Columns of a rank's rows while its trace is put together, and where its steps end.

Records become rows here: code to name and kind, the four numbers to the
columns that the vocabulary gives them, threads and processes to lanes.
Arrays are [n]; times int64 ns.

>>> RecordedRows.of(0, np.array([5, 1]), np.array([2, 9]), kind=0).by_end().start_ns.tolist()
[5, 1]

Forward and backward of every step as rows, from what the recorder left of them.

Use it while a rank's trace is put together. On the host's clock a backward is
recorded as it is and a forward derived: it reaches from the last thing that
comes before a forward (a batch, an update, the backward of the micro-batch
before, a save, a compilation) to the backward that follows. Where device
events timed a backward their rows stand, and the host's, which only show its
launch, go. Rows are bookkeeping: they own no time. Times in int64 ns.

>>> rows = RecordedRows.concat([RecordedRows.of(CODE["input.next"], np.array([0]), np.array([10]), kind=KIND["DATA"]),
...                     RecordedRows.of(BACKWARD, np.array([40]), np.array([20]), kind=KIND["MARK"])])
>>> found = with_forwards(rows)
>>> forward = found.where(found.name == FORWARD)
>>> forward.start_ns.tolist(), forward.duration_ns.tolist()
([10], [30])

Where steps end follows from the order of updates alone (`cycles`): a step ends when the first optimizer of its cycle
repeats, so step k reaches from the end of the last update of cycle k - 1 to the end of the last update of cycle k. An
update counts when a gradient was computed since that optimizer's last one. Times in ns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.trace.events.trace import COLUMNS
from headway.trace.events.vocabulary import BY_EVENTS, IN_BACKGROUND, KIND, SPANS
from headway.trace.rings.records import Recorded, RingHeader

Ints = NDArray[np.int64]

LONGEST_INNER = 16
"""Mean updates in a row up to which those of an inner loop belong to one step: longer runs are phases."""


def counted(optimizer: Ints, end_ns: Ints, gradient_ns: Ints) -> NDArray[np.bool_]:
    """Say of each update [n], in order of their ends, whether a gradient began since its optimizer's update before.

    `gradient_ns` [m], sorted, are the starts of backwards; without any, all count: gradients that nobody saw.

        gradients    g       g        g  g
        updates   A     A  A    B  A        A      A's first and third were given no new gradient
        counts    -     x  -    x  x        x

    >>> counted(np.array([0, 0, 0]), np.array([5, 15, 25]), np.array([3, 22])).tolist()
    [True, False, True]
    """
    if not len(gradient_ns):
        return np.ones(len(optimizer), bool)
    # Where the number of gradients has not grown since the update before, that one did not count either, or took
    # them: so each update is compared with its neighbour only.
    before = np.searchsorted(gradient_ns, end_ns)
    order = np.argsort(optimizer, kind="stable")
    found, of = before[order], optimizer[order]
    same = np.concatenate([[False], of[1:] == of[:-1]]) if len(of) else np.zeros(0, bool)
    grown = found > np.where(same, np.concatenate([[0], found[:-1]]) if len(found) else found, 0)
    counts = np.empty(len(optimizer), bool)
    counts[order] = grown
    return counts


def cycles(optimizer: Ints, loops: Mapping[int, int] | None = None) -> Ints:
    """Return the index of the last update of each complete cycle; `optimizer` [n] in order of time.

    When a phase ends, and its first optimizer never comes back, the updates
    beyond the longest cycle seen so far open a new phase. `loops` says in how
    many loops each optimizer's update stands: what an inner loop repeats
    before an update outside of it is one cycle (several critic updates for
    one of the generator).
    """
    kept = _without_inner(optimizer, loops or {})
    return kept[_cycles(optimizer[kept])]


def _without_inner(optimizer: Ints, loops: Mapping[int, int]) -> Ints:
    """Return the indices [m] of the updates without those that an inner loop repeats; of these the last ones stay.

    updates   d d d g d d d g        d in two loops, g in one
    stay          3 4     7 8 ...
    """
    n = len(optimizer)
    if not n or len(set(loops.values())) < 2:
        return np.arange(n)
    last = np.flatnonzero(np.concatenate([optimizer[1:] != optimizer[:-1], [True]]))
    of, lengths = optimizer[last], np.diff(last, prepend=-1)
    depth = np.array([loops.get(int(index), 0) for index in np.unique(of)])[np.searchsorted(np.unique(of), of)]
    inner = []
    for index in np.unique(of):
        runs = np.flatnonzero(of[:-1] == index)
        if len(runs) > 1 and (depth[runs + 1] < depth[runs]).all() and lengths[runs].mean() <= LONGEST_INNER:
            inner.append(index)
    stays = ~np.isin(optimizer, inner)
    stays[last] = True
    return np.flatnonzero(stays)


def _cycles(optimizer: Ints) -> Ints:
    n, start = len(optimizer), 0
    ends: list[Ints] = []
    longest = 0
    while start < n:
        heads = start + np.flatnonzero(optimizer[start:] == optimizer[start])
        lengths = np.diff(heads)
        if len(lengths):
            ends.append(heads[1:] - 1)
            longest = max(longest, int(lengths.max()))
        tail = n - int(heads[-1])
        # In a phase that has shown its cycle, an optimizer that was no part of it begins the next phase.
        foreign = ~np.isin(optimizer[heads[-1] :], optimizer[start : heads[-1]]) if len(lengths) else np.zeros(1, bool)
        own = int(foreign.argmax())
        if not 0 < own <= longest:
            own = _until_repeat(optimizer[heads[-1] :])
        if not len(lengths) and not ends:
            longest = own  # the only cycle there is
        if (tail <= longest and not foreign.any()) or own == tail:
            if tail >= (int(lengths[-1]) if len(lengths) else tail):
                ends.append(np.array([n - 1]))
            break
        ends.append(np.array([heads[-1] + own - 1]))
        start = int(heads[-1]) + own
    return np.concatenate(ends).astype(np.int64) if ends else np.empty(0, np.int64)


def _until_repeat(optimizer: Ints) -> int:
    """Return how many updates come before any optimizer of `optimizer` [n >= 1] is seen a second time."""
    size = 16  # looked through in doubling windows: a script with a new optimizer per task has very many phases
    while True:
        _, first = np.unique(optimizer[:size], return_index=True)
        repeats = np.ones(min(size, len(optimizer)), bool)
        repeats[first] = False
        if repeats.any():
            return int(repeats.argmax())
        if size >= len(optimizer):
            return len(optimizer)
        size *= 2


def step_of(moment_ns: Ints, bounds_ns: Ints) -> NDArray[np.int32]:
    """Return the step of each moment: -1 before step 0, the number of steps after the last.

    >>> step_of(np.array([3, 4, 22, 42]), np.array([4, 22, 42])).tolist()
    [-1, 0, 1, 2]
    """
    if not len(bounds_ns):
        return np.full(len(moment_ns), -1, np.int32)
    return (np.searchsorted(bounds_ns, moment_ns, side="right") - 1).astype(np.int32)


LOADER_LANE = "loader/"
"""Lanes of loader workers begin so; the worker's number follows."""

SAVER_LANE = "saver"
"""Lane of what is done for a rank's checkpoints in the background, whoever wrote it down."""

_NUMBERS = ("a", "b", "c", "d")
_BLANK = {
    "name": (np.int32, -1), "kind": (np.uint8, KIND["MARK"]), "lane": (np.int16, 0), "depth": (np.int16, 0),
    "step": (np.int32, -1), "start_ns": (np.int64, 0), "duration_ns": (np.int64, 0), "group": (np.int32, -1),
    "seq": (np.int64, -1), "peer": (np.int32, -1), "bytes": (np.int64, 0), "corr": (np.int64, -1),
    "process": (np.int64, -1),
    "cpu_ns": (np.int64, -1), "delay_ns": (np.int64, 0), "collate_ns": (np.int64, 0), "gc_ns": (np.int64, 0),
}  # fmt: skip
"""Column -> (dtype, value when nothing is known)."""


@dataclass(slots=True)
class RecordedRows:
    """Rows of one rank; all arrays have the same length and may be written to."""

    name: NDArray[Any]
    kind: NDArray[Any]
    lane: NDArray[Any]
    depth: NDArray[Any]
    step: NDArray[Any]
    start_ns: NDArray[Any]
    duration_ns: NDArray[Any]
    group: NDArray[Any]
    seq: NDArray[Any]
    peer: NDArray[Any]
    bytes: NDArray[Any]
    corr: NDArray[Any]
    process: NDArray[Any]
    """Process id: kept until the trace is complete."""
    cpu_ns: NDArray[Any]
    """Of a load: CPU time of its thread, -1 when it was not measured."""
    delay_ns: NDArray[Any]
    """Of a load: time its thread could run but had no core."""
    collate_ns: NDArray[Any]
    """Of a load: CPU time of collate, part of `cpu_ns`."""
    gc_ns: NDArray[Any]
    """Of a load: garbage collection, part of `cpu_ns`."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.start_ns)

    @classmethod
    def blank(cls, n: int) -> RecordedRows:
        """Return `n` rows of which nothing is known."""
        return cls(**{column: np.full(n, value, dtype) for column, (dtype, value) in _BLANK.items()})

    @classmethod
    def of(
        cls, name: int, start_ns: NDArray[Any], duration_ns: NDArray[Any], *, kind: int, **more: NDArray[Any]
    ) -> RecordedRows:
        """Return rows of one name and kind."""
        rows = cls.blank(len(start_ns))
        rows.name[:], rows.kind[:] = name, kind
        rows.start_ns[:], rows.duration_ns[:] = start_ns, duration_ns
        for column, values in more.items():
            getattr(rows, column)[:] = values
        return rows

    @classmethod
    def concat(cls, parts: Sequence[RecordedRows]) -> RecordedRows:
        """Put `parts` one behind the other."""
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in _BLANK})

    def where(self, mask: NDArray[Any]) -> RecordedRows:
        """Return the rows that `mask` (bool [n] or indices) picks."""
        return RecordedRows(**{name: getattr(self, name)[mask] for name in _BLANK})

    def by_end(self) -> RecordedRows:
        """Return the rows in the order in which they ended."""
        return self.where(np.argsort(self.start_ns + self.duration_ns, kind="stable"))

    def columns(self, order: NDArray[Any], *, rank: int) -> Mapping[str, NDArray[Any]]:
        """Return the trace columns in `order`, all of rank `rank`."""
        found = {name: getattr(self, name)[order] for name in _BLANK if name in COLUMNS}
        return {**found, "rank": np.full(len(order), rank, np.int32)}


def lane_name(header: RingHeader, thread: int, *, leads: bool, training: int = 0) -> str:
    """Return the lane of thread `thread` (0 = the process's first) of the process of `header`.

    In the process that leads, thread `training` is lane 'main'.
    """
    names = header.threads
    suffix = "MainThread" if thread == 0 else names[thread - 1] if thread <= len(names) else f"{thread}"
    if leads:
        return "main" if thread == training else f"thread/{suffix}"
    base = f"{LOADER_LANE}{header.worker}" if header.role == "loader" else f"process/{header.pid}"
    return base if thread == 0 else f"{base}/{suffix}"


def training_thread(records: NDArray[np.void]) -> int:
    """Return the thread that trains: the first one, unless only others make updates, or without any, gradients.

    Where nothing was trained it is the thread that computed forwards.
    """
    for name in ("optimizer.step", "segment.backward", "segment.grad", "forward"):
        lanes, counts = np.unique(records["lane"][records["code"] == SPANS[name].code], return_counts=True)
        if len(lanes):
            return 0 if lanes[0] == 0 else int(lanes[counts.argmax()])
    return 0


def raw_rows(process: Recorded, lanes: list[str], *, leads: bool) -> RecordedRows:
    """Return the records of one process as rows; new lanes are added to `lanes`."""
    records = process.records
    rows = named_rows(records)
    rows.process[:] = process.header.pid
    training = training_thread(records) if leads else 0
    for thread in np.unique(records["lane"]):
        name = lane_name(process.header, int(thread), leads=leads, training=training)
        if name not in lanes:
            lanes.append(name)
        rows.lane[records["lane"] == thread] = lanes.index(name)
    _attach_parts(rows, records)
    behind = np.isin(records["code"], [SPANS[name].code for name in IN_BACKGROUND])
    if behind.any():
        if SAVER_LANE not in lanes:
            lanes.append(SAVER_LANE)
        rows.lane[behind] = lanes.index(SAVER_LANE)
    if leads:
        # On a device the hooks of backward run in autograd's thread, while the training thread waits for it.
        rows.lane[records["code"] == SPANS["comm.wait"].code] = lanes.index("main")
    rows = RecordedRows.concat([rows, _carried_backwards(rows, records)])
    return rows.where(rows.name >= 0)


def named_rows(records: NDArray[np.void]) -> RecordedRows:
    """Return records as rows with names, kinds and columns; lanes, processes and parts of loads are left blank."""
    rows = RecordedRows.blank(len(records))
    rows.start_ns[:] = records["start_ns"]
    rows.duration_ns[:] = np.maximum(records["duration_ns"], 0)
    present = set(np.unique(records["code"]).tolist())
    for index, span in enumerate(SPANS.values()):
        if span.code not in present:
            continue
        mask = records["code"] == span.code
        rows.name[mask], rows.kind[mask] = index, KIND[span.kind]
        for number, column in zip(_NUMBERS, span.columns, strict=False):
            if column:
                getattr(rows, column)[mask] = records[number][mask]
    return rows


def with_backwards(records: NDArray[np.void]) -> RecordedRows:
    """Return the records of one training thread as rows, with the backwards that updates carry."""
    rows = named_rows(records)
    rows = RecordedRows.concat([rows, _carried_backwards(rows, records)])
    return rows.where(rows.name >= 0)


def _carried_backwards(rows: RecordedRows, records: NDArray[np.void]) -> RecordedRows:
    """Return the backwards that optimizer records carry as their third and fourth number."""
    at = np.flatnonzero((records["code"] == SPANS["optimizer.step"].code) & (records["d"] > 0))
    found = rows.where(at)
    found.name[:], found.kind[:] = list(SPANS).index("segment.backward"), KIND["MARK"]
    found.start_ns[:], found.duration_ns[:] = records["c"][at], records["d"][at]
    found.corr[:], found.seq[:] = 0, -1
    return found


def _attach_parts(rows: RecordedRows, records: NDArray[np.void]) -> None:
    """Give each load (or batch made elsewhere) the measurements in the `input.parts` that follows it in its thread."""
    at = np.flatnonzero(records["code"] == SPANS["input.parts"].code)
    if not len(at):
        return
    loads = np.flatnonzero(np.isin(records["code"], [SPANS["input.load"].code, SPANS["input.made"].code]))
    # An `input.parts` carries the start and the lane of its load. The clip only keeps the look-up inside the array:
    # what has no load of equal start and lane is dropped by `same`.
    key = _key(records, loads)
    order = np.argsort(key, kind="stable")
    found = np.searchsorted(key[order], _key(records, at))
    found = np.minimum(found, max(len(order) - 1, 0))
    if not len(order):
        return
    target = loads[order[found]]
    same = (records["start_ns"][target] == records["start_ns"][at]) & (records["lane"][target] == records["lane"][at])
    target, at = target[same], at[same]
    rows.cpu_ns[target] = records["a"][at]
    rows.delay_ns[target] = records["b"][at]
    rows.collate_ns[target] = records["c"][at]
    rows.gc_ns[target] = records["d"][at]


def _key(records: NDArray[np.void], at: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return one number for the start and the lane (16 bits) of each record, as far as it matters for a look-up.

    The upper bits of the start are lost, so that two loads have one number only if they start 2^48 ns (3 days) apart.
    """
    keys: NDArray[np.int64] = (records["start_ns"][at] << 16) | records["lane"][at]
    return keys


CODE = {name: index for index, name in enumerate(SPANS)}
"""Name -> its index in the name table of recorded traces."""

FORWARD, BACKWARD, REGION = CODE["segment.forward"], CODE["segment.backward"], CODE["region"]
TIMED = [CODE[name] for name in BY_EVENTS]

BEFORE_FORWARD = [
    CODE[name] for name in SPANS
    if name in ("input.next", "input.iter", "optimizer.step", "comm.init", "host.compile", "host.import", "pause")
    or name.startswith("checkpoint.")
]  # fmt: skip
"""Names whose end may be the beginning of a forward."""

ON_DEVICE = 1
"""`corr` of a segment that device events timed."""


def with_forwards(main: RecordedRows) -> RecordedRows:
    """Return the segment rows of the training lane: outermost backwards and their forwards, or those of the device.

    `main` holds the rows of the training thread, in any order.
    """
    raw = main.where((main.name == FORWARD) | (main.name == BACKWARD))
    timed = raw.corr == ON_DEVICE
    on_device = raw.where(timed)
    backward = outermost(raw.where(~timed))
    backward = backward.where(~_launched_in(backward, on_device.where(on_device.name == BACKWARD)))
    before = main.where(np.isin(main.name, BEFORE_FORWARD))
    ends = np.sort(np.concatenate([before.start_ns + before.duration_ns, backward.start_ns + backward.duration_ns]))
    at = np.searchsorted(ends, backward.start_ns, side="right")
    known = at > 0
    start = ends[at[known] - 1] if known.any() else backward.start_ns[known]
    forward = RecordedRows.of(FORWARD, start, backward.start_ns[known] - start, kind=KIND["MARK"])
    for rows in (forward, backward):
        rows.corr[:], rows.seq[:], rows.peer[:] = 0, -1, -1
    return RecordedRows.concat([on_device, forward, backward])


def _launched_in(host: RecordedRows, on_device: RecordedRows) -> NDArray[np.bool_]:
    """Return [n] whether device events timed each backward of the host: theirs were recorded at its end."""
    found = np.zeros(len(host), bool)
    if len(host) and len(on_device):
        at = np.searchsorted(host.start_ns, on_device.seq, side="right") - 1
        found[at[at >= 0]] = True
    return found


def outermost(rows: RecordedRows) -> RecordedRows:
    """Return the rows that do not lie inside another one, in order of start: a backward may run others inside."""
    rows = rows.where(np.lexsort((-rows.duration_ns, rows.start_ns)))
    end = rows.start_ns + rows.duration_ns
    reach = np.concatenate([[np.iinfo(np.int64).min], np.maximum.accumulate(end)[:-1]]) if len(rows) else end
    return rows.where(end > reach)


def place(rows: RecordedRows, bounds_ns: NDArray[np.int64]) -> None:
    """Give segments their number within the step, and what a device did later the step that launched it.

    `rows` have their steps by their own start already; changes them.
    """
    segment = (rows.name == FORWARD) | (rows.name == BACKWARD)
    worked = np.flatnonzero(np.isin(rows.name, TIMED))
    # Of what a device did, `seq` is the host's moment of launch until here: the step is that of the launch.
    rows.step[worked] = step_of(rows.seq[worked], bounds_ns)
    rows.seq[worked] = rows.start_ns[worked] + rows.duration_ns[worked] - rows.seq[worked]
    late = np.flatnonzero((rows.seq >= 0) & (segment | (rows.name == REGION)))
    rows.step[late] = step_of(rows.seq[late], bounds_ns)
    rows.seq[late] = ON_DEVICE
    for name in (FORWARD, BACKWARD):
        own = np.flatnonzero(rows.name == name)
        own = own[np.lexsort((rows.start_ns[own], rows.step[own]))]
        step = rows.step[own]
        # Number within the step = position in this order less the position of the step's first row.
        first = np.flatnonzero(np.concatenate([[True], step[1:] != step[:-1]])) if len(own) else own
        rows.seq[own] = np.arange(len(own)) - np.repeat(first, np.diff(np.append(first, len(own))))
