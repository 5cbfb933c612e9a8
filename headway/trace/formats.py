"""Which reader a file needs, told apart by its content, and which writer a suffix names.

Use `open_any` for anything that holds events: a run folder, headway's own
Parquet, the straggler operation traces, Kineto or Chrome JSON (gzip or
plain), Flight Recorder dumps (pickle or JSON), or a folder of such files.
Suffixes are never looked at when reading. All times come out as int64
nanoseconds.

>>> sorted(READERS)
['chrome', 'flight-json', 'flight-pickle', 'headway', 'headway-chrome', 'run', 'straggler']
>>> sorted(WRITERS)
['.json', '.json.gz', '.parquet', '.straggler.parquet']
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from headway.core.errors import FormatError, InputError
from headway.core.units import NS_PER_S
from headway.trace.content import PARQUET_MAGIC, Content
from headway.trace.trace import Trace, concat
from headway.trace.vocabulary import KINDS

FLIGHT_KEYS = (b'"pg_config"', b'"pg_status"', b'"collective_seq_id"', b'"comm_lib_version"', b'"nccl_version"')
"""A Flight Recorder dump in JSON has `entries` and at least one of these."""


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


def open_any(path: str | Path) -> Trace:
    """Read the trace at `path`, whatever it is.

    Raises `FormatError` when no reader recognises the content (the message lists what is known and what the file looks
    like) or when the content is damaged, `InputError` when there is no such path.
    """
    content = Content(Path(path))
    if not content.path.exists():
        raise InputError(f"{path} does not exist. Check the path; a run folder or a trace file is needed.")
    name = recognise(content)
    if name:
        return _read(READERS[name], content)
    if content.path.is_dir():
        return _open_folder(content.path)
    looks = _looks(content)
    if looks in (EMPTY, DAMAGED):
        raise FormatError(f"{path} is not a trace headway can read: it {looks}. Write or copy the file again.")
    known = "; ".join(entry.title for entry in READERS.values())
    raise FormatError(f"{path} is not a trace headway can read: it {looks}. Give one of: {known}.")


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
    _resolve(WRITERS[suffix])(trace, Path(path))


def open_run(path: Path) -> Trace:
    """Return the trace of the last attempt of the run folder at `path`, all ranks."""
    run: Any = _resolve("headway.trace.runs:Run")
    return cast(Trace, run.open(path).trace)


def describe(trace: Trace) -> dict[str, Any]:
    """Return what `headway trace info` says of a trace: counts, span, kinds, lanes, groups, coverage; JSON values."""
    start_ns, end_ns = trace.span_ns
    ranks, steps = np.unique(trace.events["rank"]), np.unique(trace.events["step"])
    return {
        "schema": "headway.trace-info/1",
        "source": trace.meta.get("source", "unknown"),
        "events": len(trace),
        "ranks": ranks[ranks >= 0].tolist(),
        "steps": steps[steps >= 0].tolist(),
        "span_s": (end_ns - start_ns) / NS_PER_S,
        "kinds": _by_kind(trace),
        "lanes": [trace.lanes[code] for code in np.unique(trace.events["lane"])],
        "groups": {str(key): dict(value) for key, value in trace.groups.items()},
        "longest": _longest(trace),
        "coverage": trace.meta.get("coverage"),
    }


def _by_kind(trace: Trace) -> dict[str, dict[str, int]]:
    """Return event count and summed duration of each kind that occurs."""
    kinds = trace.events["kind"]
    counts = np.bincount(kinds, minlength=len(KINDS))
    totals = {int(kind): int(trace.events["duration_ns"][kinds == kind].sum()) for kind in np.unique(kinds)}
    return {KINDS[kind]: {"events": int(counts[kind]), "duration_ns": total} for kind, total in totals.items()}


def _longest(trace: Trace, count: int = 10) -> dict[str, dict[str, int]]:
    """Return event count and summed duration of the names with the largest sum, the largest first."""
    codes, durations = trace.events["name"], trace.events["duration_ns"]
    named = codes >= 0
    totals = np.zeros(len(trace.names), dtype=np.int64)
    np.add.at(totals, codes[named], durations[named])
    counts = np.bincount(codes[named], minlength=len(trace.names))
    order = [code for code in np.argsort(-totals, kind="stable")[:count].tolist() if counts[code]]
    return {trace.names[code]: {"events": int(counts[code]), "duration_ns": int(totals[code])} for code in order}


def _open_folder(path: Path) -> Trace:
    """Merge every trace file of a folder that is no run, in order of name."""
    contents = [Content(file) for file in sorted(path.iterdir()) if file.is_file()]
    found = [(name, content) for content in contents if (name := recognise(content))]
    if not found:
        raise FormatError(f"the folder {path} is no run and holds no trace file. Name a run folder or a trace.")
    return concat([_read(READERS[name], content) for name, content in found])


def _read(entry: Format, content: Content) -> Trace:
    """Call the reader of `entry`."""
    return cast(Trace, _resolve(entry.reader)(content.path if entry.takes == "path" else content))


def _resolve(target: str) -> Callable[..., Any]:
    """Return the function that 'module:function' names."""
    module, function = target.split(":")
    return cast(Callable[..., Any], getattr(importlib.import_module(module), function))


def _looks(content: Content) -> str:
    """Say in words what an unknown file looks like."""
    opening = content.opening
    if not content.head:
        return EMPTY
    if content.head.startswith(PARQUET_MAGIC):
        columns = _resolve("headway.trace.parquet:columns_of")(content.path)
        return f"is Parquet with the columns {', '.join(columns[:8])}" if columns else DAMAGED
    if opening.startswith((b"{", b"[")):
        return f"is JSON that starts with {opening[:60].decode(errors='replace')!r} and has no 'traceEvents'"
    return f"starts with the bytes {opening[:16]!r}"


def _is_run(content: Content) -> bool:
    return content.path.is_dir() and bool(_resolve("headway.trace.runs:is_run")(content.path))


def _is_own(content: Content) -> bool:
    return content.head.startswith(PARQUET_MAGIC) and bool(_resolve("headway.trace.parquet:is_ours")(content.path))


def _is_straggler(content: Content) -> bool:
    is_parquet = content.head.startswith(PARQUET_MAGIC)
    return is_parquet and "optype" in _resolve("headway.trace.parquet:columns_of")(content.path)


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


READERS: dict[str, Format] = {
    "run": Format("a run folder (headway run)", _is_run, "headway.trace.formats:open_run", "path"),
    "headway": Format("headway Parquet", _is_own, "headway.trace.parquet:read", "path"),
    "straggler": Format("straggler operation Parquet", _is_straggler, "headway.trace.straggler:read", "path"),
    "headway-chrome": Format("headway's Chrome JSON", _is_own_chrome, "headway.trace.chrome:read", "itself"),
    "chrome": Format("Kineto or Chrome JSON, gzip or plain", _is_chrome, "headway.trace.kineto:read", "itself"),
    "flight-json": Format("a Flight Recorder dump as JSON", _is_flight_json, "headway.trace.flight:read", "itself"),
    "flight-pickle": Format("a Flight Recorder dump", _is_flight_pickle, "headway.trace.flight:read", "itself"),
}
"""Every format that is read, in the order they are tried. Adding one is adding a line here."""

WRITERS: dict[str, str] = {
    ".parquet": "headway.trace.parquet:write",
    ".straggler.parquet": "headway.trace.straggler:write",
    ".json": "headway.trace.chrome:write",
    ".json.gz": "headway.trace.chrome:write",
}
"""Suffix -> 'module:function' called with (trace, path)."""
