"""Max-min allocation of device time, with jobs that share devices: one linear program for many policies.

Groups g of `count[g]` equal jobs; the unknowns are totals over a group, so
that the size of the program is that of the groups, whatever the queue:

    Y[g, j]   time that the jobs of group g spend alone on type j, added up
    Q[p, j]   time that pairs p = (a, b) of jobs of groups a and b spend together on type j

    maximise z   subject to
    sum_j Y[g, j] + sum over p with g of Q[p, j]          <= count[g]     a job runs in one place at a time
    sum_g scale[g] Y[g, j] + sum_p scale[p] Q[p, j]       <= capacity[j]  a pair takes the devices of one job
    sum_j rates[g, j] Y[g, j] + pairs' part               >= count[g] weights[g] z

Water filling gives groups a floor of their own, and lets only some of them rise. A second program
keeps the least value and maximises the sum of all normalised rates, so that
the answer does not depend on which optimum a solver finds first. The program
is Gavel's (Narayanan et al., OSDI 2020, section 4), its groups are our own.

>>> x, value = maxmin([[2.0, 1.0], [1.0, 1.0]], [1, 1], [1, 1])
>>> x.tolist(), value
([[1.0, 0.0], [0.0, 1.0]], 1.0)

Leximin: the least rate as large as it can be, then the second least, and so on (water filling).

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

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.linear import minimise

Values = NDArray[np.float64]
Indices = NDArray[np.int64]

SLACK = 1e-6
"""Relative part of the least value that the second stage may give up: above the solver's tolerance."""


MANY = 3000
"""Unknowns from which on an interior point method is faster than the simplex method: near-linear, not quadratic."""


@dataclass(frozen=True, slots=True, eq=False)
class JobGroups:
    """`G` groups of equal jobs, `P` pairs of groups, `W` device types."""

    rates: Values
    """[G, W] Normalised rate of one job on each type; 0 = it does not run there."""

    scale: Values
    """[G] Devices of each job."""

    count: Values
    """[G] Jobs."""

    weights: Values
    """[G] Value 1 is this much of the normalised rate."""

    pairs: Indices
    """[P, 2] Groups whose jobs may share devices; of equal scale."""

    pair_rates: Values
    """[P, 2, W] Normalised rate of either while they share."""

    def entries(self) -> tuple[tuple[Values, Values, Values], tuple[Values, Values, Values]]:
        """Return triplets (row, column, value) of the usage of jobs and devices, and of the rates of groups.

        Columns: Y row by row, then Q row by row. Usage rows: G groups, then W types.
        """
        num_groups, num_types = self.rates.shape
        cells = np.arange(num_groups * num_types)
        group, kind = cells // num_types, cells % num_types
        usage = [(group, cells, np.ones(cells.size)), (num_groups + kind, cells, self.scale[group])]
        rates = [(group, cells, self.rates.reshape(-1))]
        if len(self.pairs):
            cells = np.arange(len(self.pairs) * num_types)
            pair, kind, column = cells // num_types, cells % num_types, cells + num_groups * num_types
            usage.append((num_groups + kind, column, self.scale[self.pairs[pair, 0]]))
            for side in (0, 1):  # a pair within one group uses two of its jobs: entries of a cell add up
                member = self.pairs[pair, side]
                usage.append((member, column, np.ones(cells.size)))
                rates.append((member, column, self.pair_rates[:, side].reshape(-1)))
        first, second = (tuple(np.concatenate(part) for part in zip(*rows, strict=True)) for rows in (usage, rates))
        return first, second  # type: ignore[return-value]  # three arrays each, which zip cannot say


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """An optimum of a program over groups."""

    y: Values
    """[G, W] Time alone per type, added up over the jobs of a group."""

    q: Values
    """[P, W] Time of pairs per type, added up."""

    value: float
    """The least normalised rate of a rising group."""

    reached: Values
    """[G] Normalised rate of each group, over its weight."""

    price: Values
    """[G] What the value would win if a group asked for less: 0 = it does not bind."""


