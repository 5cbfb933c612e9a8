"""How long two threads that make examples wait for the interpreter's lock."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

from headway.core.units import NS_PER_S
from headway.data.runtime.examples import account
from headway.data.runtime.examples.account import ThreadTime
from headway.data.runtime.examples.keyed import Keys

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
