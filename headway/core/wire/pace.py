"""Bytes held back to a rate, so that work in the background leaves bandwidth to the foreground.

Use it where something reads or writes much and nobody waits for it: persisting,
scrubbing, restriping. One `RateLimiter` is one budget; whoever shares it shares the
rate. Rates are bytes per second; clock and sleep are arguments.

>>> now, slept = [0.0], []
>>> pace = RateLimiter(100.0, clock=lambda: now[0], sleep=slept.append)
>>> pace.wait(50); pace.wait(50)
>>> slept
[0.5, 1.0]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headway.core.errors import InputError


@dataclass(slots=True)
class RateLimiter:
    """Makes its caller sleep until its bytes are due."""

    bytes_per_s: float = 0.0
    """0: as fast as it goes."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    burst_s: float = 0.0
    """Time lost between calls that the caller may make up for: in any second at most `1 + burst_s` of the rate."""
    _due_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        """Refuse a rate that is no rate."""
        if not self.bytes_per_s >= 0:
            raise InputError(
                f"a rate of {self.bytes_per_s} bytes per second is none. Pass more than 0, or 0: no limit."
            )

    def wait(self, num_bytes: int) -> None:
        """Return once `num_bytes` more may have gone out."""
        if not self.bytes_per_s:
            return
        now_s = self.clock()
        self._due_s = max(self._due_s, now_s - self.burst_s) + num_bytes / self.bytes_per_s
        if self._due_s > now_s:
            self.sleep(self._due_s - now_s)
