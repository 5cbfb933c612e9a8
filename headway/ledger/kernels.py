"""The ledger of a profiler trace: who owned each device, nanosecond by nanosecond.

On a device a compute kernel on any stream owns the time, else a
communication kernel (up to the last rank's kernel it is `straggler`), else a
copy, else what the launching threads were doing then (a launch gap is
`host.launch`), else it was idle. Without device rows the training thread is
the device. Every rank is accounted for the longest window of all.

>>> from headway.trace.trace import Trace
>>> trace = Trace.from_columns({"start_ns": [0, 10], "duration_ns": [10, 30], "kind": [0, 4], "lane": [1, 0],
...                             "rank": [0, 0]}, name=[0, 0], names=["k"], lanes=["main", "stream 7"])
>>> account = profile_account(trace)
>>> account.wall_ns, account.sub_ns[0][[SUB_CODE["useful.compute"], SUB_CODE["host.launch"]]].tolist()
(40, [10, 30])
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.ledger.account import Account, SpanFacts, blank_subs
from headway.ledger.arrivals import Lateness, last_arrivals
from headway.ledger.buckets import BUCKETS, SUB_CODE
from headway.trace.nesting import number_alike
from headway.trace.sweep import Ints, Pieces, sweep
from headway.trace.trace import Trace
from headway.trace.vocabulary import KIND

DEVICE_LANE = re.compile(r"(?:device (?P<device>\S+) )?stream (?P<stream>.+)")

DRAWN_LANES = re.compile(r"profiler|overhead|(device \S+ )?(annotation|sync) ")
"""Lanes that the profiler draws over others."""

COMPUTE_OWNS, COMM_OWNS, COPY_OWNS, INPUT_OWNS, HOST_COMM_OWNS, HOST_OWNS, STEP_OWNS = 70, 60, 50, 40, 30, 20, 10
"""Precedence: what owns a device's time on overlap."""

COPIES: tuple[tuple[str, str, int], ...] = (
    (r"Mem(cpy|Cpy)?.*(DtoD|Device -> Device)", "useful.compute", COMPUTE_OWNS),
    (r"Mem.*(PtoP|Peer)", "comm.p2p", COMM_OWNS - 1),
    (r"Mem.*(DtoH|Device -> Pa?g)", "host.copy", COPY_OWNS - 1),
    (r".*", "input.transfer", COPY_OWNS),
)
"""Beginning of a copy's name -> what it is for: inside a device it is computing, towards it input, back a read-back."""

MOVING = (KIND["COLL"], KIND["SEND"], KIND["RECV"])

KERNEL_NAMES: dict[str, tuple[int, ...]] = {
    "kernel.compute": (KIND["COMPUTE"],),
    "kernel.comm": MOVING,
    "kernel.copy": (KIND["DATA"],),
}
"""Name of a total of device rows -> their kinds."""


@dataclass(frozen=True, slots=True)
class DeviceBook:
    """The time of one device inside its own window."""

    rank: int
    """Rank of the process that used the device."""
    device: str
    """Device number in the file, '' when there is only one."""
    pieces: Pieces
    """Who owned what; `row` indexes the trace."""
    sub: Ints
    """[m] Sub-line code of each piece."""
    open: NDArray[np.bool_]
    """[m] Pieces owned by a communication kernel, which `arrivals` may split."""


def profile_account(trace: Trace) -> Account:
    """Account for profiler traces of one or several ranks.

    Raises `InputError` when no row of them is work of a thread or a device.
    """
    books = device_books(trace)
    if not books:
        raise InputError("the trace holds only marks that the profiler drew. Record operators or kernels as well.")
    wall_ns = max(int(book.pieces.duration_ns.sum()) for book in books)
    amounts, lateness = settle_kernels(trace, books)
    for book, row in zip(books, amounts, strict=True):
        row[SUB_CODE["unknown.cut_short"]] += wall_ns - int(book.pieces.duration_ns.sum())
    numbers = [book.rank for book in books]
    if len(set(numbers)) < len(numbers):  # Several devices in one process: number the devices, not the ranks.
        numbers = list(range(len(books)))
    on_device = any(_device_of(trace.lanes[lane]) is not None for lane in np.unique(trace.events["lane"]).tolist())
    steps = np.unique(trace.events["step"])
    basis = dict.fromkeys(BUCKETS, "kernels" if on_device else "recorded")
    return Account(
        wall_ns=wall_ns,
        sub_ns=dict(zip(numbers, amounts, strict=True)),
        steps=int((steps >= 0).sum()),
        basis=basis if on_device else {**basis, "useful": "remainder"},
        step_wall_ns=_step_walls(trace),
        lateness=lateness,
        spans=kernel_facts(trace) if on_device else {},
        meta=trace.meta,
        hosts={rank: str(row["host"]) for rank, row in trace.ranks.items() if row.get("host")},
    )


