"""The ledger of a profiler trace: who owned each device, nanosecond by nanosecond.

On a device a compute kernel on any stream owns the time, else a
communication kernel (up to the last rank's kernel it is `straggler`; a send or
receive up to its peer's kernel is `bubble`), else a copy, else what the
launching threads were doing then (a launch gap is `host.launch`), else it was
idle. Without device rows the training thread is the device. Every rank is
accounted for the longest window of all.

>>> from headway.trace.events.trace import Trace
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
from headway.core.integers import narrowed
from headway.ledger.booking.account import Account, KernelTimes, SpanFacts, blank_subs
from headway.ledger.booking.arrivals import RankLateness, last_arrivals, meetings
from headway.ledger.buckets import BUCKETS, SUB_CODE, SUBS
from headway.ledger.runs.kernel_messages import KernelMessages, peers_begun
from headway.trace.events.intervals import Ints, Pieces, sweep
from headway.trace.events.parts import Parts
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND, MOVING
from headway.trace.profiler.kineto_names import LAUNCHING
from headway.trace.recording.run_facts import RunFacts

DEVICE_LANE = re.compile(r"(?:device (?P<device>\S+) )?stream (?P<stream>.+)")

DRAWN_LANES = re.compile(r"profiler|overhead|(device \S+ )?(annotation|sync) ")
"""Lanes that the profiler draws over others."""

COMPUTE_OWNS, COMM_OWNS, P2P_OWNS, COPY_OWNS = 70, 60, 59, 50
INPUT_OWNS, HOST_COMM_OWNS, HOST_OWNS, STEP_OWNS = 40, 30, 20, 10
"""Precedence: what owns a device's time on overlap."""

COPIES: tuple[tuple[str, str, int], ...] = (
    (r"Mem(cpy|Cpy)?.*(DtoD|Device -> Device)", "useful.compute", COMPUTE_OWNS),
    (r"Mem.*(PtoP|Peer)", "comm.p2p", P2P_OWNS - 1),
    (r"Mem.*(DtoH|D2M|D2H|Device -> Pa?g)", "host.copy", COPY_OWNS - 1),
    (r".*", "input.transfer", COPY_OWNS),
)
"""Beginning of a copy's name -> what it is for: inside a device it is computing, towards it input, back a read-back."""

KERNEL_NAMES: dict[str, tuple[int, ...]] = {
    "kernel.compute": (KIND["COMPUTE"],),
    "kernel.comm": MOVING[:1],
    "kernel.p2p": MOVING[1:],
    "kernel.copy": (KIND["DATA"],),
}
"""Name of a total of device rows -> their kinds."""


WAITED = np.full(len(SUBS), SUB_CODE["straggler.device"])
"""[len(SUBS)] Sub-line of a communication kernel -> sub-line of the part of it that waited for another rank's."""
WAITED[SUB_CODE["comm.p2p"]] = SUB_CODE["bubble.p2p"]


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
    launched_ns: Ints
    """[m] When what owns each piece was launched; its own begin where the file does not tell."""
    unseen_ns: int | None = None
    """When the first launch was made whose kernel had not run when the window closed: the device was at work then."""


@dataclass(frozen=True, slots=True)
class CommunicationCalls:
    """Communication rows that own some of a device's time, and kernels hidden by others, over all ranks.

    [n] each, in types that just hold them.
    """

    rank: Ints
    group: Ints
    seq: Ints
    start_ns: Ints
    duration_ns: Ints
    message: Ints
    """1 for a kernel that sends or receives, 0 for a collective."""

    @classmethod
    def joined(cls, parts: Sequence[CommunicationCalls]) -> CommunicationCalls:
        """Put the calls of several ranks one behind the other."""
        columns = ("rank", "group", "seq", "start_ns", "duration_ns", "message")
        return cls(*(np.concatenate([getattr(part, column) for part in parts]) for column in columns))


@dataclass(frozen=True, slots=True)
class OpenPieces:
    """Pieces of one device's time that `arrivals` may split; [k] each, in types that just hold them."""

    rank: int
    """Rank of the device's process."""
    wall_ns: int
    """Its window."""
    sub_ns: Ints
    """[len(SUBS)] All of its time, as long as nobody was late."""
    sub: Ints
    """Sub-line code of each open piece."""
    call: Ints
    """Index of the call that owns each."""
    start_ns: Ints
    length_ns: Ints


