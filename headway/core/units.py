"""Conversions between the units of the world and the ones used inside, and how figures are written.

Inside: integer nanoseconds (`_ns`) in traces and replays, float seconds
(`_s`) in models and results, bytes, watts, fractions in [0, 1]. Nothing else
has a unit; whatever a file or a person says in ms, MB or percent is converted
here, at the border.

>>> us_text_to_ns("1523.041"), us_text_to_ns("-3"), us_text_to_ns("2.5e3")
(1523041, -3000, 2500000)
>>> parse_bytes("25MB"), parse_bytes("1.5GiB")
(25000000, 1610612736)

How many digits a figure has, on every screen and page; one that is missing is '-'.

>>> percent(0.6199), speedup(1.904), interval((1.75, 2.02)), device_seconds(4031.2)
('62.0 %', '1.90x', '1.75 to 2.02', '4,031 s')
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Decimal
from numbers import Integral

from headway.core.errors import InputError

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NS_PER_US = 1_000
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

MOST_TIME_DIGITS = 400
"""Characters, and digits before the point, that the text of a time may have."""

_BYTE_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "K": KIB, "M": MIB, "G": GIB, "T": 1 << 40,
    "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1 << 40,
}  # fmt: skip


def seconds_to_ns(seconds: float) -> int:
    """Return the nearest whole nanosecond."""
    return round(seconds * NS_PER_S)


def us_text_to_ns(text: str) -> int:
    """Convert decimal text in microseconds to integer nanoseconds, never through a float.

    Raises `InputError` when `text` is not a finite decimal number.
    """
    try:
        scaled = Decimal(text if len(text) <= MOST_TIME_DIGITS else "nan").scaleb(3)
        if not scaled.is_finite() or scaled.adjusted() > MOST_TIME_DIGITS:  # an exponent writes any number of digits
            raise ValueError("it is larger than any time")
        return int(scaled.to_integral_value(rounding=ROUND_HALF_EVEN))
    except (ArithmeticError, ValueError) as cause:
        raise InputError(f"{text[:40]!r} is not a time in microseconds. Write a finite decimal number.") from cause


def parse_bytes(text: str) -> int:
    """Convert '25MB', '1.5GiB' or '4096' to bytes; MB is 10**6, MiB and M are 2**20.

    Raises `InputError` on anything else.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    unit = _BYTE_UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise InputError(f"{text!r} is not a size in bytes. Write a number with one of B, KB, MB, GB, KiB, MiB, GiB.")
    return round(float(match[1]) * unit)


def format_bytes(count: float) -> str:
    """Return a short human form, powers of 1000.

    >>> format_bytes(25_300_000), format_bytes(999_990), format_bytes(112_900_000_000_000_000)
    ('25.3 MB', '1.0 MB', '112.9 PB')
    """
    if abs(count) < 1000:
        return f"{count:.0f} B"
    for unit in ("KB", "MB", "GB", "TB", "PB"):
        count /= 1000
        if abs(count) < 999.95 or unit == "PB":
            return f"{count:.1f} {unit}"
    raise AssertionError("unreachable")


def plural(number: object, noun: str) -> str:
    """Return a whole number with its noun; '-' when it is missing.

    >>> plural(1, "tensor"), plural(160000.0, "disk"), plural(0, "other value"), plural(None, "step")
    ('1 tensor', '160,000 disks', '0 other values', '- steps')
    """
    known = int(number) if isinstance(number, Integral) else finite(number)
    return f"- {noun}s" if known is None else f"{round(known):,} {noun}{'' if round(known) == 1 else 's'}"


def format_fraction(fraction: float, digits: int = 1, *, signed: bool = False) -> str:
    """Return a share in percent, the sign set off by a space as on every screen.

    >>> format_fraction(0.836), format_fraction(0.836, 0), format_fraction(0.05, signed=True)
    ('83.6 %', '84 %', '+5.0 %')
    """
    return f"{100 * fraction:{'+' if signed else ''}.{digits}f} %"


def format_seconds(seconds: float) -> str:
    """Return a short human form with three significant digits.

    >>> [format_seconds(x) for x in (0.0000123, 0.0456, 0.9999, 7.891, 754.0, 3000.0, 2_000_000.0)]
    ['12.3 us', '45.6 ms', '1 s', '7.89 s', '12 min 34 s', '50 min', '23 d 3 h']
    """
    size = abs(seconds)
    if size < 999.5e-6:
        return f"{seconds * 1e6:.3g} us"
    if size < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if size < 99.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, left = divmod(hours, 24)
    if days > 1:
        return f"{days} d {left} h" if left else f"{days} d"
    if hours:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"


def format_rate(per_s: float) -> str:
    """Write a rate with three significant digits at least, never with an exponent above 1.

    >>> [format_rate(rate) for rate in (0.0234, 28.71, 144.2, 12345.6)]
    ['0.0234', '28.7', '144', '12,346']
    """
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


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
