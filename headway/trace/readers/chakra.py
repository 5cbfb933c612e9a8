"""Chakra execution traces, in and out: nodes with their dependencies, one file per rank.

Use it to hand a recorded step to a simulator that takes Chakra (`name.<rank>.et`,
schema 0.0.4 of the MLCommons working group), or to open such a trace here. A
file is a `GlobalMetadata` message and then one `Node` message per row, each
behind its length. What a column becomes:

    edges      data_deps of the later node; nodes are numbered by row from 0, within the rank
    kind       node type; COLL, SEND, RECV are communication nodes. Rows that are no operation (marks, rows around
               others) are metadata nodes, so that a simulator does not count their time twice
    start_ns, duration_ns   whole microseconds, as the format has it; `headway.*` attributes hold the nanoseconds
    bytes      comm_size of communication, tensor_size of the rest
    group      pg_name;  peer: comm_src, comm_dst;  flops: num_ops;  lane: is_cpu_op, stream

Every other column stands in attributes called `headway.<column>`, the tables in
the metadata: our own files come back with all their rows of a rank, but not
with edges between ranks (a collective is the meeting) nor rows without a rank.

Foreign files: a node's lane is its stream, else its thread; a collective whose
name does not tell its type gets it behind the name. A file that holds no times
(generated ones) says so in `meta["timed"]`.

>>> trace = Trace.from_columns({"rank": [0, 0], "start_ns": [0, 7], "duration_ns": [5, 7], "name": [0, 0]},
...                            names=["add"], edges=[[0], [1]])
>>> parse(b"".join(messages(trace, 0)), "a.0.et").edges.tolist()
[[0], [1]]
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import check_room, decode_json, whole_file
from headway.core.units import NS_PER_US
from headway.trace.events.content import group_id
from headway.trace.events.intervals import leaves
from headway.trace.events.parquet import numbered, plain_tables
from headway.trace.events.trace import COLUMNS, Trace
from headway.trace.events.vocabulary import COLLECTIVES, KIND, KINDS
from headway.trace.profiler.messages import SCALARS, delimited, message_classes, prefixed

if TYPE_CHECKING:
    from headway.trace.events.content import Content

VERSION = "0.0.4"
"""Version of the schema that is written."""

SCHEMA = "headway.chakra/1"
TABLES = "headway.tables"
"""Attribute of the metadata that holds the tables of our own files."""

VALUES = ("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32",
          "sfixed64", "bool", "string", "bytes")  # fmt: skip
"""Types of an attribute's value, in the order of their numbers: 3 the first one, 4 a list of it, and so on."""

CLASSES = message_classes(
    "headway.chakra",
    {
        "Attribute": {
            "name": (1, "string"),
            **{f"{kind}_val": (3 + 2 * place, kind) for place, kind in enumerate(VALUES)},
        },
        "GlobalMetadata": {"version": (1, "string"), "attr": (2, "*Attribute")},
        "Node": {
            "id": (1, "uint64"), "name": (2, "string"), "type": (3, "int32"),
            "ctrl_deps": (4, "*uint64"), "data_deps": (5, "*uint64"),
            "start_time_micros": (6, "uint64"), "duration_micros": (7, "uint64"), "attr": (10, "*Attribute"),
        },
    },
)  # fmt: skip

METADATA, LOAD, COMPUTE, SEND, RECV, COLL = 1, 2, 4, 5, 6, 7
KIND_OF_TYPE = {
    LOAD: "DATA", 3: "DATA", COMPUTE: "COMPUTE", SEND: "SEND", RECV: "RECV", COLL: "COLL",
    8: "DATA", 9: "DATA", 10: "CKPT",
}  # fmt: skip
"""Node type -> kind; 8 storage, 9 batch, 10 checkpoint; any other is a MARK."""

TYPE_OF_KIND = {"COLL": COLL, "SEND": SEND, "RECV": RECV, "MARK": METADATA}
"""Kind -> node type; any other computes, as far as a simulator is concerned."""