def profile_account(source: Trace | Parts) -> Account:
    """Account for profiler traces of one or several ranks; of parts one rank is in memory at a time.

    Raises `InputError` when no row of them is work of a thread or a device.
    """
    parts = Parts.of(source)
    on_device = _any_device(parts)
    calls: list[CommunicationCalls] = []
    messages: list[KernelMessages] = []
    opens: list[OpenPieces] = []
    spans: dict[str, SpanFacts] = {}
    marks: list[tuple[Ints, Ints]] = []
    known: set[int] = set()
    kernels = KernelTimes()
    for part in parts:
        books = device_books(part, any_device=on_device)
        steps = [step for step in np.unique(part.events["step"]).tolist() if step >= 0]
        for book in books if on_device else ():
            computes = book.sub == SUB_CODE["useful.compute"]
            kernels += kernel_times(part, book.pieces, computes, max(len(steps), 1))
        own, carried, pieces = _calls_of(part, books, first=sum(len(each.rank) for each in calls))
        calls.append(own)
        messages.append(carried)
        opens += pieces
        marks.append(_step_marks(part))
        known.update(steps)
        for name, facts in kernel_facts(part).items() if on_device else ():
            spans[name] = spans[name] + facts if name in spans else facts
    if not opens:
        raise InputError("the trace holds only marks that the profiler drew. Record operators or kernels as well.")
    wall_ns = max(device.wall_ns for device in opens)
    amounts, lateness = settle_kernels(CommunicationCalls.joined(calls), KernelMessages.joined(messages), opens)
    for device, row in zip(opens, amounts, strict=True):
        row[SUB_CODE["unknown.cut_short"]] += wall_ns - device.wall_ns
    numbers = [device.rank for device in opens]
    if len(set(numbers)) < len(numbers):  # Several devices in one process: number the devices, not the ranks.
        numbers = list(range(len(opens)))
    basis = dict.fromkeys(BUCKETS, "kernels" if on_device else "recorded")
    return Account(
        wall_ns=wall_ns,
        sub_ns=dict(zip(numbers, amounts, strict=True)),
        steps=len(known),
        kernels=kernels,
        basis=basis if on_device else {**basis, "useful": "remainder"},
        step_wall_ns=_step_walls(marks),
        lateness=lateness,
        spans=spans,
        facts=RunFacts.of(parts.meta),
        hosts={rank: str(row["host"]) for rank, row in parts.ranks.items() if row.get("host")},
    )


def _any_device(parts: Parts) -> bool:
    """Return whether any row stands on a device's lane; without one the training thread is the device."""
    on_device = np.array([_device_of(lane) is not None for lane in parts.tables.lanes] + [False])
    lanes = (parts.read({"rank": (rank, rank + 1)}, ("lane",)).events["lane"] for rank in parts.numbers)
    return bool(on_device.any()) and any(bool(on_device[lane].any()) for lane in lanes)


def _device_of(lane: str) -> str | None:
    """Return the device of a lane, None for a host lane."""
    match = DEVICE_LANE.fullmatch(lane)
    return (match["device"] or "") if match else None


