"""Which reader a file needs, told apart by its content, and which writer a suffix names.

Use `open_any` for anything that holds events: a run folder, headway's own
Parquet, the straggler operation traces, Kineto or Chrome JSON (gzip or
plain), Flight Recorder dumps (pickle or JSON), Chakra execution traces,
torchtitan's JSONL, or a folder of such files.
Suffixes are never looked at when reading. All times come out as int64
nanoseconds.

>>> sorted(READERS)
['chakra', 'chrome', 'flight-json', 'flight-pickle', 'headway', 'headway-chrome', 'run', 'straggler', 'torchtitan']
>>> sorted(WRITERS)
['.et', '.json', '.json.gz', '.parquet', '.perfetto-trace', '.pftrace', '.straggler.parquet']

A slice of a trace: some steps, ranks, lanes, names, kinds, and a stretch of time; read without the rest if possible.

Use it to look at a window of a long run. Our own Parquet, files and run
folders, is read by row groups, so that a slice costs what it holds; every
other format is read whole and then cut. Times in int64 ns, `between` from the
first event of the whole trace on.

>>> trace = Trace.from_columns({"start_ns": [50, 60, 70], "duration_ns": [5, 5, 5], "name": [0, 1, 0]},
...                            names=["aten::mm", "copy"])
>>> len(TraceSlice(names="aten::*").of(trace)), len(TraceSlice(between_ns=(12, 99)).of(trace))
(2, 2)
>>> moments("0.5us:2us"), moments("100:200")
((500, 2000), (100, 200))
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import numpy as np

from headway.core.errors import FormatError, InputError
from headway.core.tables import pick, resolved
from headway.core.units import NS_PER_MS, NS_PER_S, NS_PER_US
from headway.trace.events.content import PARQUET_MAGIC, Content
from headway.trace.events.parts import Parts
from headway.trace.events.trace import Trace, concat
from headway.trace.events.vocabulary import KIND, KINDS

FLIGHT_KEYS = (b'"pg_config"', b'"pg_status"', b'"collective_seq_id"', b'"comm_lib_version"', b'"nccl_version"')
"""A Flight Recorder dump in JSON has `entries` and at least one of these."""


OWN, PROFILE = "headway", "chrome"
"""Keys of `READERS`: our own Parquet, and what the profiler writes."""

EMPTY = "is empty"
DAMAGED = "is damaged or truncated Parquet"


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of file: how to recognise it and what reads it."""

    title: str
    """Words for the message that lists the known formats."""

    recognise: Callable[[Content], bool]
    """True when the content is of this kind."""

    reader: str
    """'module:function', loaded when the first such file is opened."""

    takes: str
    """Which attribute of `Content` the reader is called with: 'path' or the whole content, 'itself'."""


RUN_NEAR = "headway.trace.recording.runs:run_near"
"""What says which run a path may mean that is no trace."""


def open_any(path: str | Path) -> Trace:
    """Read the trace at `path`, whatever it is.

    Raises `FormatError` when no reader recognises the content (the message lists what is known and what the file looks
    like) or when the content is damaged, `InputError` when there is no such path.
    """
    content = Content(Path(path))
    if not content.path.exists():
        if parts := resolved("headway.trace.readers.chakra:rank_files")(content.path):
            return concat([open_any(part) for part in parts.values()])
        raise InputError(f"{path} does not exist. Check the path; a run folder or a trace file is needed.")
    name = recognise(content)
    if name:
        return _read(READERS[name], content)
    if content.path.is_dir():
        return _open_folder(content.path)
    looks = _looks(content)
    if looks in (EMPTY, DAMAGED):
        raise FormatError(f"{path} is not a trace headway can read: it {looks}. Write or copy the file again.")
    if near := resolved(RUN_NEAR)(path):
        raise FormatError(f"{path} is not a trace. {near}")
    known = "; ".join(entry.title for entry in READERS.values())
    raise FormatError(f"{path} is not a trace headway can read: it {looks}. Give one of: {known}.")


def open_several(paths: Sequence[str | Path]) -> list[Trace]:
    """Read the traces at `paths`; several profiler files are told apart by rank, host and process, as in a folder.

    Raises as `open_any` does, and `InputError` where two profiler files claim one rank at one time.
    """
    contents = [Content(Path(path)) for path in paths]
    profiles = [content for content in contents if content.path.is_file() and recognise(content) == PROFILE]
    if len(profiles) < 2:
        return [open_any(path) for path in paths]
    others = [open_any(content.path) for content in contents if content not in profiles]
    return [*resolved("headway.trace.profiler.profiler_folder:read")(profiles), *others]


