"""The entries of a Trace Event JSON file, batch by batch, without holding the file.

Use `each_batch` to walk a file of any size. The text comes in pieces of about
a megabyte; each is cut where one event ends and the next begins, and what lies
before the cut is decoded as a list. A cut is safe: unescaped quotes cannot
stand inside a JSON string, so `}, {"ph"` is never part of one. Should a cut
still fall into nested objects, or the text be damaged, the whole text is
decoded at once, which gives the right events or the byte offset of the fault.

>>> seen = []
>>> facts = each_batch([b'{"traceEvents": [{"ph": "X"}, {"ph"', b': "M"}], "baseTimeNanoseconds": 7}'], "a.json",
...     lambda events: seen.extend(event.phase for event in events), seen.clear)
>>> seen, facts.base_ns
(['X', 'M'], 7)

Decimal texts in microseconds -> int64 nanoseconds, many at a time and never through a float.

Chrome and Kineto write `ts` and `dur` as decimal microseconds, whatever their
`displayTimeUnit` says. A float64 no longer tells nanoseconds apart from about
52 days of microseconds on, and Unix times lie beyond. Here the digits
themselves are added up, column by column; what is not plain digits with at
most three decimals goes to `us_text_to_ns`, one by one.

>>> to_ns([b"1712195495505543.2", b"-3", b"2.5e3", b"0.0005"]).tolist()
[1712195495505543200, -3000, 2500000, 0]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import check_room, cost_of, decode_json
from headway.core.units import us_text_to_ns

ZERO = msgspec.Raw(b"0")
ABSENT = msgspec.Raw(b"")

BLANK_BYTES = 1 << 16
"""No text of a trace holds a run of blanks of this length."""

EVENT_BYTES = 120
"""What an object of the text becomes in memory: an event, or its arguments of which half is read."""


class Arguments(msgspec.Struct, gc=False):
    """The arguments of an event that become columns; the rest is skipped unread. Any JSON value may stand in each."""

    correlation: Any = -1
    external_id: Any = msgspec.field(default=-1, name="External id")
    external_id_old: Any = msgspec.field(default=-1, name="external id")
    sequence: Any = msgspec.field(default=-1, name="Sequence number")
    bytes: Any = 0
    size: Any = 0
    collective: Any = msgspec.field(default=None, name="Collective name")
    elements_in: Any = msgspec.field(default=0, name="In msg nelems")
    elements_out: Any = msgspec.field(default=0, name="Out msg nelems")
    dtype: Any = ""
    group_name: Any = msgspec.field(default=None, name="Process Group Name")
    group_number: Any = msgspec.field(default=None, name="Process Group ID")
    group_text: Any = msgspec.field(default="", name="Process Group Description")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    group_size: Any = msgspec.field(default=0, name="Group size")
    rank_start: Any = msgspec.field(default=0, name="Global rank start")
    rank_stride: Any = msgspec.field(default=0, name="Global rank stride")
    group_seq: Any = msgspec.field(default=-1, name="Seq")
    source_rank: Any = msgspec.field(default=-1, name="Src Rank")
    target_rank: Any = msgspec.field(default=-1, name="Dst Rank")
    awaited_record: Any = msgspec.field(default=-1, name="wait_on_cuda_event_record_corr_id")
    awaited_lane: Any = msgspec.field(default=-1, name="wait_on_stream")
    input_dims: msgspec.Raw = msgspec.field(default=ABSENT, name="Input Dims")
    input_types: msgspec.Raw = msgspec.field(default=ABSENT, name="Input type")
    label: Any = msgspec.field(default="", name="name")

    def detached(self) -> Arguments:
        """Return these arguments without a hold on the text they were decoded from."""
        self.input_dims, self.input_types = self.input_dims.copy(), self.input_types.copy()
        return self


class TraceEvent(msgspec.Struct, gc=False):
    """One entry of `traceEvents`."""

    phase: str = msgspec.field(default="", name="ph")
    category: str | None = msgspec.field(default="", name="cat")
    name: str = ""
    pid: Any = 0
    tid: Any = 0
    start: msgspec.Raw = msgspec.field(default=ZERO, name="ts")
    duration: msgspec.Raw = msgspec.field(default=ZERO, name="dur")
    id: Any = None
    args: Arguments | None = None

    def detached(self) -> TraceEvent:
        """Return this event without a hold on the text it was decoded from."""
        self.start, self.duration = self.start.copy(), self.duration.copy()
        self.args = self.args.detached() if self.args is not None else None
        return self


class Document(msgspec.Struct):
    """The object form of a file; the array form is only its `events`."""

    events: list[TraceEvent] = msgspec.field(name="traceEvents")
    distributed: Any = msgspec.field(default=None, name="distributedInfo")
    devices: Any = msgspec.field(default=None, name="deviceProperties")
    base_ns: int = msgspec.field(default=0, name="baseTimeNanoseconds")
    host: Any = msgspec.field(default="", name="host_name")


_DOCUMENT = msgspec.json.Decoder(Document)
_LIST = msgspec.json.Decoder(list[TraceEvent])
_ARRAY = re.compile(rb'"traceEvents"\s*:\s*\[')
_CUTS = (
    re.compile(rb'\}\s*,(?=\s*\{\s*"(?:ph|cat|name|pid|tid|ts|dur|args|id|s)"\s*:)'),
    re.compile(rb'\}\s*,(?=\s*\{\s*"\w[\w .-]{0,40}"\s*:)'),
)
"""Between two events: the next one begins with a key of the format; failing that, with any key."""


def each_batch(
    pieces: Iterable[bytes], where: str, take: Callable[[list[TraceEvent]], None], restart: Callable[[], None]
) -> Document:
    """Hand the events of the text in `pieces` to `take`, batch by batch, and return the facts beside them.

    `restart` is called when what was handed over so far is void, because the text has to be read in one go. `pieces`
    must be iterable a second time then (a list, or an object whose `__iter__` starts afresh).

    Raises `FormatError` as `json_events.decode` says.
    """
    try:
        return _in_pieces(iter(pieces), take)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        restart()
        document = _at_once(b"".join(pieces), where)
        take(document.events)
        document.events = []
        return document


def _events(text: bytes) -> list[TraceEvent]:
    """Decode a list of events; `FormatError` where it would take more memory than its text is worth."""
    check_room(cost_of(text, EVENT_BYTES), len(text), "a list of events", "JSON values")
    return _LIST.decode(text)


def _in_pieces(pieces: Iterator[bytes], take: Callable[[list[TraceEvent]], None]) -> Document:
    """Decode batch by batch; raise `msgspec.DecodeError` when the text does not allow it."""
    head, rest = _head(pieces)
    for piece in pieces:
        if _is_blank(piece):
            continue
        cut = _last_cut(piece)
        if cut:
            take(_events(b"".join((b"[", rest, memoryview(piece)[: cut - 1], b"]"))))
            rest = piece[cut:]
        else:
            rest += piece
    if head is None:
        take(_events(_closed(b"[" + rest)))
        return Document([])
    check_room(cost_of(rest, EVENT_BYTES), len(rest), "the end of the trace", "JSON values")
    last = _DOCUMENT.decode(b'{"traceEvents":[' + rest)
    take(last.events)
    first = _DOCUMENT.decode(head + b'"traceEvents":[]}')
    return Document(
        [],
        last.distributed if last.distributed is not None else first.distributed,
        last.devices if last.devices is not None else first.devices,
        last.base_ns or first.base_ns,
        last.host or first.host,
    )


def _is_blank(piece: bytes) -> bool:
    """Say whether a piece is a long run of blanks, which says nothing; a packed file can hold thousands of them."""
    return len(piece) >= BLANK_BYTES and not piece.strip()


def _head(pieces: Iterator[bytes]) -> tuple[bytes | None, bytes]:
    """Return the text before the array of events (None when the text is nothing but the array) and what follows it."""
    text = b""
    for piece in pieces:
        text = (text if _is_blank(piece) else text + piece).removeprefix(b"\xef\xbb\xbf")
        if text.lstrip()[:1] == b"[":
            return None, text.lstrip()[1:]
        found = _ARRAY.search(text)
        if found:
            return text[: found.start()], text[found.end() :]
    raise msgspec.DecodeError("no array of events")


def _last_cut(text: bytes) -> int:
    """Return the position behind the last comma between two events, 0 when there is none."""
    for pattern in _CUTS:
        reach = 4096
        while True:
            begin = max(len(text) - reach, 0)
            cuts = [found.end() for found in pattern.finditer(text, begin)]
            if cuts:
                return cuts[-1]
            if not begin:
                break
            reach *= 4
    return 0


def _at_once(text: bytes, where: str) -> Document:
    """Decode the whole text, or say what is wrong with it and where."""
    check_room(cost_of(text, EVENT_BYTES), len(text), where, "JSON values")
    try:
        if text.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
            return Document(_LIST.decode(_closed(text.removeprefix(b"\xef\xbb\xbf"))))
        return _DOCUMENT.decode(text.removeprefix(b"\xef\xbb\xbf"))
    except RecursionError:
        raise FormatError(f"{where} is nested too deep for a trace. Export or copy the trace again.") from None
    except msgspec.ValidationError as cause:
        raise FormatError(f"{where} is not Trace Event JSON: {cause}. Export the trace again.") from cause
    except (msgspec.DecodeError, UnicodeDecodeError) as cause:
        raise FormatError(f"{where} {_fault(str(cause), len(text))}. Export or copy the trace again.") from cause


def _closed(text: bytes) -> bytes:
    """Add the closing bracket that the array form may lack, says the format."""
    body = text.rstrip()
    return body.removesuffix(b",") + b"]" if body.endswith((b"}", b"},")) else text


def _fault(message: str, size: int) -> str:
    """Say what is wrong with JSON text, and at which byte."""
    if "truncated" in message:
        return f"is truncated JSON: the text ends at byte {size} inside a value"
    offset = re.search(r"\(byte (\d+)\)", message)
    return f"is malformed JSON at byte {offset[1]}: {message}" if offset else f"is malformed JSON: {message}"


def plain(raw: msgspec.Raw) -> Any:
    """Return the value of JSON text that was kept undecoded, None for nothing."""
    return decode_json(bytes(raw), "an argument of an event", Any) if len(bytes(raw)) else None


MAX_DIGITS = 16
"""Whole digits that the fast path takes: Unix times in microseconds have 16, and below 9e15 they fit int64 ns."""

_COMMA, _DOT, _MINUS, _ZERO, _NINE = b",.-09"


def to_ns(texts: Sequence[Any]) -> NDArray[np.int64]:
    """Convert decimal texts (bytes-like, JSON numbers) in microseconds to int64 nanoseconds [n].

    Raises `FormatError` naming the first text that is no number, or beyond int64.
    """
    if not len(texts):
        return np.zeros(0, dtype=np.int64)
    joined = np.frombuffer(b",".join([*texts, b""]), dtype=np.uint8)
    ends = np.flatnonzero(joined == _COMMA)
    if len(ends) != len(texts):
        raise FormatError("a time holds a comma. Times are plain JSON numbers; write it again.")
    # All texts as one array of bytes, and where each begins, has its dot and ends (at its comma):
    #
    #     joined   1 2 . 5 , - 3 , 7 . 1 2 5 0 ,
    #     starts   ^         ^     ^                the fast path takes [minus] digits [. up to 3 digits]; the last text
    #     dots         ^         ^   ^              here has four decimals and goes through `_slow`
    #     ends             ^     ^             ^
    starts = np.concatenate([[0], ends[:-1] + 1])
    dots, num_dots = _dots(joined, starts, ends)
    negative = joined[starts] == _MINUS
    firsts = starts + negative
    whole, whole_plain = _digits(joined, firsts, dots)
    thousandths, rest_plain = _thousandths(joined, dots, ends)
    value = whole * 1000 + thousandths
    plain = whole_plain & rest_plain & (num_dots <= 1) & (dots > firsts) & (ends - dots <= 4)
    result = np.where(negative, -value, value)
    for row in np.flatnonzero(~plain).tolist():
        result[row] = _slow(bytes(texts[row]))
    return result


def _dots(
    joined: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where each text's first dot stands (its end when it has none), and how many it has."""
    where = np.flatnonzero(joined == _DOT)
    # A dot belongs to the first text that ends behind it.
    owner = np.searchsorted(ends, where)
    first = ends.copy()
    first[owner[::-1]] = where[::-1]  # Of several dots the first one is written last, so it stays.
    return first, np.bincount(owner, minlength=len(ends))


