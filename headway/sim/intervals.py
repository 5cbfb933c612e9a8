"""The range of a predicted speedup: sampling noise of the recorded steps, and what the model of the replay misses.

In logarithms the error of a prediction is the sum of two independent parts:

    log(measured / predicted) = sampling + model
    sd(model)^2 = floor^2 + (slope * log(predicted))^2

Sampling noise comes from resampled blocks of steps. The two constants of the
model's part are learned from pairs of predicted and measured gains
(`headway bench calibration`): a prediction of nothing misses little, one of a
large change misses in proportion.

>>> import numpy as np
>>> low, high = speedup_interval(np.full(50, 2.0), np.full(50, 1.0))
>>> low < 2.0 < high
True
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 200
"""Block resamples behind an interval."""

NOMINAL = 0.9
"""Share of outcomes that an interval should hold."""

Z_NOMINAL = 1.645
"""Half its width, in standard deviations."""


@dataclass(frozen=True, slots=True)
class ModelError:
    """What the replay itself misses, as a standard deviation of the logarithm of the speedup."""

    floor: float
    """Of a prediction that nothing changes."""

    slope: float
    """More of it per unit of log(speedup)."""

    def deviation(self, speedup: float) -> float:
        """Return the standard deviation for a predicted speedup.

        >>> ModelError(0.0, 0.1).deviation(1.0), round(ModelError(0.03, 0.4).deviation(math.exp(0.1)), 3)
        (0.0, 0.05)
        """
        return math.hypot(self.floor, self.slope * math.log(max(speedup, 1e-9)))


MODEL_ERROR = ModelError(floor=0.004, slope=0.05)
"""From the pairs of `headway bench predicted_gain` (docs/results.md); `headway bench calibration` fits it anew."""


def speedup_interval(
    base: NDArray[np.float64],
    after: NDArray[np.float64],
    *,
    shifts: Sequence[float] = (),
    discrepancy: float = 0.0,
    seed: int = 0,
    model: ModelError = MODEL_ERROR,
) -> tuple[float, float]:
    """Return the range of mean(base) / mean(after), [k] step times each, that 90 % of outcomes should lie in.

    Steps that follow each other are alike, so whole blocks of them are resampled. `shifts` are factors on the speedup
    under other assumed costs; `discrepancy` is the fraction by which the replay without edits misses the run.
    """
    rng = np.random.default_rng(seed)
    length = max(1, round(base.size**0.5))
    begin = rng.integers(0, base.size, (RESAMPLES, -(-base.size // length)))
    index = ((begin[:, :, None] + np.arange(length)) % base.size).reshape(RESAMPLES, -1)
    ratio = base[index].sum(axis=1) / np.maximum(after[index].sum(axis=1), 1e-9)
    low, high = (float(value) for value in np.quantile(ratio, [0.05, 0.95]))
    point = float(base.mean() / max(after.mean(), 1e-9))
    lowest, highest = min([1.0, *shifts]), max([1.0, *shifts])
    gap = discrepancy * min(1.0, abs(point - 1))
    low, high = min(point, low * lowest * (1 - gap)), max(point, high * highest * (1 + gap))
    own = Z_NOMINAL * model.deviation(point)
    return (
        point * math.exp(-math.hypot(math.log(point / max(low, 1e-9)), own)),
        point * math.exp(math.hypot(math.log(high / point), own)),
    )