def recognise(content: Content) -> str:
    """Return the key of `READERS` that fits `content`, '' when none does."""
    return next((name for name, entry in READERS.items() if entry.recognise(content)), "")


def save_any(trace: Trace, path: str | Path) -> None:
    """Write `trace` in the format that the suffix of `path` names, whole or not at all.

    Raises `InputError` on a suffix that `WRITERS` does not list.
    """
    suffix = next((s for s in sorted(WRITERS, key=len, reverse=True) if Path(path).name.endswith(s)), None)
    if suffix is None:
        raise InputError(f"{path} names no format headway writes. End it with one of: {', '.join(sorted(WRITERS))}.")
    resolved(WRITERS[suffix])(trace, Path(path))


def open_run(path: Path) -> Trace:
    """Return the trace of the last attempt of the run folder at `path`, all ranks."""
    run: Any = resolved("headway.trace.recording.runs:Run")
    return cast(Trace, run.open(path).trace)


def describe(source: Trace | Parts) -> dict[str, object]:
    """Return what `headway trace info` says of a trace: counts, span, kinds, lanes, groups, coverage; JSON values."""
    parts = Parts.of(source)
    tables, totals = parts.tables, _Totals(parts.tables)
    for part in parts:
        totals.add(part)
    return {
        "schema": "headway.trace-info/1",
        "source": tables.meta.get("source", "unknown"),
        "events": totals.num_events,
        "ranks": [rank for rank in parts.numbers if rank >= 0],
        "steps": sorted(step for step in totals.steps if step >= 0),
        "span_s": (totals.end_ns - totals.start_ns) / NS_PER_S if totals.num_events else 0.0,
        "kinds": {
            KINDS[kind]: {"events": int(totals.kinds[0, kind]), "duration_ns": int(totals.kinds[1, kind])}
            for kind in np.flatnonzero(totals.kinds[0]).tolist()
        },
        "lanes": [tables.lanes[code] for code in sorted(totals.lanes)],
        "groups": {str(key): dict(value) for key, value in tables.groups.items()},
        "longest": {
            tables.names[code]: {"events": int(totals.names[0, code]), "duration_ns": int(totals.names[1, code])}
            for code in np.argsort(-totals.names[1], kind="stable")[:10].tolist()
            if totals.names[0, code]
        },
        "coverage": tables.meta.get("coverage"),
    }


class _Totals:
    """Counts and sums over the rows of all ranks."""

    def __init__(self, tables: Trace) -> None:
        self.num_events = 0
        self.start_ns, self.end_ns = np.iinfo(np.int64).max, np.iinfo(np.int64).min
        self.steps: set[int] = set()
        self.lanes: set[int] = set()
        self.kinds = np.zeros((2, len(KINDS)), np.int64)
        self.names = np.zeros((2, len(tables.names)), np.int64)
        """[2, names] Events, and the sum of their durations."""

    def add(self, part: Trace) -> None:
        """Add the rows of one rank."""
        events = part.events
        self.num_events += len(part)
        self.start_ns, self.end_ns = min(self.start_ns, part.span_ns[0]), max(self.end_ns, part.span_ns[1])
        self.steps.update(np.unique(events["step"]).tolist())
        self.lanes.update(np.unique(events["lane"]).tolist())
        for totals, codes in ((self.kinds, events["kind"]), (self.names, events["name"])):
            known = codes >= 0
            np.add.at(totals[0], codes[known], 1)
            np.add.at(totals[1], codes[known], events["duration_ns"][known])


def _open_folder(path: Path) -> Trace:
    """Merge every trace file of a folder that is no run, in order of name."""
    found = _in_folder(path)
    profiles = [content for name, content in found if name == PROFILE]
    others = [_read(READERS[name], content) for name, content in found if name != PROFILE]
    read = resolved("headway.trace.profiler.profiler_folder:read") if profiles else list
    return concat([*read(profiles), *others])


def _in_folder(path: Path) -> list[tuple[str, Content]]:
    """Return the trace files of a folder that is no run, in order of name, each behind its key in `READERS`."""
    contents = [Content(file) for file in sorted(path.iterdir()) if file.is_file()]
    found = [(name, content) for content in contents if (name := recognise(content))]
    if not found:
        near = resolved(RUN_NEAR)(path) or "Name a run folder or a trace."
        raise FormatError(f"the folder {path} is no run and holds no trace file. {near}")
    return found


def open_parts(paths: Sequence[str | Path]) -> Parts:
    """Return what lies at `paths` as parts by rank: a run's last attempt and our own Parquet are not read yet.

    Anything else is read whole. Raises as `open_any` does.
    """
    stored = [_stored(Content(Path(path))) for path in paths]
    if len(paths) > 1 and not any(stored):
        return Parts.joined([Parts.of(trace) for trace in open_several(paths)])
    return Parts.joined(
        [Parts.of(open_any(path) if part is None else part) for path, part in zip(paths, stored, strict=True)]
    )


