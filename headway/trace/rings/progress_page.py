"""The progress page: 64 bytes in the header of a ring that say what a process does now.

A record is written when something has ended; the page says what has begun
and how far training has come, so a launcher can tell a rank that waits in a
collective from one that never came to it. It is eight numbers, each stored
by one plain store: no system call, no thread, no lock, no function call
where it would cost (`cells`). Only the thread that trains writes it.
Standard library only, as `ring.py`; `headway.trace.rings.records.read_page` is the
reader. Times are `time.perf_counter_ns`.

>>> buffer = bytearray(1024)
>>> page = PageWriter(); page.bind(buffer)
>>> page.opened(41, 2_000, 0, 12)
>>> PAGE.unpack_from(buffer, PAGE_OFFSET)[2:7]
(41, 0, -1, 12, 2000)
>>> page.closed(); page.cells[0][OP]
0
"""

from __future__ import annotations

import _thread
from struct import Struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PAGE_OFFSET = 256
"""Where the page lies in a ring's header: behind its numbers, before the names of the threads."""

PAGE = Struct("@3qii2qdq")
"""step, progress_ns, op, group, peer, seq, since_ns, loss, stack_signal: the meanings stand in `records.Page`."""

STEP, PROGRESS_NS, OP, GROUP, SEQ, SINCE_NS, LOSS, STACK_SIGNAL = range(8)
"""Index of each number in `PageWriter.cells[0]`; GROUP holds the group (low half) and the peer (high half)."""

_BITS = Struct("@d"), Struct("@q")


def group_cell(group: int, peer: int = -1) -> int:
    """Return the number that stores a group and a peer, each below 2**31, -1 for none."""
    return (peer << 32) | (group & 0xFFFFFFFF)


class PageWriter:
    """The writer's side; `bind` it to a ring's buffer, None in a forked child: then it writes to nothing."""

    __slots__ = ("_trainer", "cells")

    def __init__(self) -> None:
        self.cells: list[memoryview] = []
        """[1] The page as int64 numbers. What runs at every step stores into `cells[0]` itself."""
        self._trainer = 0
        self.bind(None)

    def bind(self, buffer: Any) -> None:
        """Write to a ring's buffer from now on, an empty page first; None: to scratch memory."""
        area = memoryview(bytearray(PAGE.size) if buffer is None else buffer)
        offset = 0 if buffer is None else PAGE_OFFSET
        self.cells[:] = [area[offset : offset + PAGE.size].cast("B").cast("q")]
        self.cells[0][:] = memoryview(bytes(PAGE.size)).cast("q")
        self.seen_loss(float("nan"))
        self.train_here()

    def train_here(self) -> None:
        """Say that the calling thread is the one that trains; until then it is the one that opened the ring."""
        self._trainer = _thread.get_ident()

    def opened(self, op: int, since_ns: int, group: int = -1, seq: int = -1, peer: int = -1) -> None:
        """Say that an operation began at `since_ns`; those of other threads than the training one are not shown.

        `group` and `peer` are below 2**31, -1 for none.
        """
        if _thread.get_ident() == self._trainer:
            cells = self.cells[0]
            cells[GROUP], cells[SEQ], cells[SINCE_NS] = group_cell(group, peer), seq, since_ns
            cells[OP] = op

    def closed(self) -> None:
        """Say that it is over."""
        if _thread.get_ident() == self._trainer:
            self.cells[0][OP] = 0

    def stacks_by(self, number: int) -> None:
        """Say which signal makes this process write its stacks."""
        self.cells[0][STACK_SIGNAL] = number

    def seen_loss(self, value: float) -> None:
        """Keep a loss."""
        self.cells[0][LOSS] = _BITS[1].unpack(_BITS[0].pack(value))[0]
