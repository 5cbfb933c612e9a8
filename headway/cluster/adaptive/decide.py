"""Policies that choose how many devices each job gets: Pollux, and the two that it is compared with.

Columns of the cluster are hosts here, `devices[m, w]` the devices of job m on
host w. Jobs that cannot change their size keep the one that they asked for:
a policy then decides only which of them run.

Sources: Qiao et al., Pollux, OSDI 2021, section 4, and the code released with
it; Gu et al., Tiresias, NSDI 2019; Peng et al., Optimus, EuroSys 2018.

One configuration for each job, within the devices there are: the multiple-choice knapsack, solved exactly.

    values[j, c]    what job j is worth in configuration c; -inf = not possible
    usage[c, w]     devices of type w that configuration c takes
    capacity[w]     devices of each type

Dynamic programming over jobs and free devices. With P = prod(capacity + 1)
states it takes O(jobs x configurations x P) time: 30 jobs with 18 sizes on 64
devices take about a millisecond.

>>> elastic([[0, 3, 5], [0, 4, 6]], [0, 1, 2], 3).tolist()
[2, 1]
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.cluster.model import Allocation, Cluster, Indices, QueueState, Values
from headway.core.errors import InputError

# One configuration for each job, within the devices there are: the multiple-choice knapsack, solved exactly.

MOST_STATES = 1_000_000
"""States of the free devices; more types and devices than that are refused."""


def elastic(values: ArrayLike, usage: ArrayLike, capacity: ArrayLike) -> NDArray[np.int64]:
    """Return the configuration [J] of each job with the largest sum of values; ties take the first configuration.

    `usage` is [C] for one device type, [C, W] for several. Raises `InputError` on NaN,
    usage below 0, shapes that do not match, and where no choice fits.
    """
    worth, room = np.asarray(values, np.float64), np.atleast_1d(np.asarray(capacity, np.int64))
    takes = np.asarray(usage, np.int64)
    takes = takes[:, None] if takes.ndim == 1 else takes
    if worth.ndim != 2 or takes.shape != (worth.shape[1], room.size):
        raise InputError(
            f"values have shape {list(worth.shape)}, usage {list(takes.shape)}, capacity {list(room.shape)}; "
            "pass values [jobs, configurations], usage [configurations, types], capacity [types]."
        )
    if np.isnan(worth).any() or np.isposinf(worth).any() or (takes < 0).any() or (room < 0).any():
        raise InputError("values must be numbers or -inf, usage and capacity >= 0. Use -inf for what is not possible.")
    size = room + 1
    num_states = int(np.prod(size.astype(np.float64)))
    if num_states > MOST_STATES:
        raise InputError(f"{num_states:,} states of free devices; at most {MOST_STATES:,}. Group hosts into one type.")
    # States in mixed radix; from[c, s] = the state that is left once configuration c is taken, or the last one: none.
    grid = np.stack(np.unravel_index(np.arange(num_states), tuple(size.tolist())), axis=-1)
    left = grid[None] - takes[:, None]
    stride = np.append(np.cumprod(size[:0:-1])[::-1], 1)
    source = np.where((left >= 0).all(axis=2), left @ stride, num_states)
    best, picks = np.append(np.zeros(num_states), -np.inf), np.zeros((len(worth), num_states), np.int64)
    for job, row in enumerate(worth):
        ways = best[source] + row[:, None]
        picks[job] = ways.argmax(axis=0)
        best[:-1] = np.take_along_axis(ways, picks[job][None], 0)[0]
    if np.isneginf(best[num_states - 1]):
        raise InputError("no choice of configurations fits the capacity; give every job one that takes nothing.")
    state, chosen = num_states - 1, np.zeros(len(worth), np.int64)
    for job in reversed(range(len(worth))):
        chosen[job] = picks[job, state]
        state = int(source[chosen[job], state])
    return chosen


RESTART_S = 30.0
"""What Pollux takes a restart to cost, in its factor (age - restarts x delay) / (age + delay)."""

DEMOTED_AFTER_S = 16 * 3600.0
"""Device-seconds after which Tiresias moves a job to its second queue."""


def pollux(state: QueueState, cluster: Cluster, now_s: float) -> Allocation:
    """Sizes with the largest fair mean of useful progress: sum of -1 / (v + 1e-3) over jobs, exact by knapsack.

    v = useful examples/s over those with a fair share x hosts / devices, times the restart factor where
    the size changes. Sizes: 0, 1, 2, 4 and so on to a host, then whole hosts. A job that never ran loses nothing.
    """
    total, per_host = int(cluster.count.sum()), int(cluster.count.max())
    current = np.asarray(state.previous).sum(axis=1).astype(np.int64)
    # speedup [m, c]: useful progress of job m on sizes[c] devices, -inf where it cannot have so many. A job that does
    # not adapt has its own size or none.
    if state.adapting is None:
        sizes = np.unique(np.append(state.scale, 0))
        speedup = np.where(sizes == state.scale[:, None], 1.0, np.where(sizes == 0, 0.0, -np.inf))
    else:
        powers = 2 ** np.arange(int(np.log2(per_host)) + 1)
        sizes = np.unique(np.concatenate(([0], powers, np.arange(per_host, total + 1, per_host), current)))
        hosts = -(-sizes // per_host)
        speedup = state.adapting.speedup(state.index, hosts, sizes, -(-total // len(current)))
        speedup = np.where(sizes <= np.maximum(state.adapting.most(state.index), current)[:, None], speedup, -np.inf)
    age_s = now_s - state.arrival_s
    factor = np.maximum(age_s - state.moves * RESTART_S, 0.0) / (age_s + RESTART_S)
    factor = np.where((sizes != current[:, None]) & (state.served_s > 0)[:, None], factor[:, None], 1.0)
    v = np.maximum(speedup, 0.0) * factor * len(cluster.names) / total
    wanted = sizes[elastic(np.where(np.isneginf(speedup), -np.inf, -1 / (v + 1e-3)), sizes, total)]
    return _whole(_pack(np.asarray(state.previous, np.int64), wanted, cluster.count, state.rates > 0))


def tiresias(state: QueueState, cluster: Cluster, now_s: float) -> Allocation:
    """Two queues by attained service: arrival order, then jobs of 16 device-hours and more in order of demotion."""
    first = (state.memory == 0) & (state.served_s >= DEMOTED_AFTER_S)
    demoted_s = np.where(first, now_s, state.memory)  # 0 = still in the first queue
    order, room = np.argsort(demoted_s, kind="stable"), int(cluster.count.sum())
    wanted = np.zeros(len(order), np.int64)
    for row in order:
        if state.scale[row] <= room:
            wanted[row] = state.scale[row]
            room -= int(state.scale[row])
    kept = np.where((wanted > 0)[:, None], np.asarray(state.previous, np.int64), 0)
    return _whole(_spread(kept, wanted, order, cluster.count, state.rates > 0), demoted_s)


def optimus(state: QueueState, cluster: Cluster, now_s: float) -> Allocation:
    """One device each, then one more at a time for the job whose remaining time falls most; times are the true ones."""
    num_jobs, room = len(state.left), int(cluster.count.sum())
    wanted, saved = np.zeros(num_jobs, np.int64), np.zeros(num_jobs)
    if state.adapting is None:  # fixed sizes: the shortest remaining time first
        shortest = np.argsort(state.left / np.maximum(state.rates.max(axis=1), 1e-300), kind="stable")
        for row in shortest:
            if state.scale[row] <= room:
                wanted[row] = state.scale[row]
                room -= int(state.scale[row])
    else:
        most = state.adapting.most(state.index)

        def more(row: int) -> float:
            if wanted[row] + 1 > most[row] or room < 1 or state.adapting is None:
                return 0.0
            job, size = int(state.index[row]), int(wanted[row])
            return state.adapting.left_s(job, size) - state.adapting.left_s(job, size + 1)

        for row in range(min(num_jobs, room)):
            wanted[row], room = 1, room - 1
            saved[row] = more(row)
        while room and saved.max() > 0:
            row = int(saved.argmax())
            wanted[row] += 1
            saved[row] = more(row)
            room -= 1
    kept = np.asarray(state.previous, np.int64)
    kept = np.where((kept.sum(axis=1) == wanted)[:, None], kept, 0)
    return _whole(_spread(kept, wanted, np.argsort(wanted, kind="stable"), cluster.count, state.rates > 0))


def _whole(devices: Indices, memory: Values | None = None) -> Allocation:
    """Return whole picks."""
    return Allocation(np.zeros(devices.shape), devices=devices, memory=memory)


def _spread(
    devices: Indices, wanted: Indices, order: Indices, capacity: Indices, allowed: NDArray[np.bool_]
) -> Indices:
    """Place jobs that have no devices yet, each on the host with the most free ones, then the next."""
    devices = devices.copy()
    free = capacity - devices.sum(axis=0)
    for row in order:
        if devices[row].any() or (free * allowed[row]).sum() < wanted[row]:
            continue
        while devices[row].sum() < wanted[row]:
            host = int((free * allowed[row]).argmax())
            taken = min(int(free[host]), int(wanted[row] - devices[row].sum()))
            devices[row, host] += taken
            free[host] -= taken
    return devices


def _pack(previous: Indices, wanted: Indices, capacity: Indices, allowed: NDArray[np.bool_]) -> Indices:
    """Place jobs: those of unchanged size stay, several hosts are whole ones, smaller jobs fill the fullest host.

    So no two jobs that span hosts share one: they would slow each other down. Where free devices are
    scattered, the jobs of the emptiest host move too.
    """
    devices = np.where((previous.sum(axis=1) == wanted)[:, None], previous, 0)
    while True:
        found = _fill(devices, wanted, capacity, allowed)
        if found is not None:
            return found
        single = np.count_nonzero(devices, axis=1) == 1
        small = devices[single].sum(axis=0)
        if not small.any():
            order = np.argsort(-wanted, kind="stable")
            return _spread(np.zeros_like(devices), wanted, order, capacity, allowed)
        host = int(np.where(small > 0, small, np.iinfo(np.int64).max).argmin())
        devices = np.where((single & (devices[:, host] > 0))[:, None], 0, devices)


def _fill(devices: Indices, wanted: Indices, capacity: Indices, allowed: NDArray[np.bool_]) -> Indices | None:
    """Place the jobs that have no devices yet, the largest first; None where one does not fit."""
    devices = devices.copy()
    free = capacity - devices.sum(axis=0)
    waiting = np.flatnonzero((wanted > 0) & ~devices.any(axis=1))
    for row in waiting[np.argsort(-wanted[waiting], kind="stable")]:
        size = int(wanted[row])
        fits = allowed[row] & (free >= size)
        if fits.any():
            devices[row, np.where(fits, free, np.iinfo(np.int64).max).argmin()] = size
        else:
            whole = np.flatnonzero(allowed[row] & (free == capacity) & (capacity > 0))
            before = np.cumsum(capacity[whole]) - capacity[whole]
            devices[row, whole] = np.clip(size - before, 0, capacity[whole])
            if devices[row].sum() < size:
                return None
        free = free - devices[row]
    return devices
