"""Trace Event JSON as columns: what Chrome, Perfetto and the PyTorch profiler write.

Use `decode` to get at the spans of such a file, whoever wrote it: complete
events (`X`), begin and end pairs (`B`, `E`) and instants (`i`, duration 0), in
any order, plus the flow arrows and the facts at the top. The text is taken in
pieces, so memory grows with the columns and not with the file; only the
arguments that become columns are decoded. Times are int64 nanoseconds,
without the file's base time.

>>> events = decode([b'[{"ph": "X", "name": "add", "pid": 1, "tid": 2, "ts": 1.5, "dur": 2}]'], "a.json")
>>> events.labels, events.start_ns.tolist(), events.duration_ns.tolist()
([('', 'add')], [1500], [2000])
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError
from headway.trace.profiler import json_pieces
from headway.trace.profiler.json_pieces import Arguments, Document, TraceEvent, to_ns

SPAN_PHASES = frozenset(("X", "i", "I"))
"""Events that stand for themselves: complete ones, and instants under their new and old letter."""

LAUNCH_FLOWS = ("ac2g", "async_cpu_to_gpu", "async_gpu")
"""Arrow categories from a launch to its kernel; kept only while no event carries a correlation id."""

FORWARD_FLOW = "fwdbwd"
"""Arrow category from a forward op to its backward op."""

NUMBERS = {"correlation": -1, "external_id": -1, "external_id_old": -1, "sequence": -1, "bytes": 0}
"""Argument that becomes a column -> the value where it is missing."""

TELLING = {"cuda_sync": "", "user_annotation": "gloo:", "cuda_runtime": "hipMem", "hip_runtime": "hipMem"}
"""Category -> beginning of the names whose spans keep their whole arguments, beside those that name a collective."""

NO_ARGUMENTS = Arguments()


@dataclass(frozen=True, slots=True)
class Flow:
    """Arrows of one category: `n` ends, each bound to the event that starts at its time on its lane."""

    id: NDArray[np.int64]
    """[n] Ends with one id belong together."""

    lane: NDArray[np.int64]
    """[n] Index into `Events.lanes`."""

    start_ns: NDArray[np.int64]
    """[n] Time of the arrow's end."""


@dataclass(frozen=True, slots=True)
class Events:
    """The `n` spans of a file."""

    labels: list[tuple[str, str]]
    """Table of (category, name) pairs."""

    label: NDArray[np.int64]
    """[n] Index into `labels`."""

    lanes: list[tuple[str, Any, Any]]
    """Table of (category, pid, tid) triples, as the file has them."""

    lane: NDArray[np.int64]
    """[n] Index into `lanes`."""

    start_ns: NDArray[np.int64]
    """[n] Start on the file's clock, its base time not added."""

    duration_ns: NDArray[np.int64]
    """[n] Duration; never negative."""

    numbers: dict[str, NDArray[np.int64]]
    """Each argument of `NUMBERS` -> [n]."""

    kept: dict[int, Arguments]
    """Row -> all arguments, for the rows that name a collective and those of `TELLING`."""

    lane_names: dict[tuple[Any, Any], str]
    """(pid, tid) -> name that the file gives it."""

    flows: dict[str, Flow]
    """Arrows of the categories that are understood."""

    facts: Document
    """What stands beside the events; its own `events` are empty."""

    dropped: int
    """Spans left out: a negative duration, a begin without an end or the reverse."""


def decode(pieces: Iterable[bytes], where: str) -> Events:
    """Decode the JSON text of a trace that comes in `pieces`; `where` names it in messages.

    Raises `FormatError` on text that ends early, is malformed (both with the byte offset) or holds a wrong type (with
    its JSON path), and on a time that is no number.
    """
    collector = _Collector()
    try:
        facts = json_pieces.each_batch(pieces, where, collector.add, collector.reset)
        return collector.finish(facts)
    except TypeError as cause:
        raise FormatError(f"{where}: a pid or tid is a list or an object. Use numbers or text.") from cause
    except FormatError as cause:
        named = str(cause) if where in str(cause) else f"{where}: {cause}"
        raise FormatError(named) from cause


