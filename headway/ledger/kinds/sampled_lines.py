"""Lines of the script that the training thread was seen in between the steps, added up over ranks.

>>> row = {"line": "train.py:7", "function": "get_batch", "ns": 5, "count": 1, "feeds_forward": True}
>>> [(line.function, line.ns, line.count) for line in joined([[row], [row], "damaged"])]
[('get_batch', 10, 2)]
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class SampledLine(msgspec.Struct, frozen=True):
    """A line of the training loop, and what it called, with the time of the samples that found the thread there."""

    line: str
    """Line of the training loop, 'file.py:12'."""
    function: str
    """What that line called; '' for none of Python's."""
    ns: int
    """Time there, estimated from the samples, over all ranks."""
    count: int = 0
    """Samples."""
    feeds_forward: bool = False
    """Whether what the function returned was an argument of the next forward: it made the batch."""

    @property
    def words(self) -> str:
        """Name the place: 'get_batch at train.py:7'."""
        return f"{self.function} at {self.line}" if self.function else self.line


def joined(ranks: Iterable[object]) -> tuple[SampledLine, ...]:
    """Add up the lines that each rank wrote down, most time first; what cannot be read is left out."""
    total: dict[tuple[str, str], SampledLine] = {}
    for rows in ranks:
        try:
            lines = msgspec.convert(rows, list[SampledLine])
        except msgspec.ValidationError:
            continue
        for row in lines:
            before = total.get((row.line, row.function), SampledLine(row.line, row.function, 0))
            feeds = before.feeds_forward or row.feeds_forward
            total[row.line, row.function] = SampledLine(
                row.line, row.function, before.ns + row.ns, before.count + row.count, feeds
            )
    return tuple(sorted(total.values(), key=lambda row: -row.ns))
