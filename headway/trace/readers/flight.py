"""Flight Recorder dumps of torch.distributed -> Trace: which collective each rank had reached.

Use it after a hang, or beside a profiler window that lacks sizes and sequence
numbers. Reads the pickle (with an unpickler that admits nothing but built-in
containers, numbers and text) and the JSON form, of every dump version so far.

Group, seq and bytes are exact. Times are not: a row starts when the work was
created, or was seen to start, and lasts until it was seen to be complete; 0
where the backend never says so (gloo). They are Unix times, int64 nanoseconds.
Each row's state stands in its lane: 'default_pg completed, retired'.

>>> import json
>>> entry = {"process_group": ["0", "default_pg"], "collective_seq_id": 4, "state": "started", "time_created_ns": 7}
>>> trace = parse(json.dumps({"version": "2.4", "entries": [entry]}).encode(), "rank_3.json")
>>> trace.events["seq"].tolist(), trace.events["rank"].tolist(), states(trace)
([4], [3], ['started'])
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError
from headway.core.files.safe_files import decode_json
from headway.core.files.unpickler import UNREADABLE, unpickle
from headway.core.units import NS_PER_MS
from headway.trace.events.content import group_id, parse_ranks
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND
from headway.trace.profiler.kineto_names import dtype_bytes

if TYPE_CHECKING:
    from headway.trace.events.content import Content

STATES = ("scheduled", "started", "completed")
"""How far an entry had got when the dump was made."""

MOST_DIMS, MOST_TENSORS = 64, 10_000
"""Dimensions of a tensor, and tensors of one collective."""

_RETIRED = ", retired"


def read(content: Content) -> Trace:
    """Read a file that `formats.open_any` recognised."""
    return parse(content.data, str(content.path))


def parse(data: bytes, where: str) -> Trace:
    """Decode a dump, pickle or JSON; `where` names it in messages and gives the rank where the dump does not.

    Raises `FormatError` on damage (JSON: with the byte offset), on a pickle that wants to build anything but plain
    containers, and on entries that are not what torch writes.
    """
    if data[:1] == b"\x80":
        dump = _unpickle(data, where)
    else:
        dump = decode_json(data, where, Any, fix="Dump again.")
    entries = dump.get("entries") if isinstance(dump, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise FormatError(f"{where} holds no list of entries. Dump the Flight Recorder again.")
    rank = dump.get("rank")
    return _trace(dump, entries, where, rank if isinstance(rank, int) else rank_of_name(where))


def states(trace: Trace) -> list[str]:
    """[n] State of each row of a trace that came from a dump: one of `STATES`, as the dump says it."""
    lanes = [lane.removesuffix(_RETIRED).rpartition(" ")[2] for lane in trace.lanes]
    return [lanes[code] for code in trace.events["lane"].tolist()]


def retired(trace: Trace) -> NDArray[np.bool_]:
    """[n] bool: the backend was done with the work; gloo says this and never 'completed'."""
    done = [code for code, lane in enumerate(trace.lanes) if lane.endswith(_RETIRED)]
    return np.isin(trace.events["lane"], done)


def rank_of_name(path: str) -> int:
    """Return the rank that a file name tells, -1 for none: 'nccl_trace_rank_3', 'r3-w0.flight.json', 'dump_3'.

    >>> [rank_of_name(n) for n in ("/tmp/nccl_trace_rank_3", "r2-w10.flight.json", "dump_7.pkl", "dump.pkl")]
    [3, 2, 7, -1]
    """
    name = re.split(r"[/\\]", path)[-1]
    found = re.search(r"rank[_-]?(\d+)", name) or re.match(r"r(\d+)\b", name) or re.search(r"(\d+)(\.\w+)*$", name)
    return int(found[1]) if found else -1


def _unpickle(data: bytes, where: str) -> Any:
    """Decode a pickle of plain values."""
    try:
        return unpickle(data, 0, find=_refuse, refer=_refuse)[0]
    except _UnwantedError as cause:
        raise FormatError(f"{where} is refused: {cause} Do not open it; ask where it comes from.") from cause
    except (FormatError, *UNREADABLE) as cause:
        raise FormatError(f"{where} is a damaged pickle of {len(data)} bytes: {cause}. Dump again.") from cause


class _UnwantedError(FormatError):
    """A pickle wants more than plain values."""


def _refuse(*wanted: Any) -> Any:
    """Refuse every class, function and reference."""
    name = ".".join(map(str, wanted))
    raise _UnwantedError(f"the pickle wants {name}; a Flight Recorder dump holds only plain values.")


def _text(value: Any) -> str:
    """Return what should be text; `TypeError` for a container, which could be dear to write out."""
    if value is not None and not isinstance(value, (str, int, float)):
        raise TypeError(f"a {type(value).__name__} stands where text belongs")
    if isinstance(value, int) and value.bit_length() > 64:
        raise ValueError("a number of more than 64 bits stands where text belongs")
    return "" if value is None else str(value)


def _trace(dump: dict[str, Any], entries: list[dict[str, Any]], where: str, rank: int) -> Trace:
    """Put the entries into columns."""
    try:
        groups = _groups(dump, entries)
    except (TypeError, ValueError) as cause:
        raise FormatError(f"{where}: a process group is not what torch writes: {cause}. Dump again.") from cause
    names: dict[str, int] = {}
    lanes: dict[str, int] = {"main": 0}
    rows: dict[str, list[int]] = {
        column: [] for column in ("kind", "name", "lane", "start_ns", "duration_ns", "group", "seq", "peer", "bytes")
    }
    for index, entry in enumerate(entries):
        try:
            row = _row(entry, groups)
            name, lane = _text(entry.get("profiling_name")), _lane(entry, groups[row["group"]]["description"])
        except (TypeError, ValueError, KeyError, IndexError, OverflowError) as cause:
            raise FormatError(f"{where}: entry {index} is not what torch writes: {cause!r}. Dump again.") from cause
        row["name"] = names.setdefault(name, len(names))
        row["lane"] = lanes.setdefault(lane, len(lanes))
        for column, value in row.items():
            rows[column].append(value)
    status = dump.get("pg_status")
    facts = {"group_status": _status(status)} if isinstance(status, dict) and status else {}
    return Trace.from_columns(
        {"rank": np.full(len(entries), rank), **rows},
        names=list(names),
        lanes=list(lanes),
        groups=groups,
        ranks={rank: facts} if rank >= 0 else {},
        meta={
            "source": "flight",
            "flight_version": _text(dump.get("version")) if not isinstance(dump.get("version"), (list, dict)) else "",
            "clock": "realtime",
            "coverage": {"mapped": 1.0, "dropped": 0},
        },
    )


def _group_name(entry: dict[str, Any]) -> tuple[str, str]:
    """Return name and description of an entry's group; the oldest dumps have only a number."""
    given = entry.get("process_group")
    if isinstance(given, (list, tuple)) and given:
        return _text(given[0]), _text(given[1]) if len(given) > 1 else ""
    return _text(given if given not in (None, "") else entry.get("pg_id", "")), ""