COLLECTIVE_TYPES: tuple[tuple[str, int, str], ...] = (
    ("reducescatterblock", 8, "REDUCE_SCATTER_BLOCK"), ("reducescatter", 7, "REDUCE_SCATTER"),
    ("allgather", 2, "ALL_GATHER"), ("allreduce", 0, "ALL_REDUCE"), ("alltoall", 6, "ALL_TO_ALL"),
    ("broadcast", 5, "BROADCAST"), ("barrier", 9, "BARRIER"), ("gather", 3, "GATHER"), ("scatter", 4, "SCATTER"),
    ("reduce", 1, "REDUCE"), ("commwait", 0, "ALL_REDUCE"), ("comminit", 9, "BARRIER"),
)  # fmt: skip
"""Part of a name without its punctuation -> comm_type and its word, the first match counts. Our own wait is for DDP's
gradients, and the making of a group is a meeting without bytes."""

NODE_BYTES = 2_000
"""What a node costs in memory while the columns are made."""

SPECIAL = ("rank", "name", "lane", "kind", "start_ns", "duration_ns", "bytes", "flops", "peer")
"""Columns with a place of their own; each of the others is an attribute."""

DEVICE_LANE = re.compile(r"(device \S+ )?stream (?P<stream>.+)")


def looks_like(content: Content) -> bool:
    """Return whether the file opens with a `GlobalMetadata` message: a version, or an attribute with its name."""
    opening = next(iter(content), b"")[:64]
    return bool(re.match(rb"[\x80-\xff]{0,5}[\x01-\x7f](\n.\d[\d.]+|\x12[\x80-\xff]{0,4}.\n.[A-Za-z_])", opening, re.S))


def rank_files(path: Path) -> dict[int, Path]:
    """Return rank -> file of the set that `name.et` stands for: every `name.<rank>.et` beside it.

    >>> rank_files(Path("/nonexistent/a.et"))
    {}
    """
    if path.suffix != ".et" or not path.parent.is_dir():
        return {}
    found = {rank_of(file.name): file for file in path.parent.glob(f"{path.stem.replace('[', '[[]')}.*.et")}
    return {rank: found[rank] for rank in sorted(found) if found[rank].name == f"{path.stem}.{rank}.et"}


def rank_of(name: str) -> int:
    """Return the rank in a file's name, 0 where it tells none.

    >>> rank_of("/tmp/llama.17.et"), rank_of("llama.et")
    (17, 0)
    """
    match = re.search(r"\.(\d{1,9})\.et\b", name)
    return int(match[1]) if match else 0


def write(trace: Trace, path: str | Path) -> None:
    """Write `name.<rank>.et` for each rank of `trace`, each whole or not at all; rows without a rank stay out.

    Raises `InputError` when the trace lists no edges: nothing could be said about what waits for what.
    """
    target = Path(path)
    if trace.edges is None:
        raise InputError(
            f"{target} needs dependencies, and the trace lists none. `headway trace export SOURCE {target}` infers "
            "them; so does headway.sim.observed.listed(trace)."
        )
    for rank in [rank for rank in np.unique(trace.events["rank"]).tolist() if rank >= 0]:
        own = target if target.name.endswith(f".{rank}.et") else target.with_name(f"{target.stem}.{rank}.et")
        with whole_file(own) as draft, draft.open("wb") as out:
            for message in messages(trace, rank):
                out.write(message)


def messages(trace: Trace, rank: int) -> Iterator[bytes]:
    """Yield the messages of one rank's file, each behind its length."""
    own = trace.where(trace.events["rank"] == rank)
    head = CLASSES["GlobalMetadata"](version=VERSION)
    text = json.dumps({"schema": SCHEMA, "rank": rank, **plain_tables(trace)})
    head.attr.add(name=TABLES, string_val=text)
    yield prefixed(head.SerializeToString())
    yield from _nodes(own, rank)


