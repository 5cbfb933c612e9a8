"""Leximin: the least rate as large as it can be, then the second least, and so on (water filling).

Solve the max-min program; a group whose row has a price above 0 is at the
value in every optimum (complementary slackness), so its level is final. Let
the others rise, from there, until all levels are final. The prices of a step
add up to 1, so each step settles at least one group. With hierarchies the
weight of a settled job goes to the other jobs of its entity before the next
step: levels rise by increments in proportion to the weights.

>>> x, level = leximin([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [1, 1, 1], [1, 1])
>>> [round(float(v), 4) for v in level]
[0.5, 0.5, 1.0]
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.cluster.programs.maxmin import JobGroups, Solution, Values, checked, equal_jobs, solve

SETTLED = 1e-7
"""Price above which a row binds."""

Reweigh = Callable[[NDArray[np.bool_]], Values]
"""Rising groups [G] -> weights [G] for the next step; 0 = it does not rise in this step."""


def water_filling(groups: JobGroups, capacity: Values, reweigh: Reweigh) -> tuple[Solution, Values]:
    """Return the last solution, and the level of each group [G] in the units of its rates."""
    num_groups = len(groups.count)
    open_, level = np.ones(num_groups, np.bool_), np.zeros(num_groups)
    while True:
        weight = reweigh(open_)
        rising = open_ & (weight > 0)
        weight = np.where(rising, weight, 1.0)
        step = JobGroups(groups.rates, groups.scale, groups.count, weight, groups.pairs, groups.pair_rates)
        found = solve(step, capacity, floor=level / weight, rising=rising)
        level = level + np.where(rising, found.value * weight, 0.0)
        bound = rising & (found.price > SETTLED)
        open_ = open_ & ~(bound if bound.any() else rising)
        if not open_.any():
            return found, level


def leximin(
    rates: ArrayLike, scale: ArrayLike, capacity: ArrayLike, *, weights: ArrayLike | None = None
) -> tuple[Values, Values]:
    """Return X [J, W] whose sorted rates / weights are lexicographically largest, and these levels [J].

    Arguments and errors as in `maxmin`.
    """
    table, size, places, weight = checked(rates, scale, capacity, weights)
    if not len(table):
        return np.zeros((0, len(places))), np.zeros(0)
    groups, group = equal_jobs(table, size, weight)
    found, level = water_filling(groups, places, lambda _: groups.weights)
    return np.asarray((found.y / groups.count[:, None])[group]), np.asarray((level / groups.weights)[group])