def solve(
    groups: JobGroups, capacity: Values, *, floor: Values | None = None, rising: NDArray[np.bool_] | None = None
) -> Solution:
    """Maximise z such that every group reaches its floor [G] (0), and rising groups [G] (all) their floor + z.

    Floors are over the groups' weights. Raises `InputError` when they cannot be met.
    """
    num_groups, num_types = groups.rates.shape
    n = num_groups * num_types + len(groups.pairs) * num_types
    up = np.ones(num_groups, np.bool_) if rising is None else rising
    least = (np.zeros(num_groups) if floor is None else floor) * (1 - SLACK)
    usage, rates = groups.entries()
    top = num_groups + num_types  # usage rows come first
    group = rates[0].astype(np.int64)
    # Each rate row is divided by count x weight: all rows are then of the size of the value.
    rates = (rates[0] + top, rates[1], rates[2] / (groups.weights * groups.count)[group])
    rises = (top + np.flatnonzero(up), np.full(up.sum(), n), np.full(up.sum(), -1.0))
    rows = tuple(np.concatenate(part) for part in zip(usage, rates, rises, strict=True))
    high = np.concatenate((groups.count, capacity, np.full(num_groups, np.inf)))
    low = np.concatenate((np.full(top, -np.inf), least))
    cost = np.zeros(n + 1)
    cost[n] = -1.0 if up.any() else 0.0
    best = minimise(cost, rows=rows, num_rows=len(high), row_low=low, row_high=high, inside=n > MANY)
    value = max(float(best.x[n]), 0.0)
    # The second stage: nobody falls below, and the sum over all jobs is largest.
    low[top:] += np.where(up, value * (1 - SLACK), 0.0)
    gain = np.bincount(rates[1].astype(np.int64), rates[2] * groups.count[group], n)
    rows = tuple(np.concatenate(part) for part in zip(usage, rates, strict=True))
    x = minimise(-gain, rows=rows, num_rows=len(high), row_low=low, row_high=high, inside=n > MANY).x
    x = np.maximum(x, 0.0)  # a solver may return -1e-12
    reached = np.bincount(group, rates[2] * x[rates[1].astype(np.int64)], num_groups).astype(np.float64)
    cut = num_groups * num_types
    price = np.where(up, np.abs(best.row_price[top:]), 0.0)
    return Solution(x[:cut].reshape(num_groups, num_types), x[cut:].reshape(-1, num_types), value, reached, price)


def checked(
    rates: ArrayLike, scale: ArrayLike, capacity: ArrayLike, weights: ArrayLike | None
) -> tuple[Values, Values, Values, Values]:
    """Return the arguments as arrays; raises `InputError` on wrong shapes, NaN, and values below what they may be."""
    table, places = np.asarray(rates, np.float64), np.asarray(capacity, np.float64)
    if table.ndim != 2 or places.shape != table.shape[1:]:
        raise InputError(f"rates have shape {list(table.shape)}, capacity {list(places.shape)}; pass [J, W] and [W].")
    size = np.broadcast_to(np.asarray(scale, np.float64), len(table)).copy()
    weight = np.ones(len(table)) if weights is None else np.asarray(weights, np.float64)
    if weight.shape != size.shape:
        raise InputError(f"weights have shape {list(weight.shape)}; pass {len(table)} numbers above 0.")
    for what, values, wrong in (
        ("rates", table, ~(table >= 0) | np.isinf(table)), ("capacity", places, ~(places >= 0)),
        ("scale", size, ~(size > 0)), ("weights", weight, ~(weight > 0)),
    ):  # fmt: skip
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise InputError(
                f"{what}{list(at)} is {values[at]}; pass numbers {'>= 0' if values.ndim == 2 else 'above 0'}."
            )
    return table, size, places, weight