def device_books(trace: Trace, *, any_device: bool | None = None) -> list[DeviceBook]:
    """Sweep every device of every rank over the rank's own window.

    `any_device` says whether the job has device rows, where `trace` is only some ranks of it.
    """
    events = trace.events
    drawn = np.array([bool(DRAWN_LANES.match(lane)) for lane in trace.lanes] + [False])
    device = [_device_of(lane) for lane in trace.lanes]
    sub, precedence = _owners(trace, device, any_device)
    books = []
    for rank in np.unique(events["rank"]).tolist():
        mine = np.flatnonzero((events["rank"] == rank) & ~drawn[events["lane"]])
        if not len(mine):
            continue
        start, end = events["start_ns"][mine], (events["start_ns"] + events["duration_ns"])[mine]
        window = (int(start.min()), int(end.max()))
        launched, unseen = _launches(trace, mine)
        used = sorted({device[lane] or "" for lane in np.unique(events["lane"][mine]) if device[lane] is not None})
        for number in used or [""]:
            # Rows of the host and of this device compete; `sweep` gives each instant to the highest precedence, and the
            # appended -1 is what index -1 (nobody) reads.
            theirs = np.array([name is None or name == number for name in device])[events["lane"][mine]]
            rows = mine[theirs & (precedence[mine] > 0)]
            ends = events["start_ns"][rows] + events["duration_ns"][rows]
            found = sweep(events["start_ns"][rows], ends, precedence[rows], window=window)
            owner = np.append(rows, -1)[found.row]
            rest = SUB_CODE["idle.device" if used else "unknown.model"]
            code = np.where(owner >= 0, sub[owner], rest)
            moving = (owner >= 0) & np.isin(precedence[owner], [COMM_OWNS, P2P_OWNS, HOST_COMM_OWNS])
            pieces = Pieces(found.start_ns, found.end_ns, owner)
            books.append(DeviceBook(rank, number, pieces, code, moving, launched[owner], unseen if used else None))
    return books


def _launches(trace: Trace, rows: Ints) -> tuple[Ints, int | None]:
    """Return [len(trace) + 1] when what the `rows` of one rank show was launched, and `DeviceBook.unseen_ns`."""
    launching = np.array([bool(LAUNCHING.match(name)) for name in trace.names] + [False])
    corr, on_host = trace.events["corr"], np.array([_device_of(lane) is None for lane in trace.lanes] + [False])
    host = on_host[trace.events["lane"][rows]]
    at = np.append(trace.events["start_ns"], -1).astype(np.int64)
    launches = rows[launching[trace.events["name"][rows]] & host & (corr[rows] >= 0)]
    if not len(launches):
        return at, None
    shown = rows[~host]
    order = launches[np.argsort(corr[launches], kind="stable")]
    place = np.minimum(np.searchsorted(corr[order], corr[shown]), len(order) - 1)
    known = corr[order[place]] == corr[shown]
    at[shown[known]] = at[order[place[known]]]
    unseen = at[launches][at[launches] > at[shown[known]].max(initial=-1)]
    return at, int(unseen.min()) if len(unseen) else None


def _owners(trace: Trace, device: Sequence[str | None], any_device: bool | None) -> tuple[Ints, Ints]:
    """Return each row's sub-line code and precedence; precedence 0 = it owns nothing."""
    events = trace.events
    kind, lane = events["kind"], events["lane"]
    on_device = np.array([name is not None for name in device])[lane]
    on_main = np.array([name == "main" for name in trace.lanes])[lane]
    any_device = bool(on_device.any()) if any_device is None else any_device
    sub, precedence = np.zeros(len(trace), np.int64), np.zeros(len(trace), np.int64)

    def own(mask: NDArray[np.bool_], line: str, level: int) -> None:
        sub[mask], precedence[mask] = SUB_CODE[line], level

    drawn = np.array([bool(DRAWN_LANES.match(name)) for name in trace.lanes])[lane]
    host = ~on_device & ~drawn & (on_main | any_device)
    step_names = np.array([name.startswith("ProfilerStep") for name in trace.names] + [False])[events["name"]]
    # Later lines overwrite earlier ones: from the general to the particular.
    own(host & step_names, "host.launch" if any_device else "useful.compute", STEP_OWNS)
    own(host & (kind != KIND["MARK"]), "host.launch" if any_device else "useful.compute", HOST_OWNS)
    if not any_device:
        own(on_main & (kind == KIND["OPTIM"]), "useful.optimizer", HOST_OWNS + 1)
    own(on_main & ~on_device & np.isin(kind, MOVING), "comm.collective", HOST_COMM_OWNS)
    own(on_main & ~on_device & (kind == KIND["DATA"]), "input.unsplit", INPUT_OWNS)
    own(on_device & (kind == KIND["COMPUTE"]), "useful.compute", COMPUTE_OWNS)
    own(on_device & (kind == KIND["COLL"]), "comm.exposed", COMM_OWNS)
    own(on_device & np.isin(kind, MOVING[1:]), "comm.p2p", P2P_OWNS)
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


