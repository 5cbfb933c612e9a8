"""Decimal texts in microseconds -> int64 nanoseconds, many at a time and never through a float.

Chrome and Kineto write `ts` and `dur` as decimal microseconds, whatever their
`displayTimeUnit` says. A float64 no longer tells nanoseconds apart from about
52 days of microseconds on, and Unix times lie beyond. Here the digits
themselves are added up, column by column; what is not plain digits with at
most three decimals goes to `us_text_to_ns`, one by one.

>>> to_ns([b"1712195495505543.2", b"-3", b"2.5e3", b"0.0005"]).tolist()
[1712195495505543200, -3000, 2500000, 0]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError, InputError
from headway.core.units import us_text_to_ns

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