def equal_jobs(table: Values, size: Values, weight: Values, *more: NDArray[np.generic]) -> tuple[JobGroups, Indices]:
    """Return groups of jobs with equal rows [J, W], scale, weight and what else is given [J]; the group of each [J]."""
    key = np.column_stack((table, size, weight, *more))
    _, first, group, count = np.unique(key, axis=0, return_index=True, return_inverse=True, return_counts=True)
    no_pairs = np.zeros((0, 2), np.int64), np.zeros((0, 2, table.shape[1]))
    groups = JobGroups(table[first], size[first], count.astype(np.float64), weight[first], *no_pairs)
    return groups, np.asarray(group.reshape(-1))


def maxmin(
    rates: ArrayLike,
    scale: ArrayLike,
    capacity: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    pairs: Mapping[tuple[int, int], ArrayLike] | None = None,
) -> tuple[Values, float]:
    """Maximise over X the least of rates[m] . X[m] / weights[m]: rows of X sum to at most 1.

    `rates` [J, W], `scale` [J] counts in `capacity` [W] only, `weights` [J].
    `pairs` maps two jobs of equal scale to their rates [2, W] while they share
    devices; X [J + P, W] then has a row per pair after those of the jobs, and
    the rows that a job takes part in sum to at most 1. Jobs that are equal in
    all of this get equal rows. Returns X and the value. Raises `InputError`.
    """
    table, size, places, weight = checked(rates, scale, capacity, weights)
    if not len(table):
        return np.zeros((0, len(places))), 0.0
    if not pairs:
        return _merged(table, size, places, weight)
    members = np.array(list(pairs), np.int64)
    if (members < 0).any() or (members >= len(table)).any() or (members[:, 0] == members[:, 1]).any():
        raise InputError(f"pairs name jobs {members.min()} to {members.max()}; name two of 0 to {len(table) - 1} each.")
    unequal = size[members[:, 0]] != size[members[:, 1]]
    if unequal.any():
        raise InputError(
            f"jobs {members[unequal.argmax()].tolist()} have unequal scales; only equal gangs share devices."
        )
    shared = np.array([np.asarray(value, np.float64) for value in pairs.values()])
    best = solve(JobGroups(table, size, np.ones(len(table)), weight, members, shared), places)
    return np.concatenate((best.y, best.q)), best.value


def _merged(table: Values, size: Values, places: Values, weight: Values) -> tuple[Values, float]:
    """Solve without pairs, in groups of jobs whose rates are multiples of one row: J jobs in as many groups as kinds.

    rates[m] = c[m] u with a common row u: job m demands d[m] = weight[m] / c[m] of u. A
    group demands their sum; its time goes to its jobs as min(1, h d[m]). This
    is optimal unless some job needs more than its whole time: such jobs become
    groups of their own, and the program, tighter now, is solved again.
    """
    fastest = table.max(axis=1)
    unit = np.round(table / np.where(fastest > 0, fastest, 1.0)[:, None], 12)
    demand, apart = weight / np.where(fastest > 0, fastest, 1.0), np.zeros(len(table))
    norm = demand.mean()
    demand = demand / norm
    while True:
        groups, group = equal_jobs(unit, size, np.ones(len(table)), apart)
        total = np.bincount(group, demand)
        merged = JobGroups(
            groups.rates, groups.scale, groups.count, total / groups.count, groups.pairs, groups.pair_rates
        )
        best = solve(merged, places)
        time = best.y.sum(axis=1)
        mix = best.y / np.maximum(time, 1e-300)[:, None]
        speed = (mix * merged.rates).sum(axis=1)  # of each group's mix of types
        least = demand * best.value * (1 - 2 * SLACK) / np.maximum(speed[group], 1e-300)
        over = (least > 1 + 1e-9) & (apart == 0)
        if not over.any():
            return mix[group] * _level(demand, time, group)[:, None], float(best.value / norm)
        apart[over] = demand[over]