def settle_kernels(
    calls: CommunicationCalls, messages: KernelMessages, devices: Sequence[OpenPieces]
) -> tuple[list[Ints], RankLateness]:
    """Return each device's time [len(SUBS)]; what waited for another rank's kernel is moved to where `WAITED` says."""
    late, lateness = _lateness(calls, messages, devices)
    amounts = []
    for device, waited in zip(devices, late, strict=True):
        row = device.sub_ns.copy()
        np.subtract.at(row, device.sub, waited)
        np.add.at(row, WAITED[device.sub], waited)
        amounts.append(row)
    return amounts, lateness


def lateness_of(trace: Trace, books: Sequence[DeviceBook]) -> tuple[list[Ints], RankLateness]:
    """Return for each piece of each device the ns, from its start, before the last rank's kernel had begun."""
    late, lateness = _lateness(*_calls_of(trace, books))
    parts: list[Ints] = []
    for book, waited in zip(books, late, strict=True):
        parts.append(np.zeros(len(book.sub), np.int64))
        parts[-1][book.open] = waited
    return parts, lateness


def _calls_of(
    trace: Trace, books: Sequence[DeviceBook], *, first: int = 0
) -> tuple[CommunicationCalls, KernelMessages, list[OpenPieces]]:
    """Return the calls in order of row, their messages, and the open pieces; `first` calls stand before them.

    Calls are the rows behind open pieces, and kernels that communicate behind others that compute: they count where
    calls are matched by their order.
    """
    events = trace.events
    on_device = np.array([_device_of(lane) is not None for lane in trace.lanes] + [False])[events["lane"]]
    kernels = np.flatnonzero(on_device & np.isin(events["kind"], MOVING))
    # Sorted, and with the row of every open piece in it: searchsorted below finds the call of each piece exactly.
    rows = np.unique(np.concatenate([kernels, *(book.pieces.row[book.open] for book in books)]))
    message = on_device[rows] & np.isin(events["kind"][rows], MOVING[1:])
    names = ("rank", "group", "seq", "start_ns", "duration_ns")
    calls = CommunicationCalls(*(events[name][rows].astype(np.int64) for name in names), *[narrowed(message)])
    group = np.where(message, calls.group, -1)
    devices = []
    for book in books:
        length = book.pieces.duration_ns
        total = blank_subs()
        np.add.at(total, book.sub, length)
        call = np.searchsorted(rows, book.pieces.row[book.open]) + first
        own = (book.sub[book.open], call, book.pieces.start_ns[book.open], length[book.open])
        devices.append(OpenPieces(book.rank, int(length.sum()), total, *map(narrowed, own)))
    return calls, KernelMessages.of(trace.groups, group, calls.rank, first=first), devices


def _lateness(
    calls: CommunicationCalls, messages: KernelMessages, devices: Sequence[OpenPieces]
) -> tuple[list[Ints], RankLateness]:
    """Return for each open piece of each device the ns, from its start, before the last rank's kernel had begun.

    Of a kernel that sends or receives: before its peers' kernels had begun; nobody is late for these.
    """
    rank = calls.rank
    key, shift = _meetings(calls)
    start = calls.start_ns - shift
    met = last_arrivals(key, rank, start)
    begun = peers_begun(messages, start_ns=start, end_ns=start + calls.duration_ns)
    arrival = np.where(calls.message > 0, begun, met.arrival_ns)
    parts: list[Ints] = []
    blamed: dict[int, dict[str, int]] = {}
    for device in devices:
        begin = device.start_ns - shift[device.call]
        waited = np.clip(arrival[device.call] - begin, 0, device.length_ns)
        culprit = np.where(calls.message[device.call] > 0, -1, rank[met.last[device.call]])
        for value in np.unique(culprit[(waited > 0) & (culprit >= 0)]).tolist():
            row = blamed.setdefault(value, {"useful": 0})
            row["useful"] += int(waited[culprit == value].sum())
        parts.append(waited)
    # A call that is the last arrival of others too held a meeting up, alone unless its margin is 0.
    final = np.flatnonzero((np.bincount(met.last, minlength=len(rank)) > 1) & (met.margin_ns > 0))
    times = {value: int((rank[final] == value).sum()) for value in np.unique(rank).tolist()}
    margins = {v: int(np.median(met.margin_ns[final[rank[final] == v]])) for v, count in times.items() if count}
    return parts, RankLateness(blamed, times, margins, int((np.bincount(met.last, minlength=len(rank)) > 1).sum()))


