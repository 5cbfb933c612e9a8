"""The range of a predicted speedup: sampling noise of the recorded steps, and what the model of the replay misses.

In logarithms the error of a prediction is the sum of three independent parts:

    log(measured / predicted) = sampling + model + runs
    sd(model)^2 = floor^2 + (slope * l)^2 + (contended * min(1, |l| / LARGE))^2,  l = log(predicted)
    sd(runs)^2 = 2 drift(recorded steps)^2

Sampling noise comes from resampled blocks of steps. The constants of the
model's part are learned from pairs of predicted and measured gains
(`headway bench calibration`): a prediction of nothing misses little, one of a
large change misses in proportion. Its last term is there where a quota or other
processes take a part of the cores: what moves work among cores gets what is
left of them at the time. A prediction is of the recorded steps, and what it is
held against is another run, on a host that is now faster and now slower: the last
part is what two runs of the plain script differ by as far as their steps do: `floor`
has the rest.

>>> import numpy as np
>>> low, high = speedup_interval(np.full(50, 2.0), np.full(50, 1.0))
>>> low < 2.0 < high
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 200
"""Block resamples behind an interval."""

Z_NOMINAL = 1.645
"""Half the width of an interval that should hold 90 % of outcomes, in standard deviations."""


@dataclass(frozen=True, slots=True)
class ModelError:
    """What the replay itself misses, as a standard deviation of the logarithm of the speedup."""

    floor: float
    """Of a prediction that nothing changes."""

    slope: float
    """More of it per unit of log(speedup)."""

    contended: float = 0.0
    """More of it for a large change where the job does not have all cores of its host to itself."""

    def deviation(self, speedup: float, *, contended: bool = False) -> float:
        """Return the standard deviation for a predicted speedup.

        >>> ModelError(0.0, 0.1).deviation(1.0), round(ModelError(0.03, 0.4).deviation(math.exp(0.1)), 3)
        (0.0, 0.05)
        """
        change = abs(math.log(max(speedup, 1e-9)))
        beside_others = self.contended * min(1.0, change / LARGE) if contended else 0.0
        return math.hypot(self.floor, self.slope * change, beside_others)


LARGE = 0.3
"""log(speedup) from which on the loss to others is as large as it gets."""

MODEL_ERROR = ModelError(floor=0.012, slope=0.06, contended=0.02)
"""From 211 pairs of `headway bench calibration`, 18 jobs beside five loads (docs/results-tables.md): they hold 94 %
of these. The narrowest that hold 90 % have no slope; fitted without the job that is asked about, those hold 90 % of its
pairs."""

MAX_DISCREPANCY = 0.05
"""A replay that misses the measured step time by more refuses what-ifs (the cut of the straggler study)."""

SHORT_STEPS, SHORT_DISCREPANCY = 300, 0.10
"""Up to so many steps it may miss twice as much: the interval of a prediction holds what it misses."""

CONTENDED_FRACTION = 0.05
"""Share of a host's cores that others take from which on it counts as contended."""


RUN_TO_RUN = 0.012
"""Standard deviation of log(steps per second of one run / of another) on a quiet host, beyond that of their steps: what
`headway bench calibration` finds between runs of one job."""

MOST_BLOCKS = 20
"""Blocks of steps whose means are compared, at most."""

FEWER_BLOCKS = 10, 5
"""The same where it counts that longer stretches of a run differ too, as on a host that is slower for a minute."""

BLOCK_STEPS = 8
"""Blocks are no shorter than this where a run has enough steps: some steps of each pass may wait for new workers."""

FEWEST_BLOCKS = 3
"""With fewer steps than that nothing is said of their spread."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean, and how far it may be off."""

    mean: float
    sd: float
    """Standard deviation of the mean."""
    freedom: int
    """Degrees of freedom behind it."""


def spread(
    steps: NDArray[Any], middle: Callable[[NDArray[Any]], Any] = np.mean, blocks: int = MOST_BLOCKS
) -> Spread | None:
    """Return the mean of values by step, [k], and its spread from the means of blocks of steps; None for too few.

    Or of another `middle`, such as the median.

    >>> spread(np.array([1.0, 1.2, 1.1, 0.9, 1.0, 1.1])).mean, spread(np.array([1.0, 1.0])) is None
    (1.05, True)
    """
    if len(steps) < FEWEST_BLOCKS:
        return None
    means = np.array([middle(block) for block in np.array_split(steps, min(len(steps), blocks))])
    return Spread(float(middle(steps)), float(means.std(ddof=1)) / math.sqrt(len(means)), len(means) - 1)


def drift(steps: NDArray[np.float64]) -> float:
    """Return how far the usual step of a run, [k], may be off as a fraction of it, told by medians of blocks of steps.

    Medians, the lower of two, since a run has few of its rare long steps (evaluation, saves, the first ones of passes
    whose workers start anew), and another has as many. Blocks of several lengths, of which the one counts that says
    most: steps that follow each other are alike, so short blocks say too little (Flyvbjerg and Petersen, Error
    estimates on averages of correlated data, 1989).

    >>> drift(np.array([1.0, 1.0, 1.0, 9.0] * 20)), round(drift(np.repeat([1.0, 1.2], 40)), 3)
    (0.0, 0.049)
    >>> drift(np.array([1.0, 1.0, 1.0, 50.0, 40.0, 1.0, 1.0, 1.0] * 12)[3:])
    0.0
    """
    most = len(steps) // BLOCK_STEPS  # a short run has blocks of fewer steps
    counts = [min(blocks, most) if most >= FEWER_BLOCKS[-1] else blocks for blocks in (MOST_BLOCKS, *FEWER_BLOCKS)]
    found = [spread(steps, lambda block: np.quantile(block, 0.5, method="lower"), blocks) for blocks in counts]
    return max(row.sd / max(row.mean, 1e-9) if row is not None else 0.0 for row in found)


def student(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t: Cornish and Fisher's expansion, within 1 % from 3 on.

    >>> [round(student(freedom), 2) for freedom in (3, 10, 1000)]
    [3.16, 2.23, 1.96]
    """
    z = 1.959964
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def most_discrepancy(num_steps: int) -> float:
    """Return by how much a replay may miss a run of so many steps, as a fraction of its step time.

    >>> most_discrepancy(200), most_discrepancy(2000)
    (0.1, 0.05)
    """
    return SHORT_DISCREPANCY if num_steps <= SHORT_STEPS else MAX_DISCREPANCY


def speedup_interval(
    base: NDArray[np.float64],
    after: NDArray[np.float64],
    *,
    shifts: Sequence[float] = (),
    discrepancy: float = 0.0,
    seed: int = 0,
    contended: bool = False,
    model: ModelError = MODEL_ERROR,
) -> tuple[float, float]:
    """Return the range of mean(base) / mean(after), [k] step times each, that 90 % of outcomes should lie in.

    Steps that follow each other are alike, so whole blocks of them are resampled. `shifts` are factors on the speedup
    under other assumed costs; `discrepancy` is the fraction by which the replay without edits misses the run;
    `contended` says that others take a part of the cores. It holds what two runs of the recorded job differ by.
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
    own = Z_NOMINAL * math.hypot(model.deviation(point, contended=contended), math.sqrt(2) * drift(base))
    return (
        point * math.exp(-math.hypot(math.log(point / max(low, 1e-9)), own)),
        point * math.exp(math.hypot(math.log(high / point), own)),
    )