def _nodes(trace: Trace, rank: int) -> Iterator[bytes]:
    """Yield a node per row."""
    source, target = (np.zeros((2, 0), np.int64) if trace.edges is None else trace.edges).tolist()
    # Edges are sorted by target, so that row i waits for source[first[i]:first[i + 1]].
    first = np.searchsorted(target, np.arange(len(trace) + 1)).tolist()
    events = trace.events
    works = leaves(events["lane"], events["start_ns"], events["duration_ns"])
    works[source], works[target] = True, True
    extra = [column for column in COLUMNS if column not in SPECIAL]
    columns = {column: events[column].tolist() for column in COLUMNS}
    for row in range(len(trace)):
        values = {column: columns[column][row] for column in COLUMNS}
        kind, lane = KINDS[values["kind"]], trace.lanes[values["lane"]]
        stream = DEVICE_LANE.fullmatch(lane)
        op = CLASSES["Node"](id=row, name=trace.name_of(row), data_deps=source[first[row] : first[row + 1]])
        plain = LOAD if stream and kind == "DATA" else COMPUTE
        op.type = TYPE_OF_KIND.get(kind, plain) if works[row] else METADATA
        _put(op, "is_cpu_op", "bool", stream is None)
        if stream and stream["stream"].isdigit() and len(stream["stream"]) < 19:
            _put(op, "stream", "int64", int(stream["stream"]))
        _put_times(op, values["start_ns"], values["duration_ns"])
        _put(op, "headway.kind", "string", kind)
        _put(op, "headway.lane", "string", lane)
        if values["name"] < 0:
            _put(op, "headway.unnamed", "bool", True)
        _put_work(op, values, kind, trace, rank)
        for column in extra:
            if values[column] != COLUMNS[column][1]:
                _put(op, f"headway.{column}", "int64", values[column])
        yield prefixed(op.SerializeToString())


def _put(op: Any, name: str, kind: str, value: Any) -> None:
    """Add one attribute."""
    op.attr.add(name=name, **{f"{kind}_val": value})


def _put_times(op: Any, start_ns: int, duration_ns: int) -> None:
    """Write start and duration in whole microseconds, and exactly where that is not exact."""
    op.start_time_micros, op.duration_micros = max(start_ns, 0) // NS_PER_US, duration_ns // NS_PER_US
    if start_ns != op.start_time_micros * NS_PER_US:
        _put(op, "headway.start_ns", "int64", start_ns)
    if duration_ns != op.duration_micros * NS_PER_US:
        _put(op, "headway.duration_ns", "int64", duration_ns)


def _put_work(op: Any, values: dict[str, Any], kind: str, trace: Trace, rank: int) -> None:
    """Write what was moved or computed: sizes, peers, group."""
    moved, peer, flops = values["bytes"], values["peer"], values["flops"]
    ends = {"SEND": (rank, peer), "RECV": (peer, rank)}.get(kind)
    if kind in ("COLL", "SEND", "RECV"):
        _put(op, "comm_size", "int64", moved)
        group = values["group"]
        if group >= 0:
            _put(op, "pg_name", "string", str(trace.groups.get(group, {}).get("name") or group))
        numbered = op.name == "comm.collective" and 0 <= values["corr"] < len(COLLECTIVES)
        called = COLLECTIVES[values["corr"]] if numbered else op.name
        which = _collective_type(called)
        if kind == "COLL" and which is not None:
            _put(op, "comm_type", "int64", which)
    elif moved:
        _put(op, "tensor_size", "int64", moved)
    if ends and peer >= 0:
        _put(op, "comm_src", "int32", ends[0])
        _put(op, "comm_dst", "int32", ends[1])
        if 0 <= values["seq"] < 2**31:
            _put(op, "comm_tag", "int32", values["seq"])
    if peer != -1 and not (ends and peer >= 0):
        _put(op, "headway.peer", "int64", peer)
    if flops != 0:
        _put(op, "headway.flops", "double", flops)
        if np.isfinite(flops) and 0 < flops < 2**63:
            _put(op, "num_ops", "int64", int(flops))


