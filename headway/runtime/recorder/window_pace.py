"""How long steps take before a window and behind it: a profiler that stays attached slows every step from then on.

    looks        |----|----|----| window |----|----|----|---- ...
                    before                   behind          stays = behind - before, for each step from then on

A look is at every few steps; medians of `LOOKS` stretches between looks are compared. What stays is added up over
windows, with its sign: noise goes both ways.

>>> pace = WindowPace()
>>> for step in range(0, 36, 4): _ = pace.look(step, 100 * step)
>>> pace.closed()
>>> sum(pace.look(step, 4_000 + 120 * (step - 36)) for step in range(40, 76, 4)), pace.stays_ns, pace.longer
(640, 20.0, 0.2)
"""

from __future__ import annotations

from collections import deque
from statistics import median

LOOKS = 8
"""Stretches between two looks that tell the time of a step."""


class WindowPace:
    """The time of a step between looks, ns, and how much of it windows left behind."""

    def __init__(self) -> None:
        self._stretches = deque[float](maxlen=LOOKS)
        self._last: tuple[int, int] | None = None
        self._before_ns = 0.0
        self.is_measuring = False
        """Whether the steps behind the newest window are still too few to tell."""
        self.stays_ns = self.longer = 0.0
        """How much longer each step takes since the first window; the same as a fraction of the step before the newest.
        """

    def closed(self) -> None:
        """Say that a window was closed."""
        self.is_measuring = bool(self._stretches)
        self._before_ns = median(self._stretches) if self.is_measuring else 0.0
        self._stretches.clear()
        self._last = None

    def look(self, step: int, at_ns: int) -> int:
        """Note that `step` steps were done at `at_ns`; returns what windows cost since the look before, ns."""
        last, self._last = self._last, (step, at_ns)
        if last is None or step <= last[0]:
            return 0
        steps = step - last[0]
        each_ns = (at_ns - last[1]) / steps
        self._stretches.append(each_ns)
        longer_ns = each_ns - self._before_ns if self.is_measuring else self.stays_ns
        if self.is_measuring and len(self._stretches) == LOOKS:
            self.is_measuring = False
            self.stays_ns += median(self._stretches) - self._before_ns
            self.longer = self.stays_ns / self._before_ns
        return max(0, round(longer_ns * steps))
