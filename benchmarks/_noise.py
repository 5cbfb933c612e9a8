"""What the overhead benchmarks say of noisy measurements: the cheapest chunks, differences, standard errors.

Other jobs disturb a core and its caches, and only ever add time: so a side is judged by its cheapest chunks. Standard
errors are those of resampled rounds: what would have come out had other rounds been met.
"""

import random
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

RESAMPLES = 400
"""Draws behind a standard error: it is known to 4 %."""


def cheapest(costs: Sequence[float]) -> float:
    """Return the lowest decile: what the code costs when nobody else disturbs the core and its caches."""
    return statistics.quantiles(costs, n=10)[0]


def middle_mean(values: Sequence[float]) -> float:
    """Return the mean of the middle half: nearly as sharp as the mean, and deaf to rounds that were disturbed."""
    ordered = sorted(values)
    return statistics.mean(ordered[len(ordered) // 4 : -(len(ordered) // 4) or None])


def standard_error(estimate: Callable[[list[T]], float], rounds: Sequence[T], seed: int = 0) -> float:
    """Return the standard deviation of `estimate` over resampled `rounds` (the bootstrap)."""
    rng = random.Random(seed)
    return statistics.stdev(estimate(rng.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
