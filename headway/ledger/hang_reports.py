"""What every rank of a hung job was in, read from what it left: Flight Recorder dumps, or the hang watch of a run.

`of_dumps` takes the dumps of all ranks that still answered, opened as one
trace; `of_watch` the object in RUN/hang/<n>.json. Both return what
`headway.ledger.hang.localise` takes. A rank without a dump is silent.

In a dump the ongoing collective of a group is the first that is not done.
Where the backend says what has started (NCCL), work that is only queued
counts as not entered: another operation holds the rank. gloo says nothing of
the kind, names no group's ranks and records no messages; a group's ranks are
then those of the mesh axis that it is named after, else those that have a
dump with work of that group, and for the default group all.

>>> from headway.ledger.hang import localise
>>> rows = {"rank": [0, 0, 1], "seq": [1, 2, 1], "group": [0, 0, 0], "name": [0, 0, 0], "lane": [1, 2, 1],
...         "kind": [KIND["COLL"]] * 3}
>>> trace = Trace.from_columns(rows, names=["gloo:barrier"], lanes=["main", "pg scheduled, retired", "pg scheduled"],
...                            groups={0: {"name": "0", "ranks": []}})
>>> localise(**of_dumps(trace, Mesh({"dp": 2}))._asdict()).origins[0].awaited
'barrier 2 of group 0'
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError, InputError
from headway.core.mesh import Mesh
from headway.ledger.hang import RECV, SEND, Group, RankReport, Wait
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import COLLECTIVES, KIND
from headway.trace.readers import flight
from headway.trace.sync.meetings import verb_of

DEFAULT_GROUP = 0
"""The process group of all ranks."""

ALL = "all ranks"
"""Key of the group of all ranks, for an operation that has none yet: creating the first group."""

_FRAME = re.compile(r'^ *File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
"""One frame of a stack as `faulthandler` writes it."""

_EQUAL = re.compile(r"all_?reduce|_base$|_tensor$")
"""Names of collectives to which all ranks give the same number of bytes, or get it from."""

STOPPED = ("T", "t", "Z", "X")
"""States of a process (/proc/PID/stat) in which it cannot have reported anything itself: stopped, traced, dead."""


class HangReports(NamedTuple):
    """The arguments of `localise`."""

    reports: list[RankReport]
    """One per rank that answered."""

    mesh: Mesh
    """Where the ranks stand."""

    groups: Mapping[Group, Sequence[int]]
    """Group -> its ranks."""


def of_dumps(trace: Trace, mesh: Mesh | None = None) -> HangReports:
    """Read the reports out of Flight Recorder dumps of all ranks that answered, opened together.

    Without a mesh all ranks stand along dp, as many as the dumps speak of.
    Raises `InputError` when the trace is no dump, a dump does not tell its
    rank, or the mesh is not as large as the world that the dumps tell.
    """
    ranks = sorted({*np.unique(trace.events["rank"]).tolist(), *trace.ranks})
    if ranks and ranks[0] < 0:
        raise InputError("a dump does not say whose it is. Name each file after its rank: dump_rank_3.")
    if not ranks or not all(lane == "main" or lane.endswith(_ENDINGS) for lane in trace.lanes):
        raise InputError("this is no Flight Recorder dump. Give the dumps of all ranks that still answer.")
    world = len(trace.groups.get(DEFAULT_GROUP, {}).get("ranks") or ())
    mesh = _of_size(mesh, world) or Mesh({"dp": world or ranks[-1] + 1})
    groups = _groups_of_dumps(trace, mesh)
    states, done = flight.states(trace), flight.retired(trace)
    done |= np.array([state == "completed" for state in states], dtype=bool)
    running = np.array([state == "started" for state in states], dtype=bool)
    done |= _overtaken(trace, done, running)
    # A queue in front of a device: what is only queued has not begun, if the backend would have said so.
    queues = any(state in ("started", "completed") for state in states)
    entered = done | np.array([not queues or state != "scheduled" for state in states], dtype=bool)
    usual = _usual(trace)
    order = np.lexsort((trace.events["seq"], trace.events["rank"]))
    begins = np.searchsorted(trace.events["rank"][order], [*ranks, ranks[-1] + 1]).tolist()
    reports = [
        _of_dump(trace, rank, order[begin:end], groups, done, entered, usual)
        for rank, (begin, end) in zip(ranks, itertools.pairwise(begins), strict=True)
    ]
    return HangReports(reports, mesh, groups)


def _of_size(mesh: Mesh | None, world_size: int) -> Mesh | None:
    """Return `mesh`; raises `InputError` when its sizes do not multiply to the world size (0 = not known)."""
    return mesh if mesh is None or not world_size else Mesh(mesh.sizes, world_size=world_size)


_ENDINGS = tuple(f"{state}{tail}" for state in flight.STATES for tail in ("", ", retired"))


def _overtaken(trace: Trace, done: NDArray[np.bool_], running: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return [n]: collectives that some rank has completed, and the mark of this rank lags behind.

    That is so where the rank has come to a later one of the group. And where its device is `running` one that no rank
    leaves before all have entered: it held nobody any more.
    """
    events = trace.events
    rows = np.flatnonzero(events["kind"] == KIND["COLL"])
    seq = events["seq"][rows]
    _, group = np.unique(events["group"][rows], return_inverse=True)
    _, place = np.unique(np.stack([group, events["rank"][rows]]), axis=1, return_inverse=True)
    # [k] per row of a collective: `group` numbers groups, `place` pairs of (group, rank). So `completed` is the highest
    # number that any rank of the group is done with, the other maximum the highest that the row's own rank has come to.
    completed = _highest(group, np.where(done[rows], seq, -1))
    result = np.zeros(len(trace), dtype=bool)
    together = np.array([verb_of(name) >= 0 for name in trace.names])[trace.events["name"][rows]]
    behind = (seq < _highest(place.reshape(-1), seq)) | (running[rows] & together)
    result[rows] = (seq <= completed) & behind
    return result