def _collective_type(name: str) -> int | None:
    """Return the comm_type that a name tells, None when it tells none.

    >>> _collective_type("ncclDevKernel_AllGather_RING_LL"), _collective_type("comm.wait"), _collective_type("kernel")
    (2, 0, None)
    """
    letters = re.sub(r"[^a-z]", "", name.lower())
    return next((number for part, number, _ in COLLECTIVE_TYPES if part in letters), None)


def read(content: Content) -> Trace:
    """Read a file that `formats.open_any` recognised."""
    return parse(content.data, str(content.path))


def parse(data: bytes, where: str) -> Trace:
    """Decode one rank's file; `where` names it in messages, and tells the rank of a foreign file.

    Raises `FormatError` with the byte offset on truncated or damaged data, on two nodes of one id and on a dependency
    on a node that is not there.
    """
    try:
        return _parsed(data, where)
    except InputError:
        raise
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        OverflowError,
    ) as cause:  # no UTF-8, tables of no shape
        raise FormatError(f"{where} is damaged: {cause}. Write it again.") from cause


def _parsed(data: bytes, where: str) -> Trace:
    """Decode the messages and build the trace."""
    found = delimited(data, where)
    head = _decode("GlobalMetadata", *next(found, (0, b"")), where)
    facts = {attribute.name: _value(attribute) for attribute in head.attr}
    own = decode_json(facts[TABLES], f"the table of {where}") if TABLES in facts else None
    if own is not None and own["schema"] != SCHEMA:
        raise FormatError(f"{where} has the schema {own['schema']!r}; this version reads {SCHEMA!r}. Export it again.")
    ops = []
    for at, text in found:
        ops.append(_decode("Node", at, text, where))
        check_room(NODE_BYTES * len(ops), len(data), where, "nodes")
    return _trace(ops, own, where, head.version)


def _decode(name: str, at: int, data: bytes, where: str) -> Any:
    """Parse one message."""
    try:
        return CLASSES[name].FromString(data)
    except DecodeError as cause:
        raise FormatError(
            f"{where} is damaged at byte {at}: no {name} of Chakra {VERSION} stands there ({cause}). Write it again."
        ) from cause


def _value(attribute: Any) -> Any:
    """Return the value of an attribute, None for one without, or with a list."""
    last = attribute.ListFields()[-1:]
    return last[0][1] if last and last[0][0].name != "name" else None


