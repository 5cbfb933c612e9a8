"""torchtitan's structured log (JSON lines, one file per rank) -> Trace.

Use it on `structured_logs/*.jsonl` of a torchtitan job, a file or the folder.
A span is a pair of records `<name>_start`, `<name>_end`; pairs nest per thread
and asyncio task. Times are the records' `time_us` (realtime, whole
microseconds) in int64 nanoseconds; a scalar or an instant is a row without
duration, whose value has no column. Records come in any order: `seq_id` puts
each process's back.

A start without an end (the job was killed inside it) lasts until the last
record of its process and is counted in `meta["open"]`; an end without a start
is an error. A last line that was cut short is left out with a warning.

>>> lines = [b'{"log_type": "event", "log_type_name": "fwd_bwd_%s", "time_us": %d, "step": 3}\\n' % row
...          for row in ((b"start", 10), (b"end", 25))]
>>> trace = parse(lines, "a.jsonl")
>>> trace.name_of(0), trace.events["duration_ns"].tolist(), trace.events["step"].tolist()
('fwd_bwd', [15000], [3])
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from headway.core.errors import FormatError
from headway.core.files.safe_files import check_room
from headway.core.units import NS_PER_MS, NS_PER_US
from headway.trace.events.intervals import Nesting
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND

if TYPE_CHECKING:
    from headway.trace.events.content import Content

KINDS_OF_NAMES: tuple[tuple[str, str], ...] = (
    (r"optim", "OPTIM"),
    (r"checkpoint|ckpt|state_dict", "CKPT"),
    (r"data|fetch|batch|tokeniz", "DATA"),
    (r"all_?reduce|all_?gather|reduce_?scatter|broadcast|barrier|dist_sum|dist_mean|dist_max|clip_grad", "COLL"),
    (r"fwd|bwd|forward|backward|valid|eval|loss|train_step_compute", "COMPUTE"),
)
"""What a span's name holds -> its kind, the first match counts; anything else is the host's own work."""

TRAINERS = ("training", "trainer", "train", "")
"""Sources whose busiest thread is the lane 'main'; other processes (generators, controllers) are named on theirs."""

NAN = re.compile(rb": (NaN|-?Infinity)(?=[,}])")

_log = logging.getLogger(__name__)


class _Record(msgspec.Struct):
    """What one line says, as far as a trace holds it."""

    time_us: Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
    log_type_name: str
    log_type: str = "event"
    event_name: str | None = None
    rank: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31) - 1)] = 0
    step: Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None
    source: str = ""
    task_name: str | None = None
    value: float | None = None
    host_name: str = ""
    pid: int = 0
    tid: int = 0
    seq_id: int | None = None

    @property
    def process(self) -> tuple[int, str, str, int]:
        """What numbers its own records."""
        return self.rank, self.source, self.host_name, self.pid


RECORD_BYTES = 600
"""What a record costs in memory, with its row."""

MOST_MS = 1 << 43
"""No span is longer: int64 nanoseconds hold 292 years."""

_Row = tuple[_Record, str, int, int, str]
"""Opening record, name, start and duration in ns, kind."""


def read(content: Content) -> Trace:
    """Read a file that `formats.open_any` recognised."""
    return parse(content, str(content.path))


def parse(pieces: Iterable[bytes], where: str) -> Trace:
    """Decode the lines of a log, which come in pieces; `where` names it in messages.

    Raises `FormatError` with the byte offset on a line that is no record, and with name and step on an end without its
    start.
    """
    records, cut = _records(pieces, where)
    processes: dict[Any, list[_Record]] = defaultdict(list)
    for record in records:
        processes[record.process].append(record)
    rows: list[_Row] = []
    still_open = 0
    for own in processes.values():
        numbered = all(record.seq_id is not None for record in own)
        own.sort(key=(lambda r: (r.seq_id,)) if numbered else (lambda r: (r.time_us,)))
        paired, left = _pairs(own, where)
        rows += paired
        still_open += left
    facts = {"open": still_open, "truncated_bytes": cut}
    return _trace(rows, {"source": "torchtitan", **{key: value for key, value in facts.items() if value}})


def _records(pieces: Iterable[bytes], where: str) -> tuple[list[_Record], int]:
    """Return the records, and how many bytes of a last line were cut short."""
    decoder, records = msgspec.json.Decoder(_Record), []
    for at, line, whole in _lines(pieces):
        if not line.strip():
            continue
        try:
            # Python's own encoder writes NaN, which is no JSON, for a loss that is none.
            records.append(decoder.decode(NAN.sub(b": null", line)))
            check_room(RECORD_BYTES * len(records), at + len(line), where, "records")
        except msgspec.ValidationError as cause:
            raise FormatError(
                f"{where}: the line at byte {at} is no record of torchtitan: {cause}. Drop it."
            ) from cause
        except RecursionError:
            raise FormatError(f"{where}: the line at byte {at} is nested too deep. Drop it.") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as cause:
            if not whole:
                _log.warning(
                    "%s ends inside a record, at byte %d: its last %d bytes are left out", where, at, len(line)
                )
                return records, len(line)
            raise FormatError(f"{where}: the line at byte {at} is damaged: {cause}. Drop it.") from cause
    return records, 0


def _lines(pieces: Iterable[bytes]) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (byte offset, line, whether a line end follows it)."""
    at, rest = 0, b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield at, line, True
            at += len(line) + 1
    if rest:
        yield at, rest, False


