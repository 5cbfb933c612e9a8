"""A random process over time: what happens next, when, in one seeded event loop.

Use it where durations are drawn as the simulation goes (failures, repairs,
arrivals); for a fixed order with known durations use a Dag. Time is float
seconds. Events at the same instant happen in the order they were announced,
so one seed gives one history.

>>> process = Process(seed=1)
>>> history = []
>>> late = process.after(2.0, history.append, "late")
>>> first = process.after(1.0, history.append, "first")
>>> late.cancel()
>>> process.run()
>>> history, process.now_s
(['first'], 1.0)
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

import numpy as np

from headway.core.errors import InputError
from headway.core.rng import stream


class SimulationEvent:
    """Something announced; it can be cancelled until it happens."""

    __slots__ = ("action", "arguments", "at_s")

    def __init__(self, at_s: float, action: Callable[..., object], arguments: tuple[object, ...]) -> None:
        self.at_s = at_s
        self.action: Callable[..., object] | None = action
        self.arguments = arguments

    def cancel(self) -> None:
        """See that it does not happen; no effect once it has."""
        self.action = None


class Process:
    """An event loop: a clock in seconds, a heap of announced events, named random streams."""

    def __init__(self, seed: int) -> None:
        """Start at 0 s; every random number follows from `seed`."""
        self.now_s = 0.0
        self.num_events = 0
        """Events that have happened."""
        self._seed = seed
        self._heap: list[tuple[float, int, SimulationEvent]] = []
        self._next = itertools.count()
        self._streams: dict[tuple[str | int, ...], np.random.Generator] = {}

    def rng(self, *name: str | int) -> np.random.Generator:
        """Return the random stream of that name, always the same one within this process."""
        if name not in self._streams:
            self._streams[name] = stream(self._seed, *name)
        return self._streams[name]

    def after(self, delay_s: float, action: Callable[..., object], *arguments: object) -> SimulationEvent:
        """Announce that `action(*arguments)` happens in `delay_s` seconds; infinity = never.

        Raises `InputError` on a negative delay or NaN.
        """
        if not delay_s >= 0:
            raise InputError(f"delay_s is {delay_s}; an event cannot lie in the past. Pass a number >= 0.")
        event = SimulationEvent(self.now_s + delay_s, action, arguments)
        if math.isfinite(event.at_s):
            heapq.heappush(self._heap, (event.at_s, next(self._next), event))
        return event

    def run(self, until_s: float = math.inf) -> None:
        """Let events happen, in order of time, up to and including `until_s`, or until there are none.

        With a finite `until_s` the clock then stands there. Raises
        `InputError` when that lies in the past.
        """
        if not until_s >= self.now_s:
            raise InputError(f"until_s is {until_s}, the clock shows {self.now_s}; pass a later time.")
        while self._heap and self._heap[0][0] <= until_s:
            at_s, _, event = heapq.heappop(self._heap)
            action = event.action
            if action is not None:  # a cancelled event does not move the clock either
                self.now_s, event.action = at_s, None
                self.num_events += 1
                action(*event.arguments)
        if math.isfinite(until_s):
            self.now_s = until_s