def _trace(ops: list[Any], own: dict[str, Any] | None, where: str, version: str) -> Trace:
    """Build the columns."""
    attributes = [{entry.name: _value(entry) for entry in op.attr} for op in ops]
    rank = int(own["rank"]) if own else rank_of(where)
    threads = _Threads(attributes)
    lanes = {lane: code for code, lane in enumerate(own["lanes"] if own else ["main"])}
    names: dict[str, int] = {}
    groups: dict[int, dict[str, Any]] = {}
    rows = []
    for op, given in zip(ops, attributes, strict=True):
        kind = given.get("headway.kind") or threads.kind(op, given)
        name = op.name if own else _told(op.name, kind, given)
        if own is None and kind in ("COLL", "SEND", "RECV"):
            title = str(given.get("pg_name") or "0")
            groups.setdefault(group_id(title), {"name": title, "ranks": []})
            given["headway.group"] = group_id(title)
            given.setdefault("headway.seq", given.get("comm_tag", -1))
        row = {column: given.get(f"headway.{column}", blank) for column, (_, blank) in COLUMNS.items()}
        row |= {
            "rank": rank,
            "kind": KIND[kind],
            "lane": lanes.setdefault(
                given["headway.lane"] if "headway.lane" in given else threads.lane(op, given), len(lanes)
            ),
            "name": -1 if "headway.unnamed" in given else names.setdefault(name, len(names)),
            "start_ns": given.get("headway.start_ns", op.start_time_micros * NS_PER_US),
            "duration_ns": given.get("headway.duration_ns", op.duration_micros * NS_PER_US),
            "bytes": given.get("comm_size", given.get("tensor_size", 0)),
            "flops": given.get("headway.flops", given.get("num_ops", 0)),
            "peer": given.get("headway.peer", given.get("comm_dst" if kind == "SEND" else "comm_src", -1)),
        }
        rows.append(row)
    for text in (*names, *lanes):
        if not isinstance(text, str):  # what is no UTF-8 comes as bytes
            raise FormatError(f"{where} is damaged: the name {text!r} is not UTF-8. Write it again.")
    timed = not ops or any(op.HasField("start_time_micros") and op.start_time_micros for op in ops)
    plain = {"source": "chakra", "version": version, "timed": timed or len(ops) == 1}
    try:
        return Trace.from_columns(
            {column: np.array([row[column] for row in rows], dtype) for column, (dtype, _) in COLUMNS.items()},
            names=list(names),
            lanes=list(lanes),
            groups=numbered(own["groups"]) if own else groups,
            ranks=numbered(own["ranks"]) if own else {rank: {}},
            meta=own["meta"] if own else plain,
            edges=_edges(ops, where),
        )
    except OverflowError as cause:
        raise FormatError(f"{where} holds a number that no column takes: {cause}. Write the file again.") from cause


def _edges(ops: list[Any], where: str) -> NDArray[np.int64]:
    """Return the dependencies as edges between rows."""
    row_of: dict[int, int] = {}
    for row, op in enumerate(ops):
        if row_of.setdefault(op.id, row) != row:
            raise FormatError(f"{where} holds two nodes with the id {op.id}. Give each node an id of its own.")
    pairs = []
    for row, op in enumerate(ops):
        for other in (*op.data_deps, *op.ctrl_deps):
            if other not in row_of:
                raise FormatError(f"{where}: node {op.id} depends on node {other}, which is not in the file. Add it.")
            if row_of[other] != row:
                pairs.append((row_of[other], row))
    return np.array(pairs, np.int64).reshape(-1, 2).T


def _told(name: str, kind: str, given: dict[str, Any]) -> str:
    """Return the name of a foreign row; a collective's type stands behind a name that does not tell it."""
    which = given.get("comm_type")
    if kind != "COLL" or which is None or _collective_type(name) == which:
        return name
    word = next((word for _, number, word in COLLECTIVE_TYPES if number == which), f"type {which}")
    return f"{name} [{word}]"


class _Threads:
    """Where the nodes of a foreign file ran."""

    def __init__(self, attributes: list[dict[str, Any]]) -> None:
        on_device = [not given.get("is_cpu_op", False) for given in attributes]
        self.any_device = any(on_device)
        threads = [
            given["tid"] for given, device in zip(attributes, on_device, strict=True) if "tid" in given and not device
        ]
        self.main = Counter(threads).most_common(1)[0][0] if threads else None

    def kind(self, op: Any, given: dict[str, Any]) -> str:
        """Return the kind: what runs on the host of a file with device rows is the host's own work."""
        kind = KIND_OF_TYPE.get(op.type, "MARK")
        return "HOST" if kind == "COMPUTE" and self.any_device and given.get("is_cpu_op", False) else kind

    def lane(self, op: Any, given: dict[str, Any]) -> str:
        """Return the lane: stream, else thread, else one for computing and one for communication."""
        if not given.get("is_cpu_op", False):
            return f"stream {given.get('stream', 'comm' if op.type in (SEND, RECV, COLL) else 0)}"
        thread = given.get("tid", self.main)
        return "main" if thread == self.main else f"thread {thread}"


assert set(VALUES) <= set(SCALARS), "an attribute's value has a type that protobuf lacks"