def _status(status: dict[Any, Any]) -> dict[str, dict[str, Any]]:
    """Return group -> how far it is: numbers and text, as torch writes them; anything else is left out."""
    return {
        str(group): {str(key): value for key, value in row.items() if isinstance(value, (str, int, float))}
        for group, row in status.items()
        if isinstance(row, dict) and isinstance(group, (str, int))
    }


def _groups(dump: dict[str, Any], entries: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the table of groups: those of `pg_config`, and those that only the entries name."""
    listed = dump.get("pg_config")
    groups: dict[int, dict[str, Any]] = {}
    for key, entry in listed.items() if isinstance(listed, dict) else []:
        if isinstance(entry, dict) and (name := _text(entry.get("name") or key)):
            ranks = parse_ranks(entry.get("ranks"))
            groups[group_id(name)] = {"name": name, "description": _text(entry.get("desc")), "ranks": ranks}
    for entry in entries:
        name, description = _group_name(entry)
        known = groups.setdefault(group_id(name), {"name": name, "description": description, "ranks": []})
        known["description"] = known["description"] or description
    return groups


def _row(entry: dict[str, Any], groups: dict[int, dict[str, Any]]) -> dict[str, int]:
    """Return the numeric columns of one entry."""
    group = group_id(_group_name(entry)[0])
    kind, peer = _direction(_text(entry.get("profiling_name")), groups[group]["ranks"])
    is_p2p = bool(entry.get("is_p2p", kind != "COLL"))
    seq = entry.get("p2p_seq_id" if is_p2p else "collective_seq_id", entry.get("seq_id", -1))
    start_ns, duration_ns = _times(entry)
    sizes = [_bytes(entry.get(f"{side}_sizes"), entry.get(f"{side}_dtypes")) for side in ("input", "output")]
    return {
        "kind": KIND[kind],
        "start_ns": start_ns,
        "duration_ns": duration_ns,
        "group": group,
        "seq": int(seq),
        "peer": peer,
        "bytes": max(sizes),
    }


def _direction(name: str, ranks: list[int]) -> tuple[str, int]:
    """Return kind and peer of 'nccl:send 0->1' and the like; peers are numbered within the group."""
    verb = name.partition(":")[2]
    kind = "SEND" if verb.startswith("send") else "RECV" if verb.startswith("recv") else "COLL"
    found = re.search(r"\d+\s*(?:->|<-)\s*(\d+)", name)
    if kind == "COLL" or not found:
        return kind, -1
    peer = int(found[1])
    return kind, ranks[peer] if peer < len(ranks) else peer


def _times(entry: dict[str, Any]) -> tuple[int, int]:
    """Return start and duration, ns: from when it was seen to start, else created, to when it was seen complete."""
    created = int(entry.get("time_created_ns") or 0)
    started = int(entry.get("time_discovered_started_ns") or 0)
    completed = int(entry.get("time_discovered_completed_ns") or 0)
    start_ns = started or created
    measured_ms = entry.get("duration_ms")
    if isinstance(measured_ms, (int, float)) and math.isfinite(measured_ms) and measured_ms >= 0:
        return start_ns, round(measured_ms * NS_PER_MS)
    return start_ns, max(completed - start_ns, 0) if completed else 0


def _bytes(shapes: Any, dtypes: Any) -> int:
    """Return the summed size of tensors; 0 where the dump has no types."""
    total = 0
    for shape, dtype in zip(shapes or [], dtypes or [], strict=False):
        if len(shape) > MOST_DIMS or not all(type(size) is int and size < 1 << 63 for size in shape):
            raise ValueError("invalid tensor shape")
        total += math.prod(shape) * dtype_bytes(dtype)
    if len(shapes or []) > MOST_TENSORS or not 0 <= total < 1 << 63:
        raise ValueError(f"its tensors have {total} bytes")
    return total


def _lane(entry: dict[str, Any], description: str) -> str:
    """Return the lane: group and state."""
    group = description or _group_name(entry)[0] or "group"
    return f"{group} {_text(entry.get('state')) or STATES[0]}{_RETIRED if entry.get('retired') else ''}"