def _device_of(lane: str) -> str | None:
    """Return the device of a lane, None for a host lane."""
    match = DEVICE_LANE.fullmatch(lane)
    return (match["device"] or "") if match else None


def device_books(trace: Trace) -> list[DeviceBook]:
    """Sweep every device of every rank over the rank's own window."""
    events = trace.events
    drawn = np.array([bool(DRAWN_LANES.match(lane)) for lane in trace.lanes] + [False])
    device = [_device_of(lane) for lane in trace.lanes]
    sub, precedence = _owners(trace, device)
    books = []
    for rank in np.unique(events["rank"]).tolist():
        mine = np.flatnonzero((events["rank"] == rank) & ~drawn[events["lane"]])
        if not len(mine):
            continue
        start, end = events["start_ns"][mine], (events["start_ns"] + events["duration_ns"])[mine]
        window = (int(start.min()), int(end.max()))
        used = sorted({device[lane] or "" for lane in np.unique(events["lane"][mine]) if device[lane] is not None})
        for number in used or [""]:
            theirs = np.array([name is None or name == number for name in device])[events["lane"][mine]]
            rows = mine[theirs & (precedence[mine] > 0)]
            ends = events["start_ns"][rows] + events["duration_ns"][rows]
            found = sweep(events["start_ns"][rows], ends, precedence[rows], window=window)
            owner = np.append(rows, -1)[found.row]
            rest = SUB_CODE["idle.device" if used else "unknown.model"]
            code = np.where(owner >= 0, sub[owner], rest)
            moving = (owner >= 0) & np.isin(precedence[owner], [COMM_OWNS, HOST_COMM_OWNS])
            books.append(DeviceBook(rank, number, Pieces(found.start_ns, found.end_ns, owner), code, moving))
    return books


def _owners(trace: Trace, device: Sequence[str | None]) -> tuple[Ints, Ints]:
    """Return each row's sub-line code and precedence; precedence 0 = it owns nothing."""
    events = trace.events
    kind, lane = events["kind"], events["lane"]
    on_device = np.array([name is not None for name in device])[lane]
    on_main = np.array([name == "main" for name in trace.lanes])[lane]
    any_device = bool(on_device.any())
    sub, precedence = np.zeros(len(trace), np.int64), np.zeros(len(trace), np.int64)

    def own(mask: NDArray[np.bool_], line: str, level: int) -> None:
        sub[mask], precedence[mask] = SUB_CODE[line], level

    drawn = np.array([bool(DRAWN_LANES.match(name)) for name in trace.lanes])[lane]
    host = ~on_device & ~drawn & (on_main | any_device)
    step_names = np.array([name.startswith("ProfilerStep") for name in trace.names] + [False])[events["name"]]
    own(host & step_names, "host.launch" if any_device else "useful.compute", STEP_OWNS)
    own(host & (kind != KIND["MARK"]), "host.launch" if any_device else "useful.compute", HOST_OWNS)
    if not any_device:
        own(on_main & (kind == KIND["OPTIM"]), "useful.optimizer", HOST_OWNS + 1)
    own(on_main & ~on_device & np.isin(kind, MOVING), "comm.collective", HOST_COMM_OWNS)
    own(on_main & ~on_device & (kind == KIND["DATA"]), "input.unsplit", INPUT_OWNS)
    own(on_device & (kind == KIND["COMPUTE"]), "useful.compute", COMPUTE_OWNS)
    own(on_device & (kind == KIND["COLL"]), "comm.exposed", COMM_OWNS)
    own(on_device & np.isin(kind, [KIND["SEND"], KIND["RECV"]]), "comm.p2p", COMM_OWNS - 1)
    _own_copies(trace, on_device & (kind == KIND["DATA"]), sub, precedence)
    return sub, precedence


def _own_copies(trace: Trace, copies: NDArray[np.bool_], sub: Ints, precedence: Ints) -> None:
    """Fill in what each copy is for, by its name."""
    rows = np.flatnonzero(copies)
    for code in np.unique(trace.events["name"][rows]).tolist():
        name = trace.names[code] if code >= 0 else ""
        line, level = next((line, level) for pattern, line, level in COPIES if re.match(pattern, name))
        mine = rows[trace.events["name"][rows] == code]
        sub[mine], precedence[mine] = SUB_CODE[line], level


def settle_kernels(trace: Trace, books: Sequence[DeviceBook]) -> tuple[list[Ints], Lateness]:
    """Sum each device's pieces [len(SUBS)]; what was waiting for the last rank's kernel is `straggler.device`."""
    late, lateness = lateness_of(trace, books)
    amounts = []
    for book, waited in zip(books, late, strict=True):
        row = blank_subs()
        np.add.at(row, book.sub, book.pieces.duration_ns - waited)
        row[SUB_CODE["straggler.device"]] += waited.sum()
        amounts.append(row)
    return amounts, lateness


