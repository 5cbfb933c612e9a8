"""What steps take while a save is under way, compared with steps beside no save, and how certain the difference is.

Step times vary by themselves, by 10 % on a busy host, and the difference of two
means of a few steps varies with them. So steps are averaged over as many windows
(one save and the steps up to the next) as agree with each other. Where the
newest 2, 4, 8 or 16 windows differ from those before them by more than chance
explains, the older ones are forgotten: adaptive windowing (ADWIN; Bifet and
Gavalda 2007) at cuts of powers of two, with the deviation of normal means in
place of Hoeffding's bound. Steps beside saves are averaged over those saves
that took about as long as the newest ones. A difference below `SIGNIFICANT`
standard errors counts as none. Seconds and steps.

>>> slowdown = Slowdown()
>>> for _ in range(4):
...     slowdown.begin_window()
...     for own_s in (1.2, 1.2):
...         slowdown.add(own_s, beside=True)
...     for own_s in (1.0, 1.0, 1.0):
...         slowdown.add(own_s, beside=False)
>>> slowdown.update()
>>> round(slowdown.base_s, 3), round(slowdown.fraction, 3)
(1.0, 0.167)
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

REMEMBERED = 32
"""Windows that are averaged at most."""
SIGNIFICANT = 1.5
"""Standard errors that a slowdown must exceed to count."""
CHANGED = 4.0
"""Standard errors by which newer windows must differ from older ones for these to be forgotten."""
FAR_OFF = 4.0
"""Standard deviations beyond which a step or the mean of a window is a hiccup."""
LASTING = 3
"""Steps in a row that are no hiccup, however far off they are."""
LEAST_NOISE = 1e-3
"""Standard deviation of a step over its mean that is assumed where less is seen."""
LEAST_SPREAD = 0.05
"""Relative standard deviation of the duration of saves that is assumed where less is seen."""
SETTLED = 10
"""Values from which on a deviation is believed."""
SLOWEST_WEIGHT = 1 / 128
"""Weight of a new difference in the noise, once that many have been seen."""
PER_DIFFERENCE = math.sqrt(math.pi) / 2
"""Standard deviation of a normal variable over the mean absolute difference of two of its values."""


@dataclass(slots=True)
class _Steps:
    """Steps of one kind in one window."""

    num: int = 0
    total_s: float = 0.0


@dataclass(slots=True)
class _SlowdownWindow:
    beside: _Steps = field(default_factory=_Steps)
    clean: _Steps = field(default_factory=_Steps)
    duration_s: float = 0.0
    """Start of a save to its commit; 0 while unknown."""


@dataclass(slots=True)
class Slowdown:
    """Means of steps with and without a save under way; `add` is O(1), `update` is for once per window."""

    base_s: float = 0.0
    """Mean of a step without a save; 0 while unknown."""
    beside_s: float = 0.0
    """Mean of a step while a save is under way; 0 while unknown."""
    num_clean: int = 0
    """Steps in `base_s`."""
    num_beside: int = 0
    """Steps in `beside_s`."""
    _windows: deque[_SlowdownWindow] = field(default_factory=lambda: deque([_SlowdownWindow()], maxlen=REMEMBERED))
    _difference_s: float = 0.0
    """Mean absolute difference of consecutive steps of one kind."""
    _num_differences: int = 0
    _last: tuple[float, bool] | None = None
    _num_far: int = 0
    """Clean steps in a row that were far off."""

    def begin_window(self) -> None:
        """Note that a save begins."""
        self._windows.append(_SlowdownWindow())
        self._last = None

    def add(self, own_s: float, *, beside: bool) -> None:
        """Take note of a step; `beside` where a save was under way."""
        if self._last is not None and self._last[1] == beside:
            self._differ(abs(own_s - self._last[0]))
        self._last = (own_s, beside)
        steps = self._windows[-1].beside if beside else self._windows[-1].clean
        # A hiccup beside a save may be the save's: whether it recurs shows in the means of the windows.
        steps.total_s += own_s if beside else self._without_hiccup(own_s)
        steps.num += 1
        if not beside and len(self._windows) == 1:
            self.base_s, self.num_clean = steps.total_s / steps.num, steps.num

    def update(self) -> None:
        """Average what agrees and forget what is out of date."""
        windows = [*self._windows]
        cut = self._cut([window.clean for window in windows])
        for _ in range(cut):
            self._windows.popleft()
        windows = windows[cut:]
        beside = _of_like_saves(windows)
        for window in beside[: self._cut([window.beside for window in beside])]:
            window.beside, window.duration_s = _Steps(), 0.0
        self._average(windows)
        if self.num_beside and self.num_clean and self.base_s - self.beside_s > CHANGED * self.error_s:
            # No step is faster beside a save than without: the clean steps are out of date, and so is what was
            # beside earlier saves.
            for window in windows:
                window.clean = _Steps()
            self._average(windows)
        if not self.num_clean:
            self.base_s = self.beside_s

    def committed(self, duration_s: float) -> None:
        """Note that a save is committed, so long after it began."""
        self._windows[-1].duration_s = duration_s

    @property
    def noise_s(self) -> float:
        """Standard deviation of a step."""
        return max(PER_DIFFERENCE * self._difference_s, LEAST_NOISE * self.base_s)

    @property
    def error_s(self) -> float:
        """Standard error of `beside_s - base_s`; infinite while one of them is unknown."""
        if not self.num_clean or not self.num_beside:
            return math.inf
        return self.noise_s * math.sqrt(1 / self.num_clean + 1 / self.num_beside)

    @property
    def fraction(self) -> float:
        """Share of the time beside a save that the save cost, in [0, 1); 0 where it is not significant."""
        slower_s = self.beside_s - self.base_s
        return slower_s / self.beside_s if slower_s > SIGNIFICANT * self.error_s else 0.0

    @property
    def most_fraction(self) -> float:
        """The largest share that the steps seen so far do not rule out, in [0, 1)."""
        if not self.num_beside or not self.num_clean:
            return 0.0
        most_s = max(0.0, self.beside_s - self.base_s) + SIGNIFICANT * self.error_s
        return most_s / (self.base_s + most_s)

    # ---- how

    def _differ(self, difference_s: float) -> None:
        if self._num_differences >= SETTLED:
            difference_s = min(difference_s, max(FAR_OFF * self._difference_s, LEAST_NOISE * self.base_s))
        self._num_differences += 1
        weight = max(1 / self._num_differences, SLOWEST_WEIGHT)
        self._difference_s += weight * (difference_s - self._difference_s)

    def _without_hiccup(self, own_s: float) -> float:
        """Return `own_s`, or the nearest value that is not far off the mean."""
        most_s = FAR_OFF * self.noise_s
        off_s = own_s - self.base_s
        if self.num_clean < SETTLED or abs(off_s) <= most_s:
            self._num_far = 0
            return own_s
        self._num_far += 1
        return own_s if self._num_far >= LASTING else self.base_s + math.copysign(most_s, off_s)

    def _average(self, windows: Sequence[_SlowdownWindow]) -> None:
        base_s, self.num_clean = _mean([window.clean for window in windows], self.noise_s)
        beside = _of_like_saves(windows)
        self.beside_s, self.num_beside = _mean([window.beside for window in beside], self.noise_s)
        self.base_s = base_s or self.base_s

    def _cut(self, steps: Sequence[_Steps]) -> int:
        """Return how many of the oldest windows differ from those after them; two windows at least are after them."""
        seen = [index for index, one in enumerate(steps) if one.num]
        if not self.noise_s:
            return 0
        worst, cut, newest = CHANGED, 0, 2
        while newest < len(seen):
            index = seen[-newest]
            before_s, num_before = _mean(steps[:index], self.noise_s)
            after_s, num_after = _mean(steps[index:], self.noise_s)
            deviation_s = self.noise_s * math.sqrt(1 / num_before + 1 / num_after)
            apart = abs(after_s - before_s) / deviation_s
            if apart > worst:
                worst, cut = apart, index
            newest *= 2
        return cut


def _mean(steps: Sequence[_Steps], noise_s: float) -> tuple[float, int]:
    """Return the mean step of all windows and the number of steps; a window far off the (lower) median is moved in."""
    means = sorted((one.total_s / one.num, one.num) for one in steps if one.num)
    num_steps = sum(num for _, num in means)
    if not num_steps:
        return 0.0, 0
    reached = itertools.accumulate(num for _, num in means)
    middle_s = next(mean_s for (mean_s, _), num in zip(means, reached, strict=True) if 2 * num >= num_steps)
    total_s = 0.0
    for mean_s, num in means:
        most_s = FAR_OFF * noise_s / math.sqrt(num)
        total_s += num * min(max(mean_s, middle_s - most_s), middle_s + most_s)
    return total_s / num_steps, num_steps


def _of_like_saves(windows: Sequence[_SlowdownWindow]) -> Sequence[_SlowdownWindow]:
    """Return the windows whose saves took as long as the two newest ones; all where these two differ.

    What makes saves slower makes the steps beside them slower too, and shows in fewer windows.
    """
    seen = [math.log(window.duration_s) for window in windows if window.duration_s]
    if len(seen) < 3:
        return windows
    # The median of |x - y| of two equal normal distributions is 0.954 standard deviations.
    spread = statistics.median(abs(one - other) for one, other in itertools.pairwise(seen)) / 0.954
    most = CHANGED * max(spread, LEAST_SPREAD)
    now = statistics.mean(seen[-2:])
    if abs(seen[-1] - now) > most:
        return windows
    return [one for one in windows if not one.duration_s or abs(math.log(one.duration_s) - now) <= most]
