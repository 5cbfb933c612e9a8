"""The ledger: every device-nanosecond of a run in exactly one bucket.

`Ledger.of` takes a recorded run, a profiler trace or an operation trace. The
total is `devices * wall_ns`: each device is allocated for the whole wall, and
the buckets sum to that product exactly. Times are int64 ns; `to_json` adds
device-seconds.

>>> trace = Trace.from_columns({"rank": [0, 0], "start_ns": [0, 40], "duration_ns": [100, 50]},
...                            name=[0, 1], names=["process", "step"])
>>> ledger = Ledger.of(trace)
>>> ledger.devices, ledger.wall_ns, ledger.goodput, sum(ledger.ledger_ns.values())
(1, 100, 0.5, 100)

What the rules of `causes.py` read off a ledger, in device-seconds, and how they word it:

>>> mean_of(1.5, 3), also_waited(0.0), counted(3, "save"), counted(0, "save")
('500 ms each', '', '3 saves', 'saves')

What caches and orders of the input counted, in words: hit rates per tier, bytes, substitutions, what was skipped.

From `RunFacts.input`: name -> number by key, ranks
summed. Names and keys are the writers' own; `hits` with `misses`, and
`substituted` with `items`, become rates.

>>> count_words({"cache.decoded": {"hits": 30, "misses": 10, "bytes": 2_000_000}, "examples": {"skipped": 3}})
['cache.decoded: 75 % of 40 reads hit, 2.0 MB', 'examples: 3 skipped']
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.core.units import NS_PER_S, format_bytes, format_fraction, format_seconds, plural
from headway.ledger.booking.account import Account, BookedTime, SpanFacts, blank_subs, bound_of
from headway.ledger.buckets import BUCKET_CODE_OF_SUB, BUCKETS, ONCE_PER_RUN, SUB_LINES, SUBS
from headway.ledger.cause import Cause, SampledLine
from headway.ledger.runs.kernels import profile_account
from headway.ledger.runs.recorded import RECORDED, RunSource, recorded_account, recorded_trace_account
from headway.trace.events.intervals import Ints
from headway.trace.events.parts import Parts
from headway.trace.events.trace import Trace

SCHEMA = "headway.why/2"

OPERATIONS = "straggler"
"""Source of an operation trace."""

LOGGERS = ("kineto", "chrome", "torchtitan")
"""Sources in which a row called 'step' or 'process' is somebody else's."""

