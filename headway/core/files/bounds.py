"""How much memory a file of strangers may cost to read: `FREE_BYTES`, and `PER_BYTE` bytes per byte of the file.

A few bytes can ask for gigabytes: a count, a compressed run, a container that
is named again and again. A reader of foreign bytes therefore adds up what it
is about to make, and stops with an error where honest files never come near.
The promise to the user is 64 MB + 8 n for a file of n bytes; what is counted
here stays below it, because estimates are not exact and text is kept as well.

>>> check_room(10**9, 300, "a.pkl", "containers")
Traceback (most recent call last):
headway.core.files.bounds.RoomError: a.pkl asks for room for 1000000000 bytes of containers, and has 300 bytes: \
no program writes such a file. Use another copy.
"""

from __future__ import annotations

import math
from typing import Any

from headway.core.errors import FormatError

FREE_BYTES = 48_000_000
"""Memory that a file of any size may cost."""

PER_BYTE = 7
"""Bytes of memory that each byte of a file may cost."""

MOST_UNPACKED_PER_BYTE = 100
"""Bytes that a packed byte may unpack to: traces reach 10 to 40, a run of one value 1,000."""

FREE_UNPACKED_BYTES = 16_000_000
"""Unpacked bytes that a packed file of any size may have."""


MOST = 1e15
"""Largest number that a file of a user's may hold: some 30 million years in seconds, or a petabyte."""


class RoomError(FormatError):
    """Reading a file would take more memory than its bytes are worth: nothing is said about whether it is whole."""


def room_for(num_bytes: int) -> int:
    """Return the bytes of memory that reading a file of `num_bytes` may cost."""
    return FREE_BYTES + PER_BYTE * num_bytes


def check_room(needed_bytes: int, num_bytes: int, where: str, what: str) -> None:
    """Raise `RoomError` where a file `where` of `num_bytes` asks for more memory than `room_for` it; `what` for."""
    if needed_bytes > room_for(num_bytes):
        raise RoomError(
            f"{where} asks for room for {needed_bytes} bytes of {what}, and has {num_bytes} bytes: no program writes "
            "such a file. Use another copy."
        )


def unpacked_room(packed_bytes: int) -> int:
    """Return how many bytes a packed file of `packed_bytes` may unpack to."""
    return FREE_UNPACKED_BYTES + MOST_UNPACKED_PER_BYTE * packed_bytes


def number_of(value: Any, where: str, *, least: float = 0.0, most: float = MOST) -> float:
    """Return the number that a cell of a table holds, or is; raises `FormatError` where it is none or out of range.

    >>> number_of("7.5", "queue.csv:2")
    7.5
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not least <= number <= most:
        raise FormatError(
            f"{where} has {str(value)[:60]!r} where a number from {least:g} to {most:g} belongs. Correct or remove the "
            "row."
        )
    return number
