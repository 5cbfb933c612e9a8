"""Policies that are optimisation problems: Gavel's (Narayanan et al., OSDI 2020), one program for all of them.

`eff(m) = sum_j rates[m, j] X[m, j]` is what a job gets on average. Each policy
is the max-min program with a normaliser of its own, or a sum. Jobs that are
equal in all that a problem looks at are one group of it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headway.cluster.max_min import JobGroups, class_pairs, equal_jobs, hand_down, maxmin, solve, water_filling
from headway.cluster.model import Allocation, Cluster, QueueState, Values
from headway.core.linear import minimise
from headway.core.search import threshold

RHO_TOLERANCE = 1e-3
"""Relative tolerance of finish-time fairness: below what a round of 6 minutes can show."""


def equal_rate(state: QueueState, cluster: Cluster) -> Values:
    """[m] Steps per second with time on each type in proportion to its devices."""
    return np.asarray(state.rates @ cluster.share)


def device_time(state: QueueState, cluster: Cluster) -> Values:
    """[m] Factor that turns steps per second into device time, in units of an equal share."""
    return np.asarray(state.scale / equal_rate(state, cluster))


def las(state: QueueState, cluster: Cluster, now_s: float) -> Allocation:
    """Least attained service, blind to rates: equal device time for all, by weight."""
    runs = np.asarray(state.rates > 0, np.float64)
    return replace(las_aware(replace(state, rates=runs), cluster, now_s), aware=False)


def las_aware(state: QueueState, cluster: Cluster, now_s: float) -> Allocation:
    """Least attained service: the least scale x eff / eff with an equal share is largest (Gavel's LAS).

    The factor `scale` makes device time, not wall time, what is shared.
    """
    rates = state.rates * device_time(state, cluster)[:, None]
    return Allocation(maxmin(rates, state.scale, cluster.count, weights=state.weight)[0])


def las_packed(state: QueueState, cluster: Cluster, now_s: float) -> Allocation:
    """Least attained service with jobs that share devices in twos."""
    if not state.shared.size:
        return las_aware(state, cluster, now_s)
    normal = device_time(state, cluster)
    groups, group = equal_jobs(state.rates * normal[:, None], state.scale.astype(np.float64), state.weight, state.kind)
    first = np.array([int(np.flatnonzero(group == g)[0]) for g in range(len(groups.count))])
    kind = state.kind[first]
    shared = state.shared[kind[:, None], kind] * normal[first][:, None, None]
    pairs, pair_rates = class_pairs(groups.rates, shared, groups.scale, groups.count)
    groups = JobGroups(groups.rates, groups.scale, groups.count, groups.weights, pairs, pair_rates)
    best = solve(groups, cluster.count.astype(np.float64))
    rows, times = hand_down(groups, group, best.q)
    return Allocation((best.y / groups.count[:, None])[group], rows, times)


def makespan(state: QueueState, cluster: Cluster, now_s: float) -> Allocation:
    """Make the last job end as early as it can: with z = 1 / T, the largest z such that eff >= left z."""
    rates = state.rates / np.maximum(state.left, 1e-9)[:, None]
    scale = rates.max()  # numbers near 1 for the solver
    return Allocation(maxmin(rates / scale, state.scale, cluster.count)[0])


def ftf(state: QueueState, cluster: Cluster, now_s: float) -> Allocation:
    """Finish-time fairness (Themis): the largest rho = time in the shared cluster / with a share of one's own is least.

    For a given rho job m needs eff >= left / (rho D - t), with t since it
    arrived and D its time with an equal share: feasible if the max-min
    program with this normaliser reaches 1. The least rho by bisection.
    """
    share = cluster.count / (len(state.left) * state.scale[:, None])
    share = share / np.maximum(share.sum(axis=1, keepdims=True), 1.0)
    alone_s = state.isolated_s + state.left / (state.rates * share).sum(axis=1)
    since_s = now_s - state.arrival_s
    fastest = state.rates.max(axis=1)

    def normalised(rho: float) -> Values:
        return np.asarray(state.rates * ((rho * alone_s - since_s) / state.left)[:, None])

    def feasible(rho: float) -> bool:
        rates = normalised(rho)
        if (rates.max(axis=1) < 1).any():
            return False
        return maxmin(np.minimum(rates, 1e6), state.scale, cluster.count)[1] >= 1

    low = float(((since_s + state.left / fastest) / alone_s).max())
    high = float(((since_s + state.left / (state.rates * share).sum(axis=1)) / alone_s).max())  # all take their share
    rho = threshold(feasible, low, max(high, low) * (1 + RHO_TOLERANCE), tolerance=RHO_TOLERANCE * low) or high
    x, _ = maxmin(np.minimum(normalised(rho * (1 + RHO_TOLERANCE)), 1e6), state.scale, cluster.count)
    return Allocation(x)


def ftf_blind(state: QueueState, cluster: Cluster, now_s: float) -> Allocation:
    """Finish-time fairness, blind to rates: every type counts as an average one."""
    mean = equal_rate(state, cluster)[:, None] * (state.rates > 0)
    return replace(ftf(replace(state, rates=mean), cluster, now_s), aware=False)


def hierarchical(state: QueueState, cluster: Cluster, now_s: float, inside: str = "fairness") -> Allocation:
    """Leximin over entities of equal weight, and over jobs inside each.

    `inside`: "fairness" splits an entity's weight over its jobs that can still
    rise, "fifo" gives all of it to the first of them.
    """
    fifo = np.arange(len(state.left)) if inside == "fifo" else np.zeros(len(state.left))
    rates = state.rates * device_time(state, cluster)[:, None]
    groups, group = equal_jobs(rates, state.scale.astype(np.float64), state.weight, state.entity, fifo)
    first = np.array([int(np.flatnonzero(group == g)[0]) for g in range(len(groups.count))])
    entity = state.entity[first]

    def reweigh(open_: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Values:
        share = groups.weights * open_
        if inside == "fifo":
            head = [np.flatnonzero(open_ & (entity == e)) for e in np.unique(entity[open_])]
            share = np.zeros(len(open_))
            share[[rows[first[rows].argmin()] for rows in head]] = 1.0
        # [g] Weights of groups of equal jobs: over the jobs of an entity that can still rise they add up to 1.
        total = np.bincount(entity, share * groups.count)[entity]
        return np.asarray(np.where(share > 0, share / np.maximum(total, 1e-300), 0.0))

    found, _ = water_filling(groups, cluster.count.astype(np.float64), reweigh)
    return Allocation((found.y / groups.count[:, None])[group])


def max_sum(state: QueueState, cluster: Cluster, now_s: float) -> Allocation:
    """Maximise the sum of rates, each as a fraction of the job's fastest: steps of unlike jobs do not add up."""
    return _largest_sum(state, cluster, now_s, np.ones(len(cluster.names)))


def min_cost(state: QueueState, cluster: Cluster, now_s: float) -> Allocation:
    """Maximise rates per dollar, and meet deadlines: eff >= left / (deadline - now); those that cannot be are named."""
    return _largest_sum(state, cluster, now_s, cluster.priced())


def _largest_sum(state: QueueState, cluster: Cluster, now_s: float, price: Values) -> Allocation:
    """Maximise sum of rates / (fastest rate x price). Elastic deadline rows: the least total shortfall first.

    Unknowns: X row by row, then the shortfall of each deadline, as a fraction of what it asks for.
    """
    num_jobs, num_types = state.rates.shape
    fastest = state.rates.max(axis=1)
    due = np.flatnonzero(np.isfinite(state.deadline_s))
    needed = state.left[due] / np.maximum(state.deadline_s[due] - now_s, 1.0) / fastest[due]
    # Unknowns: X[m, j] is number m * num_types + j, then comes a shortfall s[m] for each deadline. Rows:
    #
    #     m              sum_j X[m, j] <= 1                                          at most its whole time
    #     num_jobs + j   sum_m scale[m] X[m, j] <= count[j]                          at most all devices
    #     place[m]       sum_j speed[m, j] X[m, j] + needed[m] s[m] >= needed[m]     done in time
    #
    # `speed` and `needed` are fractions of the job's fastest rate.
    cells = np.arange(num_jobs * num_types)
    row, kind = cells // num_types, cells % num_types
    speed = (state.rates / fastest[:, None]).reshape(-1)
    asks = np.isin(row, due)
    place = np.full(num_jobs, -1)
    place[due] = num_jobs + num_types + np.arange(due.size)
    extra = cells.size + np.arange(due.size)
    rows = (
        np.concatenate((row, num_jobs + kind, place[row[asks]], place[due])),
        np.concatenate((cells, cells, cells[asks], extra)),
        np.concatenate((np.ones(cells.size), state.scale[row], speed[asks], needed)),
    )
    low = np.concatenate((np.full(num_jobs + num_types, -np.inf), needed))
    high = np.concatenate((np.ones(num_jobs), cluster.count, np.full(due.size, np.inf)))
    cost = np.concatenate((-speed / price[kind], np.zeros(due.size)))
    short = np.zeros(due.size)
    if due.size:
        stage = np.concatenate((np.zeros(cells.size), np.ones(due.size)))
        least = minimise(stage, rows=rows, num_rows=len(low), row_low=low, row_high=high)
        short = least.x[cells.size :]
    limit = np.concatenate((np.full(cells.size, np.inf), short + 1e-7))
    best = minimise(cost, rows=rows, num_rows=len(low), row_low=low, row_high=high, high=limit)
    x = np.clip(best.x[: cells.size], 0.0, 1.0).reshape(num_jobs, num_types)
    return Allocation(x, late=state.index[due[short > 1e-6]])