MAX_UNKNOWN_FRACTION = 0.02
"""More than this in `unknown` and the ledger says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger(BookedTime):
    """An exact partition of device time. Build it with `Ledger.of`."""

    devices: int
    """Devices that the run held, each for `wall_ns`; for a trace, the ranks seen in its rows."""

    ledger_ns: Mapping[str, int]
    """Bucket -> device-nanoseconds; every bucket is there, they sum to `devices * wall_ns`."""

    sub_ns: Mapping[str, int]
    """Sub-line -> device-nanoseconds; they partition their bucket; empty ones are left out."""

    coverage: float
    """Share of device time that is not unknown."""

    by_rank_ns: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Rank -> bucket -> ns."""

    loader_ns: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Loader -> sub-line -> device-ns spent on it.

    The lines of bucket `input` add up to the bucket where a loader brought every batch; `eval.input` is what
    evaluations waited for it.
    """

    @classmethod
    def of(cls, source: RunSource | Trace | Parts | Sequence[Trace | Parts | RunSource]) -> Ledger:
        """Account for a run, a trace, or several of them (ranks or hosts) together; parts are read a rank at a time.

        Raises `InputError` when there is nothing that tells time, and for what is neither a run nor a trace.
        """
        parts: list[Any] = list(source) if isinstance(source, (list, tuple)) else [source]
        if not parts:
            raise InputError("there is nothing to account for: the list is empty. Give a run or a trace.")
        for part in parts:
            if not isinstance(part, (Trace, Parts, RunSource)):
                raise InputError(f"{type(part).__name__} is neither a run nor a trace. Open it with Trace.open(path).")
        traces = [Parts.of(part) for part in parts if isinstance(part, (Trace, Parts))]
        if len(traces) == len(parts):
            return cls.from_account(_account_of(Parts.joined(traces)))
        if traces:
            raise InputError("runs and bare traces cannot share one ledger. Give only runs, or only traces.")
        return cls.from_account(recorded_account(parts))

    @classmethod
    def from_account(cls, account: Account) -> Ledger:
        """Sum an account over its ranks."""
        by_rank = {rank: buckets_of(amounts) for rank, amounts in account.sub_ns.items()}
        total = sum(account.sub_ns.values(), start=blank_subs())
        ledger_ns = buckets_of(total)
        total_ns = len(by_rank) * account.wall_ns
        notes = list(account.notes)
        if ledger_ns["unknown"] > MAX_UNKNOWN_FRACTION * total_ns:
            lines = [f"{sub} ({SUB_LINES[sub]})" for sub in subs_of(total) if sub.startswith("unknown.")]
            share = format_fraction(ledger_ns["unknown"] / total_ns)
            notes.append(f"{share} of device time is unknown: {', '.join(lines)}")
        booked = {shared.name: getattr(account, shared.name) for shared in fields(BookedTime)}
        booked |= {"notes": tuple(notes), "loader_calls": dict(sorted(account.loader_calls.items()))}
        return cls(
            **booked,
            devices=len(by_rank),
            ledger_ns=ledger_ns,
            sub_ns=subs_of(total),
            coverage=1.0 - ledger_ns["unknown"] / total_ns if total_ns else 0.0,
            by_rank_ns=by_rank,
            loader_ns={loader: subs_of(amounts) for loader, amounts in sorted(account.loader_ns.items())},
        )

    @property
    def total_ns(self) -> int:
        """Device-nanoseconds allocated: `devices * wall_ns`."""
        return self.devices * self.wall_ns

    @property
    def goodput(self) -> float:
        """Useful device-time whose result was kept / allocated device-time, 0..1."""
        return self.ledger_ns["useful"] / self.total_ns if self.total_ns else 0.0

    @property
    def step_goodput(self) -> float:
        """Useful device-time / device-time of all that comes with the steps, 0..1: goodput of a run without end."""
        steady = sum(amount for bucket, amount in self.ledger_ns.items() if bucket not in ONCE_PER_RUN)
        return self.ledger_ns["useful"] / steady if steady else 0.0

    @property
    def tells_goodput(self) -> bool:
        """Whether the share of useful work is known: not where a device may have worked for longer than it did."""
        return self.sub_ns.get("unknown.device", 0) <= self.ledger_ns["useful"]

    @property
    def bound(self) -> str:
        """What bounds the steps: 'device' where that is at work for most of their time, else the bucket that takes most
        of the rest; '' without steps."""
        return bound_of(self.step_ns)[0]

    def fraction(self, name: str) -> float:
        """Return the share of a bucket or sub-line in the allocated device time.

        Raises `UnknownNameError` on a name that is neither.
        """
        pick({**dict.fromkeys(BUCKETS), **SUB_LINES}, name, "bucket or sub-line")
        amount = self.ledger_ns[name] if name in self.ledger_ns else self.sub_ns.get(name, 0)
        return amount / self.total_ns if self.total_ns else 0.0

    def to_json(
        self,
        *,
        causes: Iterable[Cause] = (),
        straggler: Mapping[str, Any] | None = None,
        fidelity: float | None = None,
    ) -> dict[str, Any]:
        """Return the object of schema `headway.why/2`; what another room knows is passed in."""
        return {
            "schema": SCHEMA,
            "devices": self.devices,
            "steps": self.steps,
            "wall_ns": self.wall_ns,
            "wall_s": self.wall_ns / NS_PER_S,
            "goodput": self.goodput if self.tells_goodput else None,
            "step_goodput": self.step_goodput if self.tells_goodput else None,
            "ledger": {bucket: amount / NS_PER_S for bucket, amount in self.ledger_ns.items()},
            "ledger_ns": dict(self.ledger_ns),
            "sub": {sub: amount / NS_PER_S for sub, amount in self.sub_ns.items()},
            "sub_ns": dict(self.sub_ns),
            "basis": dict(self.basis),
            "causes": [cause.to_json() for cause in causes],
            "straggler": None if straggler is None else dict(straggler),
            "coverage": self.coverage,
            "fidelity": fidelity,
            "notes": list(self.notes),
        }


def _account_of(parts: Parts) -> Account:
    """Account for a bare trace by what it holds."""
    if not len(parts):
        raise InputError("the trace has no events, so it tells no time. Record at least one step.")
    if parts.meta.get("source") == OPERATIONS:
        # Other traces' commands start without the reader of these, and what it needs.
        from headway.ledger.operations.root_cause import operation_account

        return operation_account(parts.whole())
    if _recorded(parts):
        return recorded_trace_account(parts)
    return profile_account(parts)


def _recorded(parts: Parts) -> bool:
    """Return whether some row bears a name that headway's recorder writes; other loggers have their own 'step'."""
    if parts.meta.get("source") in LOGGERS or not set(RECORDED) & set(parts.tables.names):
        return False
    names = (parts.read({"rank": (rank, rank + 1)}, ("name",)) for rank in parts.numbers)
    return any(bool(part.named(*RECORDED).any()) for part in names)


