"""Made jobs that save as often as a policy says: the closed loop that a controller of the interval is held to.

One step after the other, in plain seconds: a step takes `step_s`, longer while a save is being written; a save stops
training for `stall_s` and is written for `write_s` beside the steps; a save that comes while another one is written
waits for it. `Conditions` may change in the middle of a job.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from headway.checkpoint.policy import StepTiming


@dataclass(frozen=True)
class Conditions:
    """What steps and saves take, until it changes."""

    step_s: float
    stall_s: float
    write_s: float
    """Start to commit, the stall left out."""
    slowdown: float = 0.0
    """So much longer does a step take while a save is written."""

    def cost_s(self) -> float:
        """Return what one save costs training: its stall, and what it slows down."""
        return self.stall_s + self.write_s * self.slowdown / (1 + self.slowdown)

    def oracle(self, budget: float) -> int:
        """Return the least interval at which saves do not meet and stay within the budget, known all in advance."""
        pace_s = self.step_s * (1 + self.slowdown)
        needed = max(self.write_s / pace_s, self.cost_s() / (budget * self.step_s))
        return max(1, math.ceil(needed * (1 - 1e-9)))


class Controller(Protocol):
    """What decides the interval."""

    def observe(self, timing: StepTiming) -> None: ...

    def interval(self) -> int: ...


@dataclass(frozen=True)
class Window:
    """One save and the steps up to the next one."""

    steps: int
    overhead_fraction: float
    """Time beyond that of undisturbed steps, over that of undisturbed steps."""


class Job:
    """A job that goes on window by window."""

    def __init__(self, controller: Controller, *, jitter: float = 0.0, hiccups: float = 0.0, seed: int = 0) -> None:
        """Steps vary by `jitter` (normal, relative); a share of `hiccups` takes ten times as long."""
        self.controller = controller
        self._rng = random.Random(seed)
        self._jitter, self._hiccups = jitter, hiccups
        self._left_s = 0.0
        self._since_s = 0.0
        self._saved = False

    def window(self, conditions: Conditions, *, most_steps: int = 1_000_000) -> Window:
        """Make a save and the steps up to the next one; the first call makes the steps before the first save."""
        steps, spent_s, clean_s = 0, 0.0, 0.0
        save = self._saved
        while steps < most_steps:
            spent, clean = self._step(conditions, save=save)
            spent_s, clean_s, steps, save = spent_s + spent, clean_s + clean, steps + 1, False
            if steps >= self.controller.interval():
                break
        self._saved = True
        return Window(steps, spent_s / clean_s - 1)

    def _step(self, conditions: Conditions, *, save: bool) -> tuple[float, float]:
        """Make one step; returns what it took, and what it would have taken without any save."""
        stall_s, durable_s = 0.0, None
        if save:
            if self._left_s > 0:
                stall_s += self._left_s
                durable_s = self._since_s + self._left_s
            stall_s += conditions.stall_s
            self._left_s, self._since_s = conditions.write_s, conditions.stall_s
        clean_s = conditions.step_s * max(0.2, self._rng.gauss(1.0, self._jitter))
        clean_s *= 10 if self._rng.random() < self._hiccups else 1
        in_flight = save or self._left_s > 0
        own_s = clean_s
        if self._left_s > 0:
            beside_s = clean_s * (1 + conditions.slowdown)
            if self._left_s <= beside_s:
                own_s = self._left_s + (beside_s - self._left_s) / (1 + conditions.slowdown)
                durable_s, self._left_s = self._since_s + self._left_s, 0.0
            else:
                own_s, self._left_s, self._since_s = beside_s, self._left_s - beside_s, self._since_s + beside_s
        timing = StepTiming(own_s + stall_s, stall_s=stall_s, saved=save, in_flight=in_flight, durable_s=durable_s)
        self.controller.observe(timing)
        return timing.step_s, clean_s


def random_conditions(rng: random.Random) -> Conditions:
    """Draw a job: steps of 50 ms to 10 s, stalls of 1 % to 500 % of one, writes of up to 300 steps."""
    step_s = 10 ** rng.uniform(-1.3, 1.0)
    return Conditions(
        step_s, step_s * 10 ** rng.uniform(-2, 0.7), step_s * 10 ** rng.uniform(-0.5, 2.5), rng.choice([0.0, 0.02, 0.1])
    )


def disturbed(conditions: Conditions, rng: random.Random) -> Conditions:
    """Return the same job while others use its storage and memory: writes, stalls and slowdown grow."""
    return replace(
        conditions,
        stall_s=conditions.stall_s * rng.uniform(1, 4),
        write_s=conditions.write_s * rng.uniform(1.5, 6),
        slowdown=conditions.slowdown + rng.uniform(0, 0.2),
    )


def phase(job: Job, conditions: Conditions, windows: int, each: Callable[[Window], None] = lambda _: None) -> Window:
    """Play some windows and return the last one."""
    last = Window(0, 0.0)
    for _ in range(windows):
        last = job.window(conditions)
        each(last)
    return last
