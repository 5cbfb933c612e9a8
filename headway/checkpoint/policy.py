"""How many steps lie between two checkpoints, decided while the job runs.

The engine tells the policy of every step: how long it took, how long a save
held it up, whether a save was under way. From that the policy knows what a
step takes by itself, what one save costs (its stall, and what its background
work slows down) and how long it takes to be durable. In mode "budget"
(CheckFreq) saves are as frequent as a share of the training time allows; in
mode "goodput" as frequent as loses least to saves and failures together.

Both directions: what the last three windows (one save and the steps up to the
next) needed decides. One dear window at most doubles the interval, two raise
it as far as they need, and three cheap ones bring it back. Seconds and steps.

>>> policy = CheckpointPolicy(budget=0.035)
>>> for step in range(10):
...     policy.observe(StepTiming(0.1))
>>> policy.interval()
10
>>> policy.observe(StepTiming(0.14, stall_s=0.04, saved=True, in_flight=True))  # a stall of 40 ms
>>> policy.observe(StepTiming(0.1, in_flight=True, durable_s=0.24))
>>> policy.observe(StepTiming(0.1))
>>> policy.interval(), policy.explain().limit  # 0.04 s / (0.035 * 0.1 s)
(12, 'budget')
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from headway.checkpoint.costs import best_steps, budget_steps, overlap_steps, positive, wall_factor
from headway.checkpoint.costs import young_daly as young_daly
from headway.core.errors import InputError
from headway.core.tables import pick

Mode = Literal["budget", "goodput"]
"""What the interval is chosen for."""
Limit = Literal["profile", "persist", "budget", "goodput"]
"""What an interval comes from: nothing known yet, the previous save under way, the stall budget, least time lost."""

WARM_UP_STEPS = 5
"""First steps of a process, which compile, allocate and fill caches: not measured (as in CheckFreq)."""
FIRST_STEPS = 10
"""Steps before the first save, whose cost nobody knows yet."""
REMEMBERED = 3
"""Windows that decide together."""
MOST_GROWTH = 2
"""Factor by which a single dear window may raise the interval: a hiccup of the storage is no trend."""
FAR_OFF = 4.0
"""Mean deviations beyond which a step is a hiccup."""
LEAST_JITTER = 0.01
"""Share of a step that is never a hiccup."""
SLOWEST_WEIGHT = 1 / 32
"""Weight of a new step in the average, once that many have been seen."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """What one step took: from the end of the previous optimizer step to the end of its own, saves included."""

    step_s: float
    """The whole of it."""

    stall_s: float = 0.0
    """Part of it in which training stood still for a save: the copy, waiting for the copy or for an earlier save."""

    saved: bool = False
    """Whether a save began in this step."""

    in_flight: bool = False
    """Whether any work of a save (copy, persist, digest, commit, parity) was under way in some part of it."""

    durable_s: float | None = None
    """Start of a save to its commit, if one was committed in this step."""

    def __post_init__(self) -> None:
        """Raise `InputError` on times that cannot be."""
        positive("step_s", self.step_s)
        positive("stall_s", self.stall_s, zero=True)
        if self.stall_s > self.step_s:
            raise InputError(
                f"stall_s is {self.stall_s} in a step of {self.step_s} s; pass the part of it that stalled."
            )
        if self.durable_s is not None:
            positive("durable_s", self.durable_s, zero=True)

    @property
    def own_s(self) -> float:
        """What training itself took."""
        return self.step_s - self.stall_s


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """Why the interval is what it is."""

    steps: int
    """Steps between saves."""
    limit: Limit
    """What decides them."""
    mode: Mode
    budget: float
    base_s: float
    """A step by itself; 0 while unknown, as are the following."""
    stall_s: float
    """One save: training stands still."""
    slowed_s: float
    """One save: what its background work costs the steps beside it."""
    duration_s: float
    """One save: start to commit."""
    overlap_steps: int
    """k1: fewer steps would make saves wait for each other."""
    budget_steps: int
    """k2: fewer steps would exceed the budget."""
    overhead_fraction: float
    """Cost of saves over the time of the steps, expected at `steps`."""
    mtbf_s: float | None
    """Mean time between failures in use; None while nothing is known of it."""
    num_failures: int
    """Failures seen."""
    exposure_s: float
    """Work that a failure loses on average: half an interval, and what is not durable yet."""
    worst_exposure_s: float
    """The most that a failure can lose: a whole interval, and what is not durable yet."""
    wall_factor: float | None
    """Expected wall seconds per useful second, restarts left out; None while no failure rate is known."""


@dataclass(slots=True)
class _Window:
    """One save and the steps up to the next."""

    stall_s: float = 0.0
    excess_s: float = 0.0
    """Sum over the steps beside the save of what they took above the average."""
    own_s: float = 0.0
    """Sum of their own times."""
    num_beside: int = 0
    """Those steps."""
    num_steps: int = 0
    done: bool = False
    """Whether its save and every earlier one are over."""

    def slowed_s(self, jitter_s: float) -> float:
        """Return what the save cost the steps beside it, beyond `jitter_s` x sqrt(steps) by which they vary anyway."""
        return max(0.0, self.excess_s - jitter_s * math.sqrt(self.num_beside))


@dataclass(slots=True)
class _Average:
    """A running mean that turns into an exponentially weighted one, and the mean deviation from it.

    Once settled, a value far off moves both only a little: one hiccup is no news, values that stay off soon are.
    """

    value: float = 0.0
    deviation: float = 0.0
    num_seen: int = 0

    def add(self, value: float) -> None:
        off = value - self.value
        if self.num_seen >= FIRST_STEPS:
            most = max(FAR_OFF * self.deviation, LEAST_JITTER * self.value)
            off = min(max(off, -most), most)
        self.num_seen += 1
        if self.num_seen > 1:
            self.deviation += max(1 / (self.num_seen - 1), SLOWEST_WEIGHT) * (abs(off) - self.deviation)
        self.value += max(1 / self.num_seen, SLOWEST_WEIGHT) * off


@dataclass(slots=True)
class CheckpointPolicy:
    """Decides how many steps lie between saves; one per rank that decides, fed once per step."""

    budget: float = 0.035
    """Share of the training time that saves may cost."""
    mode: Mode = "budget"
    mtbf_s: float | None = None
    """Mean time between failures, as far as it is known beforehand; what the job lives through is added to it."""
    inflight: int = 1
    """Saves that may be under way at once."""
    _base: _Average = field(default_factory=_Average, init=False)
    _windows: deque[_Window] = field(default_factory=lambda: deque(maxlen=REMEMBERED), init=False)
    _open: _Window | None = field(default=None, init=False)
    _durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED), init=False)
    _under_way_s: float = field(default=0.0, init=False)
    """How long the newest save has been under way."""
    _num_steps: int = field(default=0, init=False)
    _ran_s: float = field(default=0.0, init=False)
    _num_failures: int = field(default=0, init=False)
    _decided: tuple[int, Limit] | None = field(default=None, init=False)
    """The last decision, until something happens that may change it."""

    def __post_init__(self) -> None:
        """Raise `InputError` on a goal that cannot be."""
        positive("budget", self.budget)
        pick({mode: mode for mode in get_args(Mode)}, self.mode, "mode of a checkpoint policy")
        if self.mtbf_s is not None:
            positive("mtbf_s", self.mtbf_s)
        if self.inflight < 1:
            raise InputError(f"inflight is {self.inflight}; pass the number of saves under way at once, at least 1.")

    def observe(self, timing: StepTiming) -> None:
        """Take note of one step. Costs microseconds; call it at the end of every step."""
        self._num_steps += 1
        self._ran_s += timing.step_s
        if timing.saved:
            self._close()
            self._open, self._under_way_s = _Window(), 0.0
        if self._open is None:
            self._decided = None
            if self._num_steps > WARM_UP_STEPS and not timing.in_flight:
                self._base.add(timing.own_s)
        else:
            self._beside(self._open, timing)
        if timing.durable_s is not None:
            self._durations_s.append(timing.durable_s)
            self._under_way_s, self._decided = 0.0, None

    def observe_failure(self) -> None:
        """Take note that the job failed and goes on from its last save."""
        self._num_failures += 1
        self._decided = None

    def interval(self) -> int:
        """Return the steps that should lie between the last save and the next; it may change with every step."""
        if self._decided is None:
            self._decided = self._decide()
        return self._decided[0]

    def explain(self) -> PolicyReport:
        """Return the interval with all that it follows from."""
        steps, limit = self._decided = self._decide()
        base_s, mtbf_s = self._base.value, self._mtbf_s()
        stall_s, slowed_s, duration_s = self._stall_s(), self._slowed_s(), self._duration_s()
        known = base_s > 0 and bool(self._finished())
        interval_s, cost_s = steps * base_s, stall_s + slowed_s
        late_s = max(0.0, duration_s - stall_s)
        return PolicyReport(
            steps=steps,
            limit=limit,
            mode=self.mode,
            budget=self.budget,
            base_s=base_s,
            stall_s=stall_s,
            slowed_s=slowed_s,
            duration_s=duration_s,
            overlap_steps=self._overlap_steps() if known else 1,
            budget_steps=self._budget_steps() if known else 1,
            overhead_fraction=cost_s / interval_s if interval_s else 0.0,
            mtbf_s=mtbf_s,
            num_failures=self._num_failures,
            exposure_s=interval_s / 2 + late_s,
            worst_exposure_s=interval_s + late_s,
            wall_factor=wall_factor(interval_s, stall_s=cost_s, mtbf_s=mtbf_s) if known and mtbf_s else None,
        )

    def state_dict(self) -> dict[str, float]:
        """Return what is worth keeping over a restart: the time lived through and the failures seen."""
        return {"ran_s": self._ran_s, "num_failures": float(self._num_failures)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from `state_dict`; timings of the new process are measured afresh."""
        self._ran_s = positive("ran_s", state["ran_s"], zero=True)
        self._num_failures = int(positive("num_failures", state["num_failures"], zero=True))
        self._decided = None

    # ---- what was seen

    def _beside(self, window: _Window, timing: StepTiming) -> None:
        """Book a step after the first save: to its window, or to the average if nothing was under way."""
        window.num_steps += 1
        window.stall_s += timing.stall_s
        if timing.in_flight:
            self._under_way_s += timing.step_s
            if self._under_way_s + self._base.value > self._agreed_duration_s():
                self._decided = None
            window.num_beside += 1
            window.own_s += timing.own_s
            if self._base.num_seen:
                window.excess_s += timing.own_s - self._base.value
            return
        if not window.done:
            window.done, self._decided = True, None
        # The last third only: what a save leaves behind (write-back, cold caches) is not the step's own.
        if not self._base.num_seen or 3 * window.num_steps > 2 * self.interval():
            self._base.add(timing.own_s)

    def _close(self) -> None:
        """End the open window: the next save begins."""
        window = self._open
        if window is None:
            return
        if window.num_beside == window.num_steps:
            # No step was undisturbed. The average may be old, but a step beside a save is never faster than without.
            self._base.value = min(self._base.value, window.own_s / window.num_beside) or self._base.value
        self._windows.append(window)
        self._open = self._decided = None

    def _finished(self) -> list[_Window]:
        """Return the last windows whose costs are known, oldest first."""
        windows = [*self._windows, self._open] if self._open and self._open.done else [*self._windows]
        return windows[-REMEMBERED:]

    # ---- what follows

    def _stall_s(self) -> float:
        return _agreed([window.stall_s for window in self._finished()])

    def _slowed_s(self) -> float:
        return _agreed([window.slowed_s(self._jitter_s()) for window in self._finished()])

    def _jitter_s(self) -> float:
        """Return the deviation of a step that no save explains: the more windows agree, the less of it is left."""
        return self._base.deviation / math.sqrt(max(1, len(self._finished())))

    def _duration_s(self) -> float:
        """Return start to commit of a save; one that is under way already takes one step more at the least."""
        least_s = self._under_way_s + self._beside_s() if self._under_way_s else 0.0
        return max(self._agreed_duration_s(), least_s)

    def _agreed_duration_s(self) -> float:
        return _agreed([*self._durations_s])

    def _beside_s(self) -> float:
        """Return what a step takes while a save is under way."""
        num_beside = sum(window.num_beside for window in self._finished())
        return self._base.value + (self._slowed_s() * len(self._finished()) / num_beside if num_beside else 0.0)

    def _overlap_steps(self) -> int:
        return overlap_steps(
            stall_s=self._stall_s(), duration_s=self._duration_s(), step_s=self._beside_s(), inflight=self.inflight
        )

    def _budget_steps(self) -> int:
        """Return k2 of what the last windows cost: their median, and up to twice that if one of them needs it."""
        costs_s = [window.stall_s + window.slowed_s(self._jitter_s()) for window in self._finished()]
        needed = [budget_steps(cost_s=cost_s, step_s=self._base.value, budget=self.budget) for cost_s in costs_s]
        return min(max(needed), MOST_GROWTH * statistics.median_low(needed))

    def _mtbf_s(self) -> float | None:
        """Return the mean time between failures: what was given counts as one failure seen in that time."""
        if self.mtbf_s is not None:
            return (self.mtbf_s + self._ran_s) / (1 + self._num_failures)
        return self._ran_s / self._num_failures if self._num_failures else None

    def _decide(self) -> tuple[int, Limit]:
        """Return the steps between saves, and what decides them."""
        if not self._base.value or not self._finished():
            least = self._under_way_s / self._base.value if self._base.value else 0.0
            return max(FIRST_STEPS, math.ceil(least)), "profile"
        mtbf_s = self._mtbf_s()
        if self.mode == "goodput" and mtbf_s is not None:
            cost_s = self._stall_s() + self._slowed_s()
            steps = best_steps(cost_s, step_s=self._base.value, budget=self.budget, mtbf_s=mtbf_s)
            wanted: tuple[int, Limit] = (steps, "goodput")
        else:  # Without a failure there is no rate to weigh stalls against yet: the budget holds until then.
            wanted = (self._budget_steps(), "budget")
        return max(wanted, (self._overlap_steps(), "persist"), key=lambda choice: choice[0])


def _agreed(values: list[float]) -> float:
    """Return what the last windows agree on: their (lower) median, 0 where there are none."""
    return statistics.median_low(values) if values else 0.0