def stored_parts(paths: Sequence[str | Path]) -> Parts | None:
    """Return what lies at `paths` as parts by rank, None where some of it can only be read whole."""
    parts = [part for path in paths if (part := _stored(Content(Path(path)))) is not None]
    return Parts.joined(parts) if len(parts) == len(paths) else None


def _stored(content: Content) -> Parts | None:
    """Return the parts of one path, None for formats that are read whole, and for traces that list their edges."""
    name = recognise(content) if content.path.exists() else ""
    if name == "run":
        run: Any = resolved("headway.trace.recording.runs:Run")
        return cast(Parts, run.open(content.path).parts)
    files = [(name, content)] if name or not content.path.is_dir() else _in_folder(content.path)
    if any(each != OWN for each, _ in files):
        return None
    stored: Any = resolved("headway.trace.events.parquet:StoredTrace")
    if any(stored(file.path).lists_edges for _, file in files):
        return None
    return Parts.of_files([file.path for _, file in files])


def _read(entry: Format, content: Content) -> Trace:
    """Call the reader of `entry`."""
    return cast(Trace, resolved(entry.reader)(content.path if entry.takes == "path" else content))


def _looks(content: Content) -> str:
    """Say in words what an unknown file looks like."""
    opening = content.opening
    if not content.head:
        return EMPTY
    if content.head.startswith(PARQUET_MAGIC):
        columns = resolved("headway.trace.events.parquet:columns_of")(content.path)
        return f"is Parquet with the columns {', '.join(columns[:8])}" if columns else DAMAGED
    if opening.startswith((b"{", b"[")):
        return f"is JSON that starts with {opening[:60].decode(errors='replace')!r} and has no 'traceEvents'"
    if content.path.suffix in (".pftrace", ".perfetto-trace"):
        return "is by its name Perfetto's protobuf, which headway only writes"
    return f"starts with the bytes {opening[:16]!r}"


def _is_run(content: Content) -> bool:
    return content.path.is_dir() and bool(resolved("headway.trace.recording.runs:is_run")(content.path))


def _is_own(content: Content) -> bool:
    return content.head.startswith(PARQUET_MAGIC) and bool(
        resolved("headway.trace.events.parquet:is_ours")(content.path)
    )


def _is_straggler(content: Content) -> bool:
    is_parquet = content.head.startswith(PARQUET_MAGIC)
    return is_parquet and "optype" in resolved("headway.trace.events.parquet:columns_of")(content.path)


def _is_chrome(content: Content) -> bool:
    opening = content.opening
    if opening.startswith(b"["):
        return opening[1:].lstrip().startswith(b"{") and content.holds(b'"ph"')
    return opening.startswith(b"{") and content.holds(b'"traceEvents"')


def _is_own_chrome(content: Content) -> bool:
    return content.opening.startswith(b'{"otherData":{"schema": "headway.chrome/')


def _is_flight_json(content: Content) -> bool:
    return content.opening.startswith(b"{") and content.holds(*FLIGHT_KEYS)


def _is_flight_pickle(content: Content) -> bool:
    return content.opening[:1] == b"\x80" and content.holds(b"entries")


def _is_torchtitan(content: Content) -> bool:
    return content.opening.startswith(b"{") and b'"log_type_name"' in content.opening.split(b"\n", 1)[0]


def _is_chakra(content: Content) -> bool:
    return bool(resolved("headway.trace.readers.chakra:looks_like")(content))


READERS: dict[str, Format] = {
    "run": Format("a run folder (headway run)", _is_run, "headway.trace.readers.formats:open_run", "path"),
    "headway": Format("headway Parquet", _is_own, "headway.trace.events.parquet:read", "path"),
    "straggler": Format("straggler operation Parquet", _is_straggler, "headway.trace.readers.straggler:read", "path"),
    "headway-chrome": Format("headway's Chrome JSON", _is_own_chrome, "headway.trace.readers.chrome:read", "itself"),
    "torchtitan": Format("torchtitan's JSONL", _is_torchtitan, "headway.trace.readers.torchtitan:read", "itself"),
    "chrome": Format(
        "Kineto or Chrome JSON, gzip or plain", _is_chrome, "headway.trace.profiler.kineto:read", "itself"
    ),
    "flight-json": Format(
        "a Flight Recorder dump as JSON", _is_flight_json, "headway.trace.readers.flight:read", "itself"
    ),
    "flight-pickle": Format("a Flight Recorder dump", _is_flight_pickle, "headway.trace.readers.flight:read", "itself"),
    "chakra": Format("a Chakra execution trace", _is_chakra, "headway.trace.readers.chakra:read", "itself"),
}
"""Every format that is read, in the order they are tried. Adding one is adding a line here."""

