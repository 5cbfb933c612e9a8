"""How many steps lie between two checkpoints, decided while the job runs; and which of them stay.

The engine tells the policy of every step: how long it took, how long a save
held it up, whether a save was under way. From that the policy knows what a
step takes by itself, what one save costs (its stall, and what its background
work slows down) and how long it takes to be durable. In mode "budget"
(CheckFreq) saves are as frequent as a share of the training time allows; in
mode "goodput" as frequent as loses least to saves and failures together.

Steps vary by themselves, so the slowdown is averaged over as many windows as
agree (`slowdown.Slowdown`), and counts where it is significant. Both
directions: what the last three windows (one save and the steps up to the
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

Of the committed ones the newest few stay (`Keep`), and one of every so many steps for ever.

>>> sorted(Keep(last=2, every=100).kept([10, 100, 150, 200, 250, 260]))
[100, 200, 250, 260]
>>> sorted(Keep(last=1).surplus([10, 20, 30]))
[10, 20]
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from headway.checkpoint.costs import best_steps, budget_steps, overlap_steps, positive, wall_factor
from headway.checkpoint.costs import young_daly as young_daly
from headway.checkpoint.slowdown import Slowdown
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
PROFILE_STEPS = 100
"""Steps added to the first window at most, as long as CheckFreq's profile: fewer where they give a precise mean."""
PRECISE = 0.01
"""Relative standard error of the mean step that the first window is to reach."""
PROBE_STEPS = 10
"""Steps that may always be added to a window to measure steps without a save."""
UNDECIDED = 0.075
"""Share by which a slowdown that is not ruled out must lengthen the interval to be worth measuring."""
PROBED_WINDOWS = 3
"""First windows that are all longer where the slowdown by saves is not known well; later every third one is."""
REMEMBERED = 3
"""Windows that decide together."""
MOST_GROWTH = 2
"""Factor by which a single dear window may raise the interval: a hiccup of the storage is no trend."""


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
class _SaveWindow:
    """One save and the steps up to the next."""

    stall_s: float = 0.0
    own_s: float = 0.0
    """Own times of the steps beside the save, summed."""
    num_steps: int = 0
    done: bool = False
    """Whether its save and every earlier one are over."""
    met: bool = False
    """Whether an earlier save was under way when this one began."""


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
    _slowdown: Slowdown = field(default_factory=Slowdown, init=False)
    _windows: deque[_SaveWindow] = field(default_factory=lambda: deque(maxlen=REMEMBERED), init=False)
    _open: _SaveWindow | None = field(default=None, init=False)
    _durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED), init=False)
    _under_way_s: float = field(default=0.0, init=False)
    """How long the newest save has been under way."""
    _num_steps: int = field(default=0, init=False)
    _ran_s: float = field(default=0.0, init=False)
    _num_failures: int = field(default=0, init=False)
    _num_windows: int = field(default=0, init=False)
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
        """Take note of one step; call it at the end of each. Costs microseconds, one with a save about 0.1 ms."""
        self._num_steps += 1
        self._ran_s += timing.step_s
        if timing.saved:
            met = self._close()
            self._open, self._under_way_s = _SaveWindow(met=met), 0.0
            self._slowdown.begin_window()
            self._num_windows += 1
        if self._open is None:
            self._decided = None
            if self._num_steps > WARM_UP_STEPS and not timing.in_flight:
                self._slowdown.add(timing.own_s, beside=False)
        else:
            self._beside(self._open, timing)
        if timing.durable_s is not None:
            self._durations_s.append(timing.durable_s)
            self._slowdown.committed(timing.durable_s)
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
        base_s, mtbf_s = self._slowdown.base_s, self._mtbf_s()
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

    def _beside(self, window: _SaveWindow, timing: StepTiming) -> None:
        """Book a step after the first save: to its window, or to the average if nothing was under way."""
        window.num_steps += 1
        window.stall_s += timing.stall_s
        if timing.in_flight:
            self._under_way_s += timing.step_s
            if self._under_way_s + self._slowdown.base_s > self._agreed_duration_s():
                self._decided = None
            window.own_s += timing.own_s
            self._slowdown.add(timing.own_s, beside=True)
            return
        if not window.done:
            window.done, self._decided = True, None
            self._slowdown.update()
        # The last third only: what a save leaves behind (write-back, cold caches) is not the step's own.
        if not self._slowdown.num_clean or 3 * window.num_steps > 2 * self.interval():
            self._slowdown.add(timing.own_s, beside=False)

    def _close(self) -> bool:
        """End the open window, as the next save begins; returns whether its save was still under way."""
        window = self._open
        if window is None:
            return False
        self._slowdown.update()
        self._windows.append(window)
        self._open = self._decided = None
        return not window.done

    def _finished(self) -> list[_SaveWindow]:
        """Return the last windows whose costs are known, oldest first."""
        windows = [*self._windows, self._open] if self._open and self._open.done else [*self._windows]
        return windows[-REMEMBERED:]

    # ---- what follows

    def _stall_s(self) -> float:
        return _agreed([window.stall_s for window in self._alone()])

    def _slowed_s(self) -> float:
        return _agreed([self._slowdown.fraction * window.own_s for window in self._alone()])

    def _alone(self) -> list[_SaveWindow]:
        """Return those of the last windows whose save did not meet the one before it; all of them if each did.

        Where saves meet, the stall has a wait in it: `_overlap_steps` keeps them apart, no rarer saves are needed.
        """
        finished = self._finished()
        return [window for window in finished if not window.met] or finished

    def _duration_s(self) -> float:
        """Return start to commit of a save; one that is under way already takes one step more at the least."""
        least_s = self._under_way_s + self._beside_s() if self._under_way_s else 0.0
        return max(self._agreed_duration_s(), least_s)

    def _agreed_duration_s(self) -> float:
        return _agreed([*self._durations_s])

    def _beside_s(self) -> float:
        """Return what a step takes while a save is under way."""
        return self._slowdown.beside_s or self._slowdown.base_s

    def _overlap_steps(self) -> int:
        return overlap_steps(
            stall_s=self._stall_s(), duration_s=self._duration_s(), step_s=self._beside_s(), inflight=self.inflight
        )

    def _budget_steps(self, fraction: float | None = None) -> int:
        """Return k2 of what the last windows cost: their median, and up to twice that if one of them needs it.

        `fraction` of the time beside a save is lost to it; None: what was measured.
        """
        fraction = self._slowdown.fraction if fraction is None else fraction
        costs_s = [window.stall_s + fraction * window.own_s for window in self._alone()]
        needed = [budget_steps(cost_s=cost_s, step_s=self._slowdown.base_s, budget=self.budget) for cost_s in costs_s]
        return min(max(needed), MOST_GROWTH * statistics.median_low(needed))

    def _probe_steps(self, steps: int) -> int:
        """Return steps to add to an interval of `steps`, to learn what the saves slow down.

        Where saves follow each other closely hardly a step is without one, and a few noisy steps of the profile would
        decide for good. So while a slowdown that they do not rule out would make the interval more than `UNDECIDED`
        longer, some windows last longer, most of them do not.
        """
        slowdown = self._slowdown
        if self._num_windows == 1:
            precise = math.ceil((slowdown.noise_s / (PRECISE * slowdown.base_s)) ** 2)
            return min(precise, PROFILE_STEPS) if precise > FIRST_STEPS else 0
        if slowdown.num_clean >= slowdown.num_beside:
            return 0  # More steps without a save would hardly help.
        if self._num_windows > PROBED_WINDOWS and self._num_windows % PROBED_WINDOWS:
            return 0
        most = self._budget_steps(slowdown.most_fraction)
        if most <= steps * (1 + UNDECIDED):
            return 0
        return min(most - steps, max(PROBE_STEPS, (MOST_GROWTH - 1) * steps))

    def _mtbf_s(self) -> float | None:
        """Return the mean time between failures: what was given counts as one failure seen in that time."""
        if self.mtbf_s is not None:
            return (self.mtbf_s + self._ran_s) / (1 + self._num_failures)
        return self._ran_s / self._num_failures if self._num_failures else None

    def _decide(self) -> tuple[int, Limit]:
        """Return the steps between saves, and what decides them."""
        base_s = self._slowdown.base_s
        if not base_s:
            return FIRST_STEPS, "profile"
        if not self._finished():
            return max(FIRST_STEPS, math.ceil(self._under_way_s / base_s)), "profile"
        mtbf_s = self._mtbf_s()
        if self.mode == "goodput" and mtbf_s is not None:
            cost_s = self._stall_s() + self._slowed_s()
            steps = best_steps(cost_s, step_s=base_s, budget=self.budget, mtbf_s=mtbf_s)
            wanted: tuple[int, Limit] = (steps, "goodput")
        else:  # Without a failure there is no rate to weigh stalls against yet: the budget holds until then.
            wanted = (self._budget_steps(), "budget")
        steps, limit = max(wanted, (self._overlap_steps(), "persist"), key=lambda choice: choice[0])
        return steps + (self._probe_steps(steps) if wanted[1] == "budget" else 0), limit