def _pairs(records: list[_Record], where: str) -> tuple[list[_Row], int]:
    """Return the rows of one process, whose records stand in order, and how many spans were never closed."""
    stacks: dict[Any, list[_Record]] = defaultdict(list)
    rows: list[_Row] = []
    for record in records:
        name, _, side = record.log_type_name.rpartition("_")
        stack = stacks[record.tid, record.task_name, name]
        if record.log_type == "event" and side == "start":
            stack.append(record)
        elif record.log_type == "event" and side == "end":
            rows.append(_closed(stack, name, record, where))
        elif record.log_type in ("event", "instant"):  # also `<name>_error`, which precedes its end
            title = record.event_name or record.log_type_name
            rows.append((record, title, record.time_us * NS_PER_US, 0, "MARK"))
    last_ns = max((record.time_us for record in records), default=0) * NS_PER_US
    left = [(key[2], opened) for key, stack in stacks.items() for opened in stack]
    for name, record in left:
        start_ns = record.time_us * NS_PER_US
        rows.append((record, name, start_ns, last_ns - start_ns, _kind(name)))
    return rows, len(left)


def _closed(stack: list[_Record], name: str, end: _Record, where: str) -> _Row:
    """Take the span that `end` closes from the open ones of its name."""
    if not stack:
        raise FormatError(
            f"{where}: {name!r} ends in step {end.step} (record {end.seq_id}) but never starts. Give the whole file, "
            "from the start of the job."
        )
    begin = stack.pop()
    duration_ns = (end.time_us - begin.time_us) * NS_PER_US
    if duration_ns < 0:  # The clock of `time_us` was set back; `value` was measured by another.
        if end.value is None or end.value < 0:
            raise FormatError(f"{where}: {name!r} ends before it starts in step {end.step}. Drop the two records.")
        duration_ns = round(min(end.value, MOST_MS) * NS_PER_MS)
    return begin, name, begin.time_us * NS_PER_US, duration_ns, _kind(name)


def _kind(name: str) -> str:
    """Return the kind of a span.

    >>> _kind("fwd_bwd"), _kind("Optimizer"), _kind("gc_collect")
    ('COMPUTE', 'OPTIM', 'HOST')
    """
    return next((kind for part, kind in KINDS_OF_NAMES if re.search(part, name.lower())), "HOST")


def _trace(rows: list[_Row], facts: dict[str, Any]) -> Trace:
    """Build the columns, in order of time."""
    rows.sort(key=lambda row: (row[0].rank, row[2], -row[3]))
    names: dict[str, int] = {}
    lanes: dict[str, int] = {"main": 0}
    titles = _lane_names(record for record, *_ in rows)
    lane_of = {key: lanes.setdefault(title, len(lanes)) for key, title in titles.items()}
    ranks = {record.rank: {"host": record.host_name} if record.host_name else {} for record, *_ in rows}
    columns: dict[str, Any] = {
        "rank": [record.rank for record, *_ in rows],
        "step": [-1 if record.step is None else record.step for record, *_ in rows],
        "kind": [KIND[kind] for *_, kind in rows],
        "name": [names.setdefault(name, len(names)) for _, name, *_ in rows],
        "lane": [lane_of[record.process, record.tid, record.task_name] for record, *_ in rows],
        "start_ns": [start for _, _, start, _, _ in rows],
        "duration_ns": [duration for _, _, _, duration, _ in rows],
    }
    trace = Trace.from_columns(columns, names=list(names), lanes=list(lanes), ranks=ranks, meta=facts)
    events = trace.events
    key = events["rank"].astype("int64") * len(lanes) + events["lane"]
    events["depth"][:] = Nesting.of(key, events["start_ns"], events["duration_ns"]).depth
    return trace


def _lane_names(records: Iterable[_Record]) -> dict[Any, str]:
    """Return (process, thread, task) -> lane: 'main' is the thread without a task that recorded most."""
    found = Counter((record.process, record.tid, record.task_name) for record in records)
    titles: dict[Any, str] = {}
    named: set[Any] = set()
    for (process, tid, task), _ in sorted(found.items(), key=lambda row: (-row[1], str(row[0]))):
        source = process[1]
        prefix = "" if source in TRAINERS else f"{source}/"
        title = task or ("main" if process not in named else f"thread {tid}")
        if task is None:
            named.add(process)
        titles[process, tid, task] = prefix + title
    return titles
