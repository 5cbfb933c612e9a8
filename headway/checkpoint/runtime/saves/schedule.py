"""At which steps a job saves, the same on all its ranks, and what its steps take.

Alone, a rank asks its policy at every step. Among several, rank 0's policy
names the next step as a save begins, so that all know it long before: ranks
that decided for themselves would not save the same steps.

>>> meter = StepMeter(clock=iter([10.0, 10.5]).__next__)
>>> meter.step(under_way=False), meter.stall(0.1)
(None, None)
>>> meter.step(under_way=False)
StepTiming(step_s=0.5, stall_s=0.1, saved=False, in_flight=False, durable_s=None)
"""

from __future__ import annotations

import time
from collections.abc import Callable

from headway.checkpoint.policies.policy import CheckpointPolicy, StepTiming
from headway.checkpoint.runtime.restores.agreement import Agreement


class SaveSchedule:
    """Which step is saved next."""

    def __init__(self, policy: CheckpointPolicy, agreement: Agreement) -> None:
        self._policy, self._agreement = policy, agreement
        self._last: int | None = None
        self._next: int | None = None

    def is_due(self, step: int) -> bool:
        """Whether to save after `step`. Ranks other than 0 may wait here for rank 0 to reach its last save."""
        if self._last is None:
            self.saved(step - 1)  # nothing is saved yet: the first interval begins where we are
        assert self._last is not None
        if self._agreement.world_size == 1:
            return step - self._last >= self._policy.interval()
        return step >= self._hear()

    def saved(self, step: int) -> None:
        """Note that a save of `step` begins, or that it was restored: the next interval begins there."""
        if self._agreement.world_size > 1 and self._last is not None:
            self._hear()  # words are heard in the order in which they were said
        self._last, self._next = step, None
        if self._agreement.world_size > 1 and self._agreement.rank == 0:
            self._hear()

    def _hear(self) -> int:
        """Return the next step to save, as rank 0 says."""
        if self._next is None:
            last = self._last or 0
            self._next = int(self._agreement.word("next", lambda: str(last + self._policy.interval())))
        return self._next


class StepMeter:
    """Measures steps, from one end to the next, for the policy. Times are seconds of `clock`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last_s: float | None = None
        self._stall_s, self._saved, self._was_under_way = 0.0, False, False
        self._durable_s: float | None = None

    def restart(self) -> None:
        """Forget the step under way: something else took place in it."""
        self._last_s = None
        self._forget()

    def stall(self, stall_s: float, *, saved: bool = False) -> None:
        """Note that training stood still for a save; `saved` when that save began."""
        self._stall_s += stall_s
        self._saved = self._saved or saved

    def durable(self, durable_s: float) -> None:
        """Note that a save is committed, so long after it began."""
        self._durable_s = durable_s

    def step(self, *, under_way: bool) -> StepTiming | None:
        """Return what the step that ends now took, None for the first; `under_way` if a save is."""
        now_s, timing = self._clock(), None
        if self._last_s is not None and now_s > self._last_s:
            step_s = now_s - self._last_s
            in_flight = under_way or self._saved or self._was_under_way
            timing = StepTiming(step_s, min(self._stall_s, step_s), self._saved, in_flight, self._durable_s)
        self._last_s = now_s
        self._forget(under_way)
        return timing

    def _forget(self, under_way: bool = False) -> None:
        self._was_under_way = under_way
        self._stall_s, self._saved, self._durable_s = 0.0, False, None
