"""Conversions between the units of the world and the ones used inside.

Inside: integer nanoseconds (`_ns`) in traces and replays, float seconds
(`_s`) in models and results, bytes, watts, fractions in [0, 1]. Nothing else
has a unit; whatever a file or a person says in ms, MB or percent is converted
here, at the border.

>>> us_text_to_ns("1523.041"), us_text_to_ns("-3"), us_text_to_ns("2.5e3")
(1523041, -3000, 2500000)
>>> parse_bytes("25MB"), parse_bytes("1.5GiB")
(25000000, 1610612736)
"""

from __future__ import annotations

import re
from decimal import ROUND_HALF_EVEN, Decimal

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


def plural(count: int, noun: str) -> str:
    """Return a number with its noun.

    >>> plural(1, "tensor"), plural(160000, "disk"), plural(0, "other value")
    ('1 tensor', '160,000 disks', '0 other values')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


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