class _Collector:
    """Takes events batch by batch and keeps only their columns."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.labels: dict[tuple[str | None, str], int] = defaultdict(count().__next__)
        self.lanes: dict[tuple[str | None, Any, Any], int] = defaultdict(count().__next__)
        self.columns: dict[str, list[NDArray[np.int64]]] = defaultdict(list)
        self.kept: dict[int, Arguments] = {}
        self.lane_names: dict[tuple[Any, Any], str] = {}
        self.flow_ends: dict[str, list[TraceEvent]] = defaultdict(list)
        self.pairs: list[TraceEvent] = []
        self.rows = 0
        self.dropped = 0
        self.correlated = False

    def add(self, events: list[TraceEvent]) -> None:
        """Take one batch."""
        self._add_spans([event for event in events if event.phase in SPAN_PHASES])
        useless = frozenset(LAUNCH_FLOWS) if self.correlated else frozenset()
        for event in [e for e in events if e.phase not in SPAN_PHASES and e.category not in useless]:
            self._add_other(event)

    def finish(self, facts: Document) -> Events:
        """Return everything that was taken."""
        self._join_pairs()
        flows = {category: self._flow(ends) for category, ends in self.flow_ends.items()}
        columns = {name: np.concatenate(parts) for name, parts in self.columns.items()} if self.columns else {}
        empty = np.zeros(0, dtype=np.int64)
        return Events(
            labels=[(category or "", name) for category, name in self.labels],
            label=columns.get("label", empty),
            lanes=[(category or "", pid, tid) for category, pid, tid in self.lanes],
            lane=columns.get("lane", empty),
            start_ns=columns.get("start_ns", empty),
            duration_ns=columns.get("duration_ns", empty),
            numbers={name: columns.get(name, empty) for name in NUMBERS},
            kept=self.kept,
            lane_names=self.lane_names,
            flows=flows,
            facts=facts,
            dropped=self.dropped,
        )

    def _add_spans(self, spans: list[TraceEvent]) -> None:
        """Append the columns of a batch of spans."""
        duration_ns = to_ns([event.duration for event in spans])
        if len(duration_ns) and int(duration_ns.min()) < 0:
            self.dropped += int((duration_ns < 0).sum())
            spans = [event for event, lasting in zip(spans, (duration_ns >= 0).tolist(), strict=True) if lasting]
            duration_ns = duration_ns[duration_ns >= 0]
        args = [event.args or NO_ARGUMENTS for event in spans]
        columns = self.columns
        columns["duration_ns"].append(duration_ns)
        columns["start_ns"].append(to_ns([event.start for event in spans]))
        columns["label"].append(_codes(self.labels, map(attrgetter("category", "name"), spans)))
        columns["lane"].append(_codes(self.lanes, map(attrgetter("category", "pid", "tid"), spans)))
        for field, blank in NUMBERS.items():
            columns[field].append(whole_numbers(list(map(attrgetter(field), args)), blank))
        self.correlated = self.correlated or bool((columns["correlation"][-1] >= 0).any())
        self._keep(args, columns["label"][-1])
        self.rows += len(spans)

    def _keep(self, args: list[Arguments], label: NDArray[np.int64]) -> None:
        """Keep the arguments of the rows that have more to say than numbers."""
        # Decided once per label of the table, then looked up for all rows.
        labels = enumerate(self.labels)
        telling = [code for code, (kind, name) in labels if kind in TELLING and name.startswith(TELLING[kind])]
        rows = set(np.flatnonzero(np.isin(label, telling)).tolist())
        rows.update([row for row, arguments in enumerate(args) if arguments.collective is not None])
        self.kept.update((self.rows + row, args[row].detached()) for row in sorted(rows))

    def _add_other(self, event: TraceEvent) -> None:
        """Take an event that is no span: half of one, the end of an arrow, the name of a lane."""
        phase, category = event.phase, event.category or ""
        if phase in ("s", "f"):
            if event.id is not None and (category == FORWARD_FLOW or category in LAUNCH_FLOWS):
                self.flow_ends[category].append(event.detached())
        elif phase in ("B", "E"):
            self.pairs.append(event.detached())
        elif phase == "M" and event.name == "thread_name" and event.args is not None:
            self.lane_names[event.pid, event.tid] = str(event.args.label).strip()

    def _join_pairs(self) -> None:
        """Turn begin and end events into complete ones: each end closes the latest open begin of its lane."""
        start_ns = to_ns([event.start for event in self.pairs])
        open_: dict[tuple[Any, Any], list[tuple[TraceEvent, int]]] = defaultdict(list)
        joined: list[TraceEvent] = []
        for row in np.argsort(start_ns, kind="stable").tolist():
            event = self.pairs[row]
            stack = open_[event.pid, event.tid]
            if event.phase == "B":
                stack.append((event, int(start_ns[row])))
            elif stack:
                begin, begin_ns = stack.pop()
                # As text in microseconds, like the durations of the file: one way in for both.
                begin.duration = msgspec.Raw(b"%de-3" % (int(start_ns[row]) - begin_ns))
                joined.append(begin)
            else:
                self.dropped += 1
        self.dropped += sum(map(len, open_.values()))
        if joined:
            self._add_spans(joined)

    def _flow(self, ends: list[TraceEvent]) -> Flow:
        """Return arrow ends as columns; those on a lane without spans are left out."""
        codes = {(pid, tid): code for code, (_, pid, tid) in enumerate(self.lanes)}
        ends = [event for event in ends if (event.pid, event.tid) in codes]
        lane = np.array([codes[event.pid, event.tid] for event in ends], dtype=np.int64)
        return Flow(whole_numbers([event.id for event in ends], -1), lane, to_ns([event.start for event in ends]))


def _codes(table: dict[Any, int], keys: Iterable[Any]) -> NDArray[np.int64]:
    """Return the code of each key, entering new ones into `table`."""
    return np.array(list(map(table.__getitem__, keys)), dtype=np.int64)


def whole_numbers(values: list[Any], blank: int) -> NDArray[np.int64]:
    """Return values as int64 [n]: whole numbers and their texts; `blank` for anything else or beyond int64.

    >>> whole_numbers([7, "12", "0x10", None, 2**80], -1).tolist()
    [7, 12, 16, -1, -1]
    """
    try:
        numbers = np.array(values)
    except (ValueError, OverflowError):
        numbers = np.zeros(0)
    if numbers.dtype == np.int64 and numbers.ndim == 1:
        return numbers
    return np.array([_whole(value, blank) for value in values], dtype=np.int64)


def _whole(value: Any, blank: int) -> int:
    """Return one value as an int that fits int64, else `blank`."""
    try:
        number = int(value, 0) if isinstance(value, str) else int(value)
    except (TypeError, ValueError, OverflowError):
        return blank
    return number if -(2**63) <= number < 2**63 else blank
