"""What the rules of `causes.py` read off a ledger, and how they word it. Seconds are device-seconds.

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

from collections.abc import Mapping, Sequence

from headway.core.units import NS_PER_S, format_bytes, format_fraction, format_seconds, plural
from headway.ledger.answers.ledger import Ledger
from headway.ledger.booking.account import SpanFacts
from headway.ledger.cause import SampledLine

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


def lines_in_words(lines: Sequence[SampledLine]) -> list[str]:
    """Return the first of the sampled lines, each with its share of the time of all: 'item at train.py:41 80 %'."""
    total_ns = sum(row.ns for row in lines)
    return [f"{row.words} {share}" for row in lines[:MOST_LINES] if (share := share_words(row.ns, total_ns))]


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