WRITERS: dict[str, str] = {
    ".parquet": "headway.trace.events.parquet:write",
    ".straggler.parquet": "headway.trace.readers.straggler:write",
    ".json": "headway.trace.readers.chrome:write",
    ".json.gz": "headway.trace.readers.chrome:write",
    ".et": "headway.trace.readers.chakra:write",
    ".pftrace": "headway.trace.readers.perfetto:write",
    ".perfetto-trace": "headway.trace.readers.perfetto:write",
}
"""Suffix -> 'module:function' called with (trace, path)."""


UNITS = {"": 1, "ns": 1, "us": NS_PER_US, "ms": NS_PER_MS, "s": NS_PER_S}
"""Unit of a moment -> ns."""


@dataclass(frozen=True, slots=True)
class TraceSlice:
    """What to keep; None keeps all."""

    steps: tuple[int, int] | None = None
    """First step and the one after the last."""

    ranks: tuple[int, int] | None = None
    """First rank and the one after the last."""

    lanes: str | None = None
    """Pattern of lane names, as of file names: 'stream *'."""

    names: str | None = None
    """Pattern of event names."""

    kinds: tuple[str, ...] | None = None
    """Kinds of `headway.trace.events.vocabulary.KINDS`."""

    between_ns: tuple[int, int] | None = None
    """Rows that overlap this stretch, ns from the first event of the whole trace."""

    def __post_init__(self) -> None:
        """Check the kinds."""
        for kind in self.kinds or ():
            pick(KIND, kind, "kind")

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """Column -> first value and the one after the last: what a reader can skip by."""
        given = {"step": self.steps, "rank": self.ranks}
        return {column: bounds for column, bounds in given.items() if bounds is not None}

    def of(self, trace: Trace, *, origin_ns: int | None = None) -> Trace:
        """Return the slice of a trace in memory; `origin_ns` is the first event of the whole, if this is not it."""
        events = trace.events
        mask = np.ones(len(trace), bool)
        for column, (first, end) in self.ranges.items():
            mask &= (events[column] >= first) & (events[column] < end)
        for pattern, words, column in ((self.lanes, trace.lanes, "lane"), (self.names, trace.names, "name")):
            if pattern is not None:
                # A row without a word has code -1, the last one of the table, and never matches.
                mask &= np.array([fnmatchcase(word, pattern) for word in words] + [False])[events[column]]
        if self.kinds is not None:
            mask &= np.isin(events["kind"], [KIND[kind] for kind in self.kinds])
        if self.between_ns is not None:
            origin = trace.span_ns[0] if origin_ns is None else origin_ns
            begin, end = (origin + moment for moment in self.between_ns)
            mask &= (events["start_ns"] < end) & (events["start_ns"] + events["duration_ns"] >= begin)
        return trace if mask.all() else trace.where(mask)

    def read(self, paths: Sequence[Path]) -> Trace:
        """Return the slice of what lies at `paths`, a run or traces. Raises as `Trace.open` does."""
        parts = stored_parts(paths)
        if parts is None:
            return self.of(Trace.open(list(paths)))
        origin = _origin(parts) if self.between_ns is not None else None
        ranges = dict(self.ranges)
        if self.between_ns is not None and origin is not None:
            ranges["start_ns"] = (np.iinfo(np.int64).min, origin + self.between_ns[1])
        return self.of(parts.read(ranges), origin_ns=origin)


def _origin(parts: Parts) -> int | None:
    """Return the start of the first event of all ranks, None when there is none."""
    starts = (parts.read({"rank": (rank, rank + 1)}, ["start_ns"]).events["start_ns"] for rank in parts.numbers)
    return min((int(start.min()) for start in starts if len(start)), default=None)


def moments(text: str) -> tuple[int, int]:
    """Parse FROM:TO, each a number in ns or with us, ms or s behind it. Raises `InputError` on anything else."""
    found = [re.fullmatch(r"(\d+(?:\.\d+)?)(ns|us|ms|s|)", part.strip()) for part in text.split(":")]
    if len(found) != 2 or not all(found):
        raise InputError(f"{text!r} is not a time range. Write FROM:TO, as in 1.5s:1.6s or 2000:9000 (ns).")
    begin, end = (int(Decimal(match[1]) * UNITS[match[2]]) for match in found if match)
    if end <= begin:
        raise InputError(f"{text!r} is an empty stretch: its end must lie after its start. Write {begin}:{begin + 1}.")
    return begin, end
