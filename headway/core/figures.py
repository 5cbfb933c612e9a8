"""Figures as words: how many digits a number has, on every screen and page.

Inputs are plain floats in the units of `headway.core.units`; a figure that is missing is '-'.

>>> percent(0.6199), speedup(1.904), interval((1.75, 2.02)), device_seconds(4031.2)
('62.0 %', '1.90x', '1.75 to 2.02', '4,031 s')
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

from headway.core import units
from headway.core.units import format_seconds


def finite(value: object) -> float | None:
    """Return `value` as a float, None when it is missing, not a number or infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def percent(fraction: object) -> str:
    """Write a fraction in percent with one decimal; '-' when it is missing.

    >>> percent(0.00004), percent(1.0), percent(None)
    ('< 0.1 %', '100.0 %', '-')
    """
    value = finite(fraction)
    if value is None:
        return "-"
    return "< 0.1 %" if 0 < value < 0.0005 else f"{100 * value:.1f} %"


def magnitude(value: float) -> str:
    """Write a number with three digits and the prefix of its unit.

    >>> magnitude(989.4e12), magnitude(35520512.0), magnitude(274_000.0)
    ('989 T', '35.5 M', '274 k')
    """
    size, prefix = next(
        ((size, name) for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= size), (1, "")
    )
    return f"{value / size:.3g} {prefix}"


def speedup(value: object) -> str:
    """Write a ratio of speeds: '1.90x', '12.4x'; '-' when it is missing."""
    ratio = finite(value)
    if ratio is None:
        return "-"
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x" if ratio < 100 else f"{ratio:,.0f}x"


def interval(bounds: object) -> str:
    """Write the bounds of a prediction: '1.75 to 2.02'; '' when there are none."""
    if not isinstance(bounds, Sequence) or isinstance(bounds, str) or len(bounds) != 2:
        return ""
    low, high = finite(bounds[0]), finite(bounds[1])
    return "" if low is None or high is None else f"{low:.2f} to {high:.2f}"


def seconds(value: object) -> str:
    """Write a time in seconds with a fitting unit; '-' when it is missing."""
    time_s = finite(value)
    return "-" if time_s is None else "0 s" if time_s == 0 else format_seconds(time_s)


SHORT_S = 0.5  # traces of a few steps are shorter: their amounts are written in milliseconds


def device_seconds(value: object, beside: float | None = None) -> str:
    """Write device-seconds in one unit, so that a column of them compares at a glance.

    `beside` is the largest figure of the column: all of it is written as suits that one, of short traces in ms.

    >>> [device_seconds(x) for x in (0.0, 0.004, 1.0, 40.31, 86400.0)]
    ['0 s', '< 0.01 s', '1.00 s', '40.3 s', '86,400 s']
    >>> [device_seconds(x, beside=51.2) for x in (0.004, 1.0, 51.2)]
    ['< 0.1 s', '1.0 s', '51.2 s']
    >>> [device_seconds(x, beside=0.0498) for x in (0.0, 0.00001, 0.004, 0.0498)]
    ['0 ms', '< 0.1 ms', '4.0 ms', '49.8 ms']
    """
    amount = finite(value)
    if amount is None:
        return "-"
    scale = abs(amount if beside is None else beside)
    unit, factor = ("ms", 1e3) if beside is not None and 0 < scale < SHORT_S else ("s", 1.0)
    if amount == 0:
        return f"0 {unit}"
    digits = 2 if scale * factor < 10 else 1 if scale * factor < 1000 else 0
    smallest = 10.0**-digits
    number = f"{amount * factor:,.{digits}f}" if abs(amount) * factor >= smallest / 2 else f"< {smallest:g}"
    return f"{number} {unit}"


def count(value: object) -> str:
    """Write a whole number with thousands separators; '-' when it is missing.

    >>> count(20000), count(None)
    ('20,000', '-')
    """
    number = finite(value)
    return "-" if number is None else f"{number:,.0f}"


def plural(number: object, noun: str) -> str:
    """Write a number with its noun: '1 step', '2 devices'."""
    known = finite(number)
    return f"- {noun}s" if known is None else units.plural(round(known), noun)


def clean(text: object) -> str:
    """Return `text` without characters that could steer a terminal or reorder a page; each becomes a space.

    >>> clean("train\\x1b[31m.py\\n")
    'train [31m.py'
    """
    raw = str(text)
    if raw.isascii() and raw.isprintable():  # nearly always, and a live page writes a hundred such texts a second
        return " ".join(raw.split())
    kept = (" " if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in raw)
    return " ".join("".join(kept).split())


def share(part: object, whole: float) -> float | None:
    """Return part / whole, None when either is missing or `whole` is zero."""
    amount = finite(part)
    return None if amount is None or whole <= 0 else amount / whole
