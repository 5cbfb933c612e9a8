"""One number per communication group, the same in every file that speaks of it.

torch names its process groups '0', '1', ... on every rank alike; the profiler
and the Flight Recorder both write that name. A name that is a number is its
own id; any other gets one from its text, so that ranks agree without talking.

>>> group_id("3"), group_id("mesh_tp") == group_id("mesh_tp"), group_id("")
(3, True, -1)
>>> parse_ranks("[0, 1, 2]"), parse_ranks("[0, 1, ...]"), parse_ranks("", start=4, stride=2, size=3)
([0, 1, 2], [], [4, 6, 8])
"""

from __future__ import annotations

import zlib
from typing import Any

from headway.core.errors import FormatError
from headway.core.files.safe_files import decode_json

HASHED = 1 << 30
"""Ids at and above this one come from a name that is no number."""

MOST_RANKS = 1 << 20
"""Ranks of a group that are listed one by one; a larger one is damage."""


def group_id(name: str) -> int:
    """Return the id (int32) of the group called `name`, -1 for no name."""
    if not name:
        return -1
    if name.isdecimal() and len(name) <= 10 and int(name) < HASHED:
        return int(name)
    return HASHED + zlib.crc32(name.encode("utf-8", "surrogatepass")) % HASHED


def parse_ranks(text: Any, *, start: int = 0, stride: int = 0, size: int = 0) -> list[int]:
    """Return the ranks of a group from a list or its text; long lists are cut short with '...' by torch.

    Then, or without any text, `size` ranks from `start` in steps of `stride` (0 counts as 1); [] when that is unknown.
    """
    if isinstance(text, str):
        try:
            text = decode_json(text, "the ranks of a group")
        except FormatError:
            text = None
    if isinstance(text, list) and text and all(type(rank) is int and 0 <= rank < 1 << 31 for rank in text):
        return text
    return [start + index * max(stride, 1) for index in range(size if size <= MOST_RANKS else 0)]