def _digits(
    joined: NDArray[np.uint8], firsts: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the number that bytes [first, stop) of each text spell, and whether they are 1..16 digits."""
    lengths = stops - firsts
    plain = (lengths >= 1) & (lengths <= MAX_DIGITS)
    value = np.zeros(len(firsts), dtype=np.int64)
    power = 1
    for back in range(1, min(int(lengths.max(initial=0)), MAX_DIGITS) + 1):
        rows = lengths >= back
        # All texts at once, from the last digit backwards: rows that are too short read a byte of their own and add 0.
        digit = joined[stops - np.minimum(back, np.maximum(lengths, 0))]
        plain &= ~rows | ((digit >= _ZERO) & (digit <= _NINE))
        value += np.where(rows, digit.astype(np.int64) - _ZERO, 0) * power
        power *= 10
    return value, plain & (value < 9_000_000_000_000_000)


def _thousandths(
    joined: NDArray[np.uint8], dots: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return up to three decimals of each text as thousandths, and whether they are digits (a bare dot is not)."""
    lengths = ends - dots - 1
    plain = lengths != 0
    value = np.zeros(len(dots), dtype=np.int64)
    for position, weight in ((1, 100), (2, 10), (3, 1)):
        rows = lengths >= position
        # A text with fewer decimals reads its comma here, which `rows` leaves out.
        digit = joined[np.minimum(dots + position, ends)]
        plain &= ~rows | ((digit >= _ZERO) & (digit <= _NINE))
        value += np.where(rows, digit.astype(np.int64) - _ZERO, 0) * weight
    return value, plain


def _slow(text: bytes) -> int:
    """Convert one text that the fast path refuses: an exponent, more decimals, a quoted number."""
    try:
        value = us_text_to_ns(text.decode().strip('"'))
    except (InputError, UnicodeDecodeError) as cause:
        raise FormatError(
            f"{text[:40]!r} is not a time in microseconds. Times are JSON numbers; write the file again."
        ) from cause
    if not -(2**63) <= value < 2**63:
        raise FormatError(f"{text[:40]!r} us does not fit int64 nanoseconds. Subtract a base time from every event.")
    return value