def lateness_of(trace: Trace, books: Sequence[DeviceBook]) -> tuple[list[Ints], Lateness]:
    """Return for each piece of each device the ns, from its start, before the last rank's kernel had begun."""
    calls = np.unique(np.concatenate([book.pieces.row[book.open] for book in books]))
    rank = trace.events["rank"][calls].astype(np.int64)
    key, shift = _meetings(trace, calls, rank)
    met = last_arrivals(key, rank, trace.events["start_ns"][calls] - shift)
    parts: list[Ints] = []
    blamed: dict[int, dict[str, int]] = {}
    for book in books:
        length = book.pieces.duration_ns
        waited = np.zeros(len(length), np.int64)
        call = np.searchsorted(calls, book.pieces.row[book.open])
        begin = book.pieces.start_ns[book.open] - shift[call]
        waited[book.open] = np.clip(met.arrival_ns[call] - begin, 0, length[book.open])
        culprit = rank[met.last[call]]
        for value in np.unique(culprit[waited[book.open] > 0]).tolist():
            row = blamed.setdefault(value, {"useful": 0})
            row["useful"] += int(waited[book.open][culprit == value].sum())
        parts.append(waited)
    final = np.flatnonzero((np.bincount(met.last, minlength=len(calls)) > 1) & (met.margin_ns > 0))
    times = {value: int((rank[final] == value).sum()) for value in np.unique(rank).tolist()}
    margins = {v: int(np.median(met.margin_ns[final[rank[final] == v]])) for v, count in times.items() if count}
    return parts, Lateness(blamed, times, margins, int((np.bincount(met.last, minlength=len(calls)) > 1).sum()))


def _meetings(trace: Trace, calls: Ints, rank: Ints) -> tuple[Ints, Ints]:
    """Return for each collective kernel the key of its meeting (-1 = unknown) and its rank's clock shift in ns.

    Kernels meet by (group, sequence number), or by their order in the group where the profiler wrote no number and
    every rank shows equally many. Clocks are set so that matched kernels end together, as collectives do.
    """
    key, shift = np.full(len(calls), -1, np.int64), np.zeros(len(calls), np.int64)
    events = trace.events
    ranks = np.unique(rank).tolist()
    if len(ranks) < 2:
        return key, shift
    group, seq = events["group"][calls].astype(np.int64), events["seq"][calls]
    start = events["start_ns"][calls]
    identity = np.stack([group, np.where(seq >= 0, seq, -1)], axis=1)
    order = np.lexsort((start, rank, identity[:, 1], identity[:, 0]))
    code = number_alike(np.column_stack([identity, rank]))
    begin = np.searchsorted(code[order], code[order])
    nth = np.empty(len(calls), np.int64)
    nth[order] = np.arange(len(calls)) - begin
    meeting = number_alike(np.column_stack([identity, nth]))
    fair = (seq >= 0) | np.isin(group, [value for value in np.unique(group) if _even(rank[group == value])])
    known = fair & (group >= 0)
    key[known] = meeting[known]
    end = start + events["duration_ns"][calls]
    lead = np.flatnonzero((rank == ranks[0]) & known)
    reference = dict(zip(key[lead].tolist(), end[lead].tolist(), strict=True))
    for other in ranks[1:]:
        mine = np.flatnonzero((rank == other) & known)
        ahead = [int(end[i]) - reference[int(key[i])] for i in mine if int(key[i]) in reference]
        if ahead:
            shift[rank == other] = int(np.median(ahead))
        else:
            key[rank == other] = -1
    return key, shift


def kernel_facts(trace: Trace) -> dict[str, SpanFacts]:
    """Total the rows on device lanes by what they do: 'kernel.compute', 'kernel.comm', 'kernel.copy'."""
    events = trace.events
    on_device = np.array([_device_of(name) is not None for name in trace.lanes])[events["lane"]]
    facts = {}
    for name, kinds in KERNEL_NAMES.items():
        rows = on_device & np.isin(events["kind"], kinds)
        duration = events["duration_ns"][rows]
        longest = int(duration.max()) if len(duration) else 0
        facts[name] = SpanFacts(len(duration), int(duration.sum()), longest, int(events["bytes"][rows].sum()))
    return facts


def _even(rank: Ints) -> bool:
    """Return whether every rank that occurs does so equally often."""
    return len(set(np.unique(rank, return_counts=True)[1].tolist())) == 1


def _step_walls(trace: Trace) -> Ints:
    """Return the mean wall over ranks of each ProfilerStep, in order of step."""
    events = trace.events
    names = np.array([name.startswith("ProfilerStep#") for name in trace.names] + [False])
    lanes = np.array([not DRAWN_LANES.match(name) and _device_of(name) is None for name in trace.lanes])
    rows = np.flatnonzero(names[events["name"]] & lanes[events["lane"]] & (events["step"] >= 0))
    steps = np.unique(events["step"][rows])
    walls = [int(events["duration_ns"][rows[events["step"][rows] == step]].mean()) for step in steps]
    return np.array(walls, np.int64)