def _agreed(values: list[float]) -> float:
    """Return what the last windows agree on: their (lower) median, 0 where there are none."""
    return statistics.median_low(values) if values else 0.0


@dataclass(frozen=True, slots=True)
class Keep:
    """How many checkpoints stay; an older one goes only after a newer one is committed."""

    last: int = 2
    """The newest so many; at least 1."""

    every: int | None = None
    """Those whose step is a multiple of this stay for ever; None: no others do."""

    def __post_init__(self) -> None:
        """Raise `InputError` on numbers that keep nothing."""
        if self.last < 1:
            raise InputError(f"last is {self.last}; one checkpoint has to stay. Pass 1 or more.")
        if self.every is not None and self.every < 1:
            raise InputError(f"every is {self.every}; it counts steps. Pass 1 or more, or None.")

    def kept(self, steps: Iterable[int]) -> set[int]:
        """Return which of the committed `steps` stay."""
        known = sorted(set(steps))
        forever = {step for step in known if self.every and step % self.every == 0}
        return forever | set(known[-self.last :])

    def surplus(self, steps: Iterable[int]) -> set[int]:
        """Return which of the committed `steps` may go."""
        known = set(steps)
        return known - self.kept(known)

    def disposable(self, steps: Iterable[int], is_intact: Callable[[int], bool]) -> set[int]:
        """Return which of the surplus may go for sure: where none that stays is intact, the newest intact one does.

        Where none is intact at all, none goes.

        >>> sorted(Keep(last=1).disposable([10, 20, 30], lambda step: step == 20))
        [10]
        """
        newest_first = sorted(set(steps), reverse=True)
        surplus = self.surplus(newest_first)
        if surplus and not any(is_intact(step) for step in newest_first if step not in surplus):
            good = next((step for step in newest_first if step in surplus and is_intact(step)), None)
            surplus -= surplus if good is None else {good}
        return surplus
