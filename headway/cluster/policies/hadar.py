"""Hadar: prices of devices, and jobs admitted in order of what they gain (arXiv 2503.10918; IPDPS 2024).

A device type costs more the more of it is taken in this round:

    price = U_min (U_max / U_min) ^ (used / capacity)        U_min when empty, U_max when full

    U_max = largest utility per device of a job on this type, U_min = 1/4 of the least

A job's utility is the fraction of its fastest rate that it gets, in devices,
times a cube root of its remaining time: longer jobs are worth a little more,
so that the last one is not left alone. Its payoff is utility - sum of prices
of what it takes. The job with the largest
payoff per device is admitted, prices rise, and so on; a payoff <= 0 is never
admitted. A gang may span types: it then runs at the rate of its slowest one
(all-reduce waits for it). The paper's exact utility and its factor eta are not
public; the ones here are said above.
"""

from __future__ import annotations

import math

import numpy as np

from headway.cluster.model import Allocation, Cluster, Indices, QueueState, Values

LONG_JOBS = 1 / 3
"""Power of the remaining time in the utility: total times differ by 1 % from 0.2 to 0.6."""


def price(used: Values, capacity: Values, low: Values, high: Values) -> Values:
    """[W] Price of one more device of each type; infinite where there is none."""
    share = np.where(capacity > 0, used / np.maximum(capacity, 1e-300), math.inf)
    return np.asarray(np.where(share <= 1, low * (high / low) ** np.minimum(share, 1.0), math.inf))


def ways(state: QueueState, free: Indices) -> tuple[Indices, Values]:
    """Return ways to place each job: devices [m, W + 1, W] and rates [m, W + 1]; rate 0 = not possible now.

    Way j < W: all on type j. The last way: free devices, those on which the
    job is fastest first, until the gang is whole.
    """
    num_jobs, num_types = state.rates.shape
    devices = np.zeros((num_jobs, num_types + 1, num_types), np.int64)
    kinds = np.arange(num_types)
    devices[:, kinds, kinds] = state.scale[:, None]
    rate = np.zeros((num_jobs, num_types + 1))
    rate[:, :-1] = np.where(state.scale[:, None] <= free, state.rates, 0.0)
    order = np.argsort(-state.rates, axis=1, kind="stable")
    offered = np.where(np.take_along_axis(state.rates, order, 1) > 0, free[order], 0)
    # [m, W] In the job's own order of types: what faster types offer, so that each type gives what is still missing.
    before = np.cumsum(offered, axis=1) - offered
    taken = np.clip(state.scale[:, None] - before, 0, offered)
    np.put_along_axis(devices[:, -1], order, taken, 1)
    slowest = np.where(devices[:, -1] > 0, state.rates, math.inf).min(axis=1)
    rate[:, -1] = np.where(taken.sum(axis=1) == state.scale, slowest, 0.0)
    return devices, rate


def utility(state: QueueState, rate: Values, now_s: float) -> Values:
    """[m, k] Weight x devices x rate / fastest rate x (remaining time / the longest one) ^ 1/3.

    The remaining time falls as 1 / rate, so this falls with the duration, as the paper asks of a utility.
    """
    fastest = state.rates.max(axis=1)
    left_s = state.left / fastest
    value = state.weight * state.scale * (left_s / left_s.max()) ** LONG_JOBS
    return np.asarray(value[:, None] * rate / fastest[:, None])


def hadar(state: QueueState, cluster: Cluster, now_s: float) -> Allocation:
    """Admit jobs by payoff at prices that follow the usage; each round anew."""
    num_jobs, num_types = state.rates.shape
    free = cluster.count.copy()
    devices = np.zeros((num_jobs, num_types), np.int64)
    gain = utility(state, np.where(state.rates > 0, state.rates, np.nan), now_s) / state.scale[:, None]
    gain = np.where(np.isnan(gain).all(axis=0), 1.0, gain)  # a type on which no job runs
    high, low = np.nanmax(gain, axis=0), np.nanmin(gain, axis=0) / 4
    open_ = np.ones(num_jobs, np.bool_)
    count = cluster.count.astype(np.float64)
    while True:
        cost = price((cluster.count - free).astype(np.float64), count, low, high)
        use, rate = ways(state, free)
        value = utility(state, rate, now_s) - (use * np.where(np.isfinite(cost), cost, 0.0)).sum(axis=2)
        value = np.where((rate > 0) & open_[:, None], value / state.scale[:, None], -math.inf)
        row, way = (int(i) for i in np.unravel_index(int(value.argmax()), value.shape))
        if not value[row, way] > 0:
            return Allocation(np.zeros((num_jobs, num_types)), devices=devices, prices=cost)
        devices[row] = use[row, way]
        free = free - devices[row]
        open_[row] = False
