"""What a recorded loop takes of one pass, noted batch by batch: the evidence that `headway data audit` judges.

A walk hands out the keys of batches ahead of time (`handed`) and learns later
how many of them the loop took (`took`). What was handed out and never taken is
not noted. A note is one record in the ring, so a killed process keeps it.
Costs about 20 us per batch, and nothing without a recorder.

>>> Deliveries.begun(lambda: {"kind": "order"}, epoch=0, start=0) is None
True
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from headway.core.units import NS_PER_S
from headway.data.bytes import account
from headway.data.bytes.account import ThreadTime
from headway.data.bytes.torch_keyed import Keys
from headway.data.loader.audit import AuditSum

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
        "kind", one of `headway.data.loader.audit.KINDS`. `start` is the position at
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


# How long two threads that make examples wait for the interpreter's lock.

LONGEST = 8
"""Times as long as wanted that two threads are watched for, where other load takes the cores."""


def lock_wait_fraction(work: Any, keys: Keys, seconds: float = 0.15) -> float:
    """Return the fraction of their time that two threads wait for each other, beyond what one waits for storage.

    Waiting is wall time without CPU time and without run delay, and run delay
    is no time of theirs: so other load on the host does not count. 0 where the kernel reports no run delay.
    Takes `seconds` twice; pure Python comes out near 0.5.
    """
    alone = _waited(work, keys, seconds, threading.Barrier(1))
    found: list[float] = []
    failed: list[Exception] = []
    together = threading.Barrier(2)

    def measure() -> None:
        try:
            found.append(_waited(work, keys, seconds, together))
        except Exception as error:  # raised below, in the caller's thread
            failed.append(error)

    threads = [threading.Thread(target=measure, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return max(sum(found) / len(found) - alone, 0.0)


def _waited(work: Any, keys: Keys, seconds: float, together: threading.Barrier) -> float:
    """Return the fraction of this thread's time in which it neither ran nor could; it makes examples for `seconds`."""
    ones = [keys.only(place) for place in range(len(keys))]
    work.fill(work.begin(ones[0]), ones[0], 0)  # what is loaded on first use is no cost of an example
    together.wait()
    began, spent, wanted_ns = account.clocks(), ThreadTime(), int(seconds * NS_PER_S)
    first = last = began.wall_ns
    endless = itertools.cycle(ones)
    # Time without a core shows nothing: a busy host is watched for longer, up to LONGEST times.
    while (seen := spent.fetch_ns + spent.prep_ns) < wanted_ns and last - first < LONGEST * wanted_ns:
        last += wanted_ns - seen
        while time.perf_counter_ns() < last:
            one = next(endless)
            work.fill(work.begin(one), one, 0)
        ended = account.clocks()
        spent, last = began.until(ended), ended.wall_ns
    return spent.fetch_ns / max(spent.fetch_ns + spent.prep_ns, 1) if began.delay_ns >= 0 else 0.0