def _highest(key: NDArray[np.int64], value: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [n] the largest value among those of the same key."""
    most = np.full(int(key.max(initial=-1)) + 1, -1, dtype=np.int64)
    np.maximum.at(most, key, value)
    return np.asarray(most[key])


def _usual(trace: Trace) -> NDArray[np.bool_]:
    """Return [n]: the collective, by name and size, that most ranks ran under its number in groups of its role.

    The role is the group's description, such as 'tp'; a group without one is compared with nobody.
    """
    events = trace.events
    role = {number: str(entry.get("description") or "") for number, entry in trace.groups.items()}
    keys = [
        (role.get(group, ""), seq) for group, seq in zip(events["group"].tolist(), events["seq"].tolist(), strict=True)
    ]
    kinds = list(zip(events["name"].tolist(), events["bytes"].tolist(), strict=True))
    total, alike = Counter(keys), Counter(zip(keys, kinds, strict=True))
    return np.array([bool(key[0]) and 2 * alike[key, kind] > total[key] for key, kind in zip(keys, kinds, strict=True)])


def _groups_of_dumps(trace: Trace, mesh: Mesh) -> dict[Group, Sequence[int]]:
    """Return the ranks of every group that the dumps speak of."""
    events = trace.events
    found: dict[Group, Sequence[int]] = {}
    for number, entry in trace.groups.items():
        seen = sorted(np.unique(events["rank"][events["group"] == number]).tolist())
        axis = next((a for a in mesh.sizes if a in str(entry.get("description", "")).split("_")), None)
        if entry.get("ranks"):
            found[number] = list(entry["ranks"])
        elif number == DEFAULT_GROUP:
            found[number] = range(mesh.world_size)
        elif axis is not None and seen:
            found[number] = mesh.group_of(seen[0], axis)
        else:
            found[number] = seen
    return found


def _of_dump(
    trace: Trace,
    rank: int,
    rows: NDArray[np.int64],
    groups: Mapping[Group, Sequence[int]],
    done: Any,
    entered: Any,
    usual: Any,
) -> RankReport:
    """Return the report of one rank from its rows in order of seq: what is unfinished first in each group."""
    events = trace.events
    finished = rows[done[rows] & (events["kind"][rows] == KIND["COLL"])]
    # Later rows of a group overwrite earlier ones: the highest number stays.
    reached: dict[Group, int] = dict(
        zip(events["group"][finished].tolist(), events["seq"][finished].tolist(), strict=True)
    )
    waits: list[Wait] = []
    held: set[int] = set()
    for row in rows[~done[rows] & entered[rows]].tolist():
        group, seq, peer = (int(events[column][row]) for column in ("group", "seq", "peer"))
        kind, name = events["kind"][row], trace.name_of(row).partition(":")[2] or trace.name_of(row)
        if rank not in groups.get(group, ()):
            continue
        if kind in (KIND["SEND"], KIND["RECV"]):
            # torch numbers the messages of a pair, both directions together; the order of one direction is not told.
            sends = kind == KIND["SEND"]
            waits.append(Wait(SEND if sends else RECV, group, -1, peer, blocking=not sends))
        elif group not in held:
            held.add(group)
            size = int(events["bytes"][row]) if _EQUAL.search(name) else 0
            waits.append(Wait(name, group, seq, size_bytes=size or -1, usual=bool(usual[row])))
    return RankReport(rank, tuple(waits), doing="" if waits else "between operations", reached=reached)


class WatchedGroup(msgspec.Struct, frozen=True):
    """A process group that the ranks met."""

    ranks: tuple[int, ...] | None = None
    """None: all."""


class WatchRow(msgspec.Struct, frozen=True, kw_only=True):
    """What the hang watch saw of a rank."""

    rank: int
    state: str | None = None
    """Of its process: see `STOPPED`."""
    silent: bool | None = None
    phase: str | None = None
    op: str | None = None
    """The recorded operation that it is in."""
    step: int | None = None
    group: int | str | None = None
    seq: int | None = None
    peer: int | None = None
    attempt: int | None = None
    place: str | None = None
    """Where in the script it is, in words, where that is known."""
    stack: str | None = None
    """As `faulthandler` wrote it, or why it is not known."""


class WatchReport(msgspec.Struct, frozen=True, kw_only=True):
    """RUN/hang/<n>.json: rows of ranks, and the table of groups."""

    ranks: tuple[WatchRow, ...]
    groups: dict[str, tuple[int, ...] | WatchedGroup] = {}
    world_size: int | None = None
    ahead: bool = False
    """Whether hosts may run ahead of their devices, so that the places of ranks say little."""

    @classmethod
    def of(cls, found: Mapping[str, Any], where: str = "this") -> WatchReport:
        """Check what is in `where`. Raises `FormatError` where it is no such report, or a value has another type."""
        try:
            return msgspec.convert(found, cls)
        except msgspec.ValidationError as cause:
            raise FormatError(f"{where} is no report of the hang watch: {cause}. Give RUN/hang/<n>.json.") from cause


def of_watch(found: WatchReport, mesh: Mesh | None = None) -> HangReports:
    """Read a report of the hang watch of a run.

    A rank that is stopped or gone is silent, whatever its last mark says; one
    that the watch calls silent while it runs has entered nothing.
    """
    given = {_number(key): entry for key, entry in found.groups.items()}
    groups = {key: (entry.ranks or () if isinstance(entry, WatchedGroup) else entry) for key, entry in given.items()}
    named = [row.rank for row in found.ranks] + [rank for ranks in groups.values() for rank in ranks]
    world = found.world_size or 0
    mesh = _of_size(mesh, world) or Mesh({"dp": world or max(named, default=0) + 1})
    everybody = range(mesh.world_size)
    known: dict[Group, Sequence[int]] = {group: ranks or everybody for group, ranks in groups.items()}
    return HangReports(list(_of_rows(found.ranks)), mesh, {**known, ALL: everybody})


def _of_rows(rows: Sequence[WatchRow]) -> Iterator[RankReport]:
    """Yield a report per rank that runs."""
    for row in rows:
        if (row.state or "")[:1] in STOPPED or (row.silent and not row.phase):
            continue
        room, _, name = (row.op or "").rpartition(".")
        waits: tuple[Wait, ...] = ()
        if not row.silent and (room == "comm" or name in (*COLLECTIVES, SEND, RECV)):
            group, seq, peer = (-1 if value is None else value for value in (row.group, row.seq, row.peer))
            waits = (Wait(name, ALL if group == -1 else _number(group), int(seq), int(peer)),)
        step = None if row.step is None else f"of step {row.step}"
        doing = row.place or ("" if waits else " ".join(word for word in (row.phase, step, row.op) if word))
        stack = frames(row.stack or "")
        yield RankReport(row.rank, waits, doing, attempt=row.attempt or 0, stack=stack)


def frames(text: str) -> tuple[str, ...]:
    """Return the frames of the thread that matters in what `faulthandler` wrote, innermost first; () without any.

    Of several threads that is the last one written: the main thread, which was there first.

    >>> frames('Current thread 0x1 (most recent call first):\\n  File "a/train.py", line 22 in <module>')
    ('a/train.py:22 in <module>',)
    """
    last = re.split(r"(?m)^(?:Current thread|Thread) 0x", text)[-1]
    return tuple(f"{file}:{line} in {name}" for file, line, name in _FRAME.findall(last))


def _number(key: object) -> Group:
    """Return a group's key as the number it is, or as the text it is."""
    return int(str(key)) if str(key).isdecimal() else str(key)
