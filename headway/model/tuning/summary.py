"""What the losses of a short trial say: does it converge, how fast, how noisily.

The first value is the progress at the start. The rest is cut in `windows`
equal windows, each of which counts as the mean of its values:

    y_0 | y_1 | y_2 | ... | y_K        range = y_K - y_0,  noise = max(0, largest y_i+1 - y_i)
    slope = (range + noise) / (t_K - t_0): negative is progress, what is certain in spite of the noise

    diverged     a value is not finite, or y_K > 10 y_0 > 0
    unstable     noise > |range| / K, or range >= 0, or the fall is within 3.5 standard errors of the values
    converging   else

The first two rules are MLtuner's (arXiv 1803.07445, section 4.1). The third is
ours: where windows are long their means hardly vary, and a start that is high
by chance would look like a fall. Values that only vary from step to step (white
noise) are called converging in less than one case of 1,000.

>>> found = summarise([8.0, *(8.0 * 0.9**i for i in range(1, 41))], range(41))
>>> found.label, round(found.slope, 3)
('converging', -0.197)
>>> summarise([1.0, float("nan"), 1.0], range(3), windows=2).label
'diverged'
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.core.errors import InputError

WINDOWS = 10
DIVERGED_FACTOR = 10.0
STANDARD_ERRORS = 3.5
CONVERGING, UNSTABLE, DIVERGED = "converging", "unstable", "diverged"


@dataclass(frozen=True, slots=True)
class Summary:
    """What a trial's losses say."""

    label: str
    """'converging', 'unstable' or 'diverged'."""

    slope: float
    """Change of the loss per unit of time; negative is progress, infinite where a value is not finite."""

    noise: float
    """The largest rise from one window to the next, in the loss's unit; >= 0."""


def summarise(
    values: Sequence[float], times: Sequence[float], windows: int = WINDOWS, *, start_count: int = 1
) -> Summary:
    """Summarise losses [n] at times [n], increasing; `start_count` losses were averaged for the first value.

    Raises `InputError` on lengths that differ, on fewer than `windows` values behind the first one, on times that do
    not increase, on `windows` < 2 and `start_count` < 1.
    """
    y, t = np.asarray(values, float), np.asarray(times, float)
    if windows < 2 or start_count < 1:
        raise InputError(f"windows is {windows} and start_count {start_count}; pass at least 2 and at least 1.")
    if y.ndim != 1 or y.shape != t.shape:
        raise InputError(f"there are {y.size} values and {t.size} times. Pass one time for each value.")
    if len(y) <= windows:
        raise InputError(
            f"{len(y)} values do not fill {windows} windows behind the first value. Pass {windows + 1} or more."
        )
    if not (np.diff(t) > 0).all():
        raise InputError("the times do not increase. Pass steps or seconds since the start, in order.")
    if not np.isfinite(y).all():
        return Summary(DIVERGED, math.inf, math.inf)
    behind = y[1:]
    # Equal windows: of 41 values in 4 windows the first has 11. reduceat sums from each bound to the next.
    bounds = [round(place * len(behind) / windows) for place in range(windows + 1)]
    means = np.add.reduceat(behind, bounds[:-1]) / np.diff(bounds)
    progress = np.concatenate((y[:1], means))
    change, noise = float(progress[-1] - y[0]), max(0.0, float(np.diff(progress).max()))
    slope = (change + noise) / float(t[-1] - t[0])
    # Half the mean square of successive differences is the variance without the trend (von Neumann 1941).
    variance = float((np.diff(behind) ** 2).mean()) / 2
    error = math.sqrt(variance * (1 / start_count + windows / len(behind)))
    if y[0] > 0 and progress[-1] > DIVERGED_FACTOR * y[0]:
        label = DIVERGED
    elif change < 0 and noise <= -change / windows and -change > STANDARD_ERRORS * error:
        label = CONVERGING
    else:
        label = UNSTABLE
    return Summary(label, slope, noise)