def _level(demand: Values, time: Values, group: Indices) -> Values:
    """[J] Times min(1, h demand) of jobs, h per group such that they add up to `time` [G]."""
    height = np.full(len(time), np.inf)
    order = np.lexsort((-demand, group))
    first = np.searchsorted(group[order], np.arange(len(time)))
    for g, (start, end) in enumerate(zip(first, [*first[1:], len(order)], strict=True)):
        largest = demand[order[start:end]]
        rest = np.cumsum(largest[::-1])[::-1]
        # With the k largest at 1, the others share time - k in proportion: right once the next one stays below 1.
        h = (time[g] - np.arange(end - start)) / rest
        height[g] = h[int((h * largest <= 1 + 1e-12).argmax())] if time[g] < end - start else np.inf
    return np.minimum(1.0, np.where(np.isinf(height[group]), 1.0, height[group] * demand))


# Leximin: the least rate as large as it can be, then the second least, and so on (water filling).

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


# Jobs that share devices, class by class: what 2,048 jobs could do in two million pairs, in a few thousand columns.
#
# Jobs of one class have equal rates, alone and with every other class. By
# symmetry and convexity the best allocation of classes is as good as that of
# jobs, so the program has a pair per two classes. Its totals are then handed
# down to jobs so that each job gets an equal part and few partners:
#
#     class a: 3 jobs, class b: 2 jobs, together Q = 1.2        0 .4 |.8 | 1.2    jobs of a
#     lay both ends to end and cut at every border:             0   .6   | 1.2    jobs of b
#     (a0, b0) .4   (a1, b0) .2   (a1, b1) .2   (a2, b1) .4
#
# A pair that does no better than taking turns is left out: where
# shared_a / alone_a + shared_b / alone_b <= 1, turns give both as much.

GAIN = 1e-9
"""Sharing has to be worth more than taking turns by this much."""


def class_pairs(rates: Values, shared: Values, scale: Values, count: Values) -> tuple[Indices, Values]:
    """Return the pairs of classes [P, 2] worth sharing and their rates [P, 2, W], 0 where taking turns is as good.

    `rates` [G, W] alone, `shared` [G, G, W] of the first class beside the second, `scale` and `count` [G].
    """
    both = np.stack((shared, shared.transpose(1, 0, 2)), axis=2)  # [G, G, 2, W]
    alone = np.maximum(rates, 1e-300)
    gain = both[:, :, 0] / alone[:, None] + both[:, :, 1] / alone[None]
    useful = (gain > 1 + GAIN) & (both > 0).all(axis=2)
    upper = np.triu(np.ones((len(rates), len(rates)), np.bool_)) & (scale[:, None] == scale)
    np.fill_diagonal(upper, count > 1)
    pairs = np.argwhere(upper & useful.any(axis=2))
    return pairs, np.where(useful[pairs[:, 0], pairs[:, 1]][:, None], both[pairs[:, 0], pairs[:, 1]], 0.0)


def hand_down(groups: JobGroups, group: Indices, q: Values) -> tuple[Indices, Values]:
    """Split totals of class pairs `q` [P, W] into pairs of jobs: rows [K, 2] of jobs and their times [K, W]."""
    members = [np.flatnonzero(group == g) for g in range(len(groups.count))]
    found: dict[tuple[int, int], Values] = {}
    for pair in np.flatnonzero(q.max(axis=1, initial=0.0) > 1e-9):
        a, b = (members[g] for g in groups.pairs[pair])
        if groups.pairs[pair, 0] == groups.pairs[pair, 1]:  # each job with its two neighbours in a ring
            parts = [(int(a[i]), int(a[(i + 1) % a.size]), 1.0 / a.size) for i in range(a.size)]
        else:
            borders = np.unique(
                np.concatenate((np.arange(a.size + 1) / a.size, np.arange(b.size + 1) / b.size)).round(12)
            )
            middle = (borders[1:] + borders[:-1]) / 2
            ends = zip(
                (middle * a.size).astype(np.int64), (middle * b.size).astype(np.int64), np.diff(borders), strict=True
            )
            parts = [(int(a[i]), int(b[k]), float(part)) for i, k, part in ends]
        for first, second, part in parts:
            key = (min(first, second), max(first, second))
            found[key] = found.get(key, 0.0) + part * q[pair]
    keys = list(itertools.chain(found))
    return np.array(keys, np.int64).reshape(-1, 2), np.array([found[key] for key in keys]).reshape(-1, q.shape[1])
