"""What a recorded loop takes of one pass, noted batch by batch: the evidence that `headway data audit` judges.

A walk hands out the keys of batches ahead of time (`handed`) and learns later
how many of them the loop took (`took`). What was handed out and never taken is
not noted. A note is one record in the ring, so a killed process keeps it.
Costs about 20 us per batch, and nothing without a recorder.

>>> Deliveries.begun(lambda: {"kind": "order"}, epoch=0, start=0) is None
True
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from headway.data.audit import AuditSum
from headway.data.runtime.examples import account

_number = count()


class Deliveries:
    """The audit of one pass: its sum so far, and the sums of the batches that are under way."""

    def __init__(self, number: int) -> None:
        """Make one that writes as pass `number` of this process; `begun` is the usual way."""
        self._number = number
        self._sum = AuditSum()
        self._taken = 0
        self._ahead: deque[AuditSum] = deque()

    @classmethod
    def begun(cls, facts: Callable[[], dict[str, Any]], *, epoch: int, start: int) -> Deliveries | None:
        """Note the beginning of a pass, inside `iter(loader)`; None when nothing is recorded.

        `facts()` is what all passes of the loader share (JSON): at least
        "kind", one of `headway.data.audit.KINDS`. `start` is the position at
        which the epoch goes on, 0 for kinds whose sums are of the whole epoch.
        """
        if not account.on():
            return None
        found = cls(next(_number))
        account.began(found._number, account.told("deliveries", facts()), epoch, start)
        return found

    def start_over(self) -> None:
        """Forget what was handed out and not taken: the pass is read again from its beginning."""
        self._ahead.clear()
        self._sum = AuditSum() if not self._taken else self._sum

    def add(self, batch: AuditSum) -> None:
        """Count what came before the pass, of kinds whose sums are of the whole epoch."""
        self._sum += batch

    def handed(self, batch: AuditSum) -> None:
        """Note the next batch that was handed out, before it is loaded."""
        self._ahead.append(batch)

    def took(self, batches: int) -> None:
        """Note that the loop has taken `batches` of this pass; more than were handed out is no news."""
        while self._taken < batches and self._ahead:
            self._taken += 1
            self._sum += self._ahead.popleft()
            self._write()

    def _write(self) -> None:
        account.delivered(self._number, self._sum.count, self._sum.low, self._sum.high)
