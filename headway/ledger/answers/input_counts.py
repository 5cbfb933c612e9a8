"""What caches and orders of the input counted, in words: hit rates per tier, bytes, substitutions, what was skipped.

From `RunFacts.input`: name -> number by key, ranks
summed. Names and keys are the writers' own; `hits` with `misses`, and
`substituted` with `items`, become rates.

>>> count_words({"cache.decoded": {"hits": 30, "misses": 10, "bytes": 2_000_000}, "examples": {"skipped": 3}})
['cache.decoded: 75 % of 40 reads hit, 2.0 MB', 'examples: 3 skipped']
"""

from __future__ import annotations

from collections.abc import Mapping

from headway.core.units import format_bytes, format_fraction

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