def buckets_of(sub_ns: Ints) -> dict[str, int]:
    """Sum sub-lines [len(SUBS)] by bucket; every bucket is in the result."""
    amounts = np.zeros(len(BUCKETS), np.int64)
    np.add.at(amounts, np.array(BUCKET_CODE_OF_SUB), sub_ns)
    return dict(zip(BUCKETS, amounts.tolist(), strict=True))


def subs_of(sub_ns: Ints) -> dict[str, int]:
    """Return the sub-lines [len(SUBS)] that are not zero."""
    return {sub: int(amount) for sub, amount in zip(SUBS, sub_ns, strict=True) if amount}


TRY = "; try headway whatif --set "
"""Separates advice from the what-if edit that predicts it; dropped where nothing can be replayed."""


def booked_s(ledger: Ledger, *subs: str) -> float:
    """Return device-seconds of some sub-lines."""
    return sum(ledger.sub_ns.get(sub, 0) for sub in subs) / NS_PER_S


def blamed_s(ledger: Ledger, bucket: str, share: float = 1.0) -> float:
    """Return what other ranks waited because a rank spent more in `bucket`."""
    return share * sum(row.get(bucket, 0) for row in ledger.lateness.blamed_ns.values()) / NS_PER_S


def share_of(ledger: Ledger, bucket: str, *subs: str) -> float:
    """Return the share of some sub-lines in their bucket."""
    whole = ledger.ledger_ns[bucket]
    return sum(ledger.sub_ns.get(sub, 0) for sub in subs) / whole if whole else 0.0


def span_of(ledger: Ledger, name: str) -> SpanFacts:
    """Return the totals of a recorded name."""
    return ledger.spans.get(name, SpanFacts(0, 0, 0, 0))


def also_waited(waited_s: float) -> str:
    """Mention what other ranks waited."""
    return f"; other ranks waited {format_seconds(waited_s)} more for it" if waited_s > 0 else ""


def mean_of(total_s: float, count: int) -> str:
    """Return the mean, in words."""
    return f"{format_seconds(total_s / count)} each" if count else format_seconds(total_s)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun; the noun alone where time was booked and nothing was counted."""
    return plural(count, noun) if count else f"{noun}s"


def the_longest(max_ns: int) -> str:
    """Return the longest of what was counted, in words; '' where nothing was."""
    return f", the longest for {format_seconds(max_ns / NS_PER_S)}" if max_ns else ""


def share_words(part_ns: int, whole_ns: int) -> str:
    """Return a share in whole percent; '' where that is none."""
    return format_fraction(part_ns / whole_ns, 0) if 200 * part_ns > whole_ns else ""


MOST_LINES = 3
"""Lines of the script that are named in one piece of evidence."""


def lines_in_words(lines: Sequence[SampledLine], of: Sequence[SampledLine] = ()) -> list[str]:
    """Return the first of the sampled lines, each with its share of the time of all: 'item at train.py:41 80 %'.

    All are `lines`, or those in `of`; samples whose line is not known count in the whole.
    """
    total_ns = sum(row.ns for row in of or lines)
    named = [row for row in lines if row.line][:MOST_LINES]
    return [f"{row.words} {share}" for row in named if (share := share_words(row.ns, total_ns))]


RATES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "hits": ("reads hit", ("hits", "misses"), "misses"),
    "substituted": ("examples substituted", ("items",), "items"),
}
"""Key -> what its share is called, the keys that add up to the whole, the key that is then said already."""


def count_words(counts: Mapping[str, Mapping[str, int | float]]) -> list[str]:
    """Return a line per name, what counted nothing left out."""
    lines = []
    for name, numbers in sorted(counts.items()):
        words = [word for key in numbers if (word := _word(key, numbers))]
        lines += [f"{name}: {', '.join(words)}"] if words else []
    return lines


def _word(key: str, numbers: Mapping[str, int | float]) -> str:
    """Return what one number says, '' when another one says it or it is 0."""
    if key in RATES:
        label, parts, _ = RATES[key]
        whole = sum(numbers.get(part, 0) for part in parts)
        if whole:
            return f"{format_fraction(numbers[key] / whole, 0)} of {whole} {label}"
    if any(rate in numbers and said == key for rate, (_, _, said) in RATES.items()) or not numbers[key]:
        return ""
    return format_bytes(numbers[key]) if key.endswith("bytes") else f"{numbers[key]} {key.replace('_', ' ')}"