def _meetings(calls: CommunicationCalls) -> tuple[Ints, Ints]:
    """Return for each collective kernel the key of its meeting (-1 = unknown) and its rank's clock shift in ns.

    Kernels meet by (group, sequence number), or by their order in the group where the profiler wrote no number and
    every rank shows equally many. Clocks are set so that matched kernels end together, as collectives do, from rank to
    rank: those of ranks that no collective joins, directly or by others, are taken as they are.
    """
    rank, group, seq = calls.rank, calls.group, calls.seq
    key, shift = np.full(len(rank), -1, np.int64), np.zeros(len(rank), np.int64)
    if len(np.unique(rank)) < 2:
        return key, shift
    numbered = narrowed(np.stack([group, np.maximum(seq, -1)], axis=1))
    meeting = meetings(numbered, rank, calls.start_ns, np.zeros(len(rank), bool))
    collective = calls.message == 0
    groups = np.unique(group[collective])
    fair = (seq >= 0) | np.isin(group, [value for value in groups if _even(rank[collective & (group == value)])])
    known = fair & (group >= 0) & collective
    key[known] = meeting[known]
    end = calls.start_ns + calls.duration_ns
    waiting = {value: np.flatnonzero((rank == value) & known) for value in np.unique(rank[known]).tolist()}
    # [meetings] When each ended on the clock of the rank that was the first to be placed, of those `seen`.
    ends = np.zeros(int(key.max(initial=-1)) + 1, np.int64)
    seen = np.zeros(len(ends), bool)
    while waiting:
        shared = {value: rows[seen[key[rows]]] for value, rows in waiting.items()}
        for value in [value for value in waiting if len(shared[value])] or list(waiting)[:1]:
            rows, own = shared[value], waiting.pop(value)
            late = int(np.median(end[rows] - ends[key[rows]])) if len(rows) else 0
            shift[rank == value] = late
            new = own[~seen[key[own]]]
            ends[key[new]] = end[new] - late
            seen[key[new]] = True
    return key, shift


def kernel_times(trace: Trace, pieces: Pieces, picked: NDArray[np.bool_], num_steps: int) -> KernelTimes:
    """Add up the `picked` pieces of a device's time by the kernels that own them, those that have a name."""
    name = trace.events["name"]
    picked = picked & (name[pieces.row] >= 0)
    row = pieces.row[picked]
    ns = np.bincount(name[row], weights=pieces.duration_ns[picked], minlength=len(trace.names))
    count = np.bincount(name[np.unique(row)], minlength=len(ns))
    codes = np.flatnonzero(count).tolist()
    return KernelTimes(
        {trace.names[code]: int(ns[code]) for code in codes}, {trace.names[code]: int(count[code]) for code in codes},
        num_steps,
    )  # fmt: skip


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


def _step_marks(trace: Trace) -> tuple[Ints, Ints]:
    """Return number and duration of each ProfilerStep that a thread recorded."""
    events = trace.events
    names = np.array([name.startswith("ProfilerStep#") for name in trace.names] + [False])
    lanes = np.array([not DRAWN_LANES.match(name) and _device_of(name) is None for name in trace.lanes])
    rows = np.flatnonzero(names[events["name"]] & lanes[events["lane"]] & (events["step"] >= 0))
    return events["step"][rows].astype(np.int64), events["duration_ns"][rows]


def _step_walls(marks: Sequence[tuple[Ints, Ints]]) -> Ints:
    """Return the mean wall over ranks of each ProfilerStep, in order of step."""
    step, wall = (np.concatenate([mark[side] for mark in marks]) for side in (0, 1))
    index, count = np.unique(step, return_inverse=True, return_counts=True)[1:]
    total = np.zeros(len(count), np.int64)
    np.add.at(total, index, wall)
    return total // np.maximum(count, 1)
