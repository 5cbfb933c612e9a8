"""Every policy by name; adding one is adding a line.

Policies to compare with: first in first out, backfill, AlloX, Gandiva. The filling of bubbles is in `fill`.

Hadar: prices of devices, and jobs admitted in order of what they gain (arXiv 2503.10918; IPDPS 2024).

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
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.cluster import fairness
from headway.cluster.adaptive.decide import optimus, pollux, tiresias
from headway.cluster.model import Allocation, Cluster, Indices, QueueState, Values
from headway.core.errors import InputError
from headway.core.linear import minimise
from headway.core.tables import pick
from headway.plan.fill_scores import SCORES, ScoreFn, best_pair

QUEUE_PER_DEVICE, LEAST_QUEUE = 4, 64
"""Jobs per free device, and at least, that AlloX looks at."""


def _in_order(state: QueueState, cluster: Cluster, *, aware: bool) -> Allocation:
    """Give whole pools in order of arrival; a job that fits nowhere blocks those behind it."""
    x, free = np.zeros(state.rates.shape), cluster.count.copy()
    running = (state.previous.max(axis=1, initial=0.0) > 0.5) & (not aware)
    x[running] = state.previous[running]  # blind: a job stays where it began
    free -= (x * state.scale[:, None]).sum(axis=0).astype(np.int64)
    for row in np.flatnonzero(~running):
        fits = np.flatnonzero((free >= state.scale[row]) & (state.rates[row] > 0))
        if not fits.size:
            break
        j = fits[state.rates[row, fits].argmax()] if aware else state.rng.choice(fits)
        x[row, j] = 1.0
        free[j] -= state.scale[row]
    return Allocation(x, strict=True, aware=aware)


def fifo(state: QueueState, cluster: Cluster, now_s: float) -> Allocation:
    """First in, first out, on a random type with room, to the end."""
    return _in_order(state, cluster, aware=False)


def fifo_aware(state: QueueState, cluster: Cluster, now_s: float) -> Allocation:
    """First in, first out, each on its fastest type with room, chosen again at each decision."""
    return _in_order(state, cluster, aware=True)


def fifo_released(state: QueueState, cluster: Cluster, now_s: float) -> Allocation:
    """What `fifo` of the code released with Gavel does (policies/fifo.py at c4fa400), which is not what its paper says.

    The type that is drawn is only struck off the list; the job goes to the last type of the list in order of names
    (v100 first of all), with room there or without. A job that follows one that has ended is checked against devices
    less those of jobs with lower numbers alone. So types are given away more than once, and their jobs take turns by
    rounds. Jobs keep their type to their end; the draws are those of Python's `random` from the simulation's seed.
    """
    on = state.type_of
    row_of = {job: row for row, job in enumerate(state.index.tolist())}
    queue, idle = deque(sorted(set(row_of) - set(on))), cluster.count.tolist()

    def give(job: int, j: int) -> None:
        on[job] = j
        idle[j] -= int(state.scale[row_of[job]])

    for job, j in sorted(on.items()):
        if job in row_of:
            idle[j] -= int(state.scale[row_of[job]])
            continue
        del on[job]
        head = row_of[queue[0]] if queue else -1
        if queue and state.scale[head] <= idle[j] and state.rates[head, j] > 0:
            give(queue.popleft(), j)
    listed = sorted((j for j in range(len(idle)) if idle[j] > 0), key=lambda j: cluster.names[j])
    while queue and listed:
        row = row_of[queue[0]]
        with_room = [at for at, j in enumerate(listed) if idle[j] >= state.scale[row]]
        if not with_room:
            break
        drawn, last = with_room[state.draws.randrange(len(with_room))], listed[-1]
        job = queue.popleft()
        if state.rates[row, last] > 0:
            give(job, last)
            if idle[last] == 0:
                listed.pop(drawn)
    x = np.zeros(state.rates.shape)
    for job, j in on.items():
        x[row_of[job], j] = 1.0
    return Allocation(x, strict=True, aware=False)


RESERVATIONS = 100
"""Waiting jobs that backfill plans ahead: what Slurm tests in a pass by default (bf_max_job_test) in older versions."""


def backfill(state: QueueState, cluster: Cluster, now_s: float, reservations: int = RESERVATIONS) -> Allocation:
    """First in, first out, with backfill as Slurm does it: a job starts sooner if it delays no reservation.

    Jobs run to their end. The first `reservations` jobs that cannot start now
    each get the earliest time and pool at which they fit beside the running
    jobs and the reservations before theirs; later jobs start if they fit
    beside all of these. One reservation is EASY backfill (Lifka, JSSPP 1995).
    A job is taken to end at its time limit; without one, when its work is done.
    """
    x = np.where(state.previous > 0.5, 1.0, 0.0)
    end_s = np.maximum(state.memory, now_s + 1.0) + np.zeros(len(x))  # who runs longer than expected ends next
    with np.errstate(divide="ignore"):
        takes_s = np.where(
            np.isfinite(state.limit_s)[:, None], state.limit_s[:, None], state.left[:, None] / state.rates
        )
    takes_s = np.where(state.rates > 0, takes_s, np.inf)  # [m, W]
    running = [np.flatnonzero(x[:, j]) for j in range(len(cluster.count))]
    plans = [
        _FreeDevices.of(now_s, int(count), end_s[rows], state.scale[rows])
        for count, rows in zip(cluster.count, running, strict=True)
    ]
    waiting = np.flatnonzero(~x.any(axis=1))
    while waiting.size and any(plan.idle[0] for plan in plans):
        if reservations > 0:
            row, waiting = int(waiting[0]), waiting[1:]
        else:
            may = np.any([plan.now(state.scale[waiting], takes_s[waiting, j]) for j, plan in enumerate(plans)], axis=0)
            if not may.any():
                break
            row, waiting = int(waiting[may.argmax()]), waiting[may.argmax() + 1 :]
        # Per pool where it runs: when it starts there, when it ends, the pool.
        starts = [
            (plan.earliest(int(state.scale[row]), takes_s[row, j]), takes_s[row, j], j)
            for j, plan in enumerate(plans)
            if np.isfinite(takes_s[row, j]) and state.scale[row] <= cluster.count[j]
        ]
        if not starts:
            continue
        start_s, length_s, j = min(starts)
        plans[j].take(start_s, start_s + length_s, int(state.scale[row]))
        if start_s <= now_s:
            x[row, j], end_s[row] = 1.0, start_s + length_s
        else:
            reservations -= 1
    return Allocation(x, strict=True, memory=np.where(x.any(axis=1), end_s, 0.0))


@dataclass(slots=True)
class _FreeDevices:
    """Devices of a pool that are free over time: `idle[k]` from `since_s[k]` until the next, the last for ever."""

    since_s: Values
    idle: Indices

    @classmethod
    def of(cls, now_s: float, count: int, end_s: Values, scale: Indices) -> _FreeDevices:
        """Start from the jobs that run: when each ends [r], and its devices [r]."""
        order = np.argsort(end_s, kind="stable")
        idle = count - scale.sum() + np.concatenate(([0], np.cumsum(scale[order])))
        return cls(np.concatenate(([now_s], end_s[order])), idle.astype(np.int64))

    def now(self, scale: Indices, takes_s: Values) -> NDArray[np.bool_]:
        """[k] Which jobs could start now and run to their end."""
        until = np.searchsorted(self.since_s, self.since_s[0] + takes_s, "left")
        return np.asarray(np.isfinite(takes_s) & (np.minimum.accumulate(self.idle)[until - 1] >= scale))

    def earliest(self, scale: int, takes_s: float) -> float:
        """Return when so many devices are free for so long, at the latest when all jobs have ended."""
        short = np.where(self.idle < scale, self.since_s, np.inf)
        # The next moment from each one on at which too few are free.
        next_short = np.minimum.accumulate(short[::-1])[::-1]
        return float(self.since_s[(next_short >= self.since_s + takes_s).argmax()])

    def take(self, start_s: float, end_s: float, scale: int) -> None:
        """Use devices from one moment to another."""
        for moment in (start_s, end_s):
            k = int(np.searchsorted(self.since_s, moment, "left"))
            if k == self.since_s.size or self.since_s[k] != moment:
                self.since_s = np.insert(self.since_s, k, moment)
                self.idle = np.insert(self.idle, k, self.idle[k - 1])
        self.idle[(self.since_s >= start_s) & (self.since_s < end_s)] -= scale


easy = partial(backfill, reservations=1)


def allox(state: QueueState, cluster: Cluster, now_s: float) -> Allocation:
    """Least total completion time of jobs of one device (AlloX, EuroSys 2020): an assignment to queue positions.

    The k-th last job of a device delays k jobs, itself included, so that its
    cost is k x its time there. Devices of one type are alike: position k of
    type j has count[j] places. Those at the head of their queue run, to the end.
    Of a long queue the shortest jobs are looked at: heads come from these, and
    the program, which grows with jobs x positions, stays within a second.
    """
    if (state.scale > 1).any():
        row = int((state.scale > 1).argmax())
        raise InputError(
            f"allox takes jobs of one device; job {state.index[row]} needs {state.scale[row]}. Use las_aware."
        )
    x = np.where(state.previous > 0.5, state.previous, 0.0)
    free = cluster.count - x.sum(axis=0).astype(np.int64)
    waiting = np.flatnonzero(x.max(axis=1, initial=0.0) == 0)
    if not waiting.size or not free.any():
        return Allocation(x, strict=True)
    time_s = state.left[waiting, None] / np.maximum(state.rates[waiting], 1e-12)
    most = max(LEAST_QUEUE, QUEUE_PER_DEVICE * int(free.sum()))
    if waiting.size > most:
        shortest = np.sort(np.argsort(time_s.min(axis=1), kind="stable")[:most])
        waiting, time_s = waiting[shortest], time_s[shortest]
    depth = 2 + math.ceil(waiting.size / free.sum())
    # Cells: waiting job x type x position, position fastest.
    job, kind, position = (part.reshape(-1) for part in np.indices((waiting.size, free.size, depth)))
    cells = np.arange(job.size)
    cost = time_s[job, kind] * (position + 1) / time_s.min()
    rows = (
        np.concatenate((job, waiting.size + kind * depth + position)), np.concatenate((cells, cells)),
        np.ones(2 * cells.size),
    )  # fmt: skip
    high = np.concatenate((np.ones(waiting.size), np.repeat(free, depth)))
    low = np.concatenate((np.ones(waiting.size), np.zeros(free.size * depth)))
    # A vertex of an assignment program is whole, so no integer search is needed.
    chosen = minimise(cost, rows=rows, num_rows=len(high), row_low=low, row_high=high).x > 0.5
    for j in np.flatnonzero(free):
        behind = 0
        for k in reversed(range(depth)):
            here = np.sort(job[chosen & (kind == j) & (position == k)])
            x[waiting[here[: max(here.size - behind, 0)]], j] = 1.0
            behind = max(here.size, behind)
    return Allocation(x, strict=True)


def gandiva(state: QueueState, cluster: Cluster, now_s: float) -> Allocation:
    """Equal shares; when more devices are asked for than there are, random pairs of equal gangs share them (OSDI 2018).

    A pair stays as long as its normalised rates add up to 1 or more on every type.
    """
    # partner [m]: the job with which each shares devices, -1 for a job alone. Candidates are the pairs of the last
    # decision and neighbours in a random order of the other jobs of equal scale.
    partner = np.full(len(state.left), -1)
    if state.scale.sum() > cluster.count.sum() and state.shared.size:
        alone = np.maximum(state.rates, 1e-300)
        kept = np.flatnonzero((state.partner >= 0) & (np.arange(len(partner)) < state.partner))
        old = [(int(a), int(state.partner[a])) for a in kept]
        loose = set(range(len(partner))) - {row for pair in old for row in pair}
        shuffled = state.rng.permutation(sorted(loose))
        by_scale = [shuffled[state.scale[shuffled] == size] for size in np.unique(state.scale)]
        new = [(int(a), int(b)) for rows in by_scale for a, b in zip(rows[::2], rows[1::2], strict=False)]
        for a, b in old + new:
            here, there = (state.shared[state.kind[i], state.kind[k]] for i, k in ((a, b), (b, a)))
            if (here > 0).all() and (there > 0).all() and (here / alone[a] + there / alone[b] >= 1).all():
                partner[a], partner[b] = b, a
    first = np.flatnonzero((partner >= 0) & (np.arange(len(partner)) < partner))
    # A pair counts as one job: all get equal device time, and none more than its whole time.
    num_rows = len(partner) - first.size
    share = cluster.count / (num_rows * state.scale[:, None])
    share = np.where(state.rates > 0, share / np.maximum(share.sum(axis=1, keepdims=True), 1.0), 0.0)
    x = np.where((partner < 0)[:, None], share, 0.0)
    return Allocation(x, np.column_stack((first, partner[first])), share[first])


# Filling the bubbles of a pipelined job with other jobs: the policy side of PipeFill.
#
# A stage of the main job is a pool of one device that is free for `bubble_s`
# of every step. A job that fits its free memory runs there at
#
#     rate = work per second alone x (bubble_s - switch_s) / step_s
#
# where switching in and out costs `switch_s` once per step; bubbles that a job
# could not use, or that would take the switches above the budget, are closed.
# A score decides which job goes to which stage (`plan.fill_scores`); the main job is never touched.


def fill(state: QueueState, cluster: Cluster, now_s: float, score: str | ScoreFn = "shortest") -> Allocation:
    """Give free devices to the job with the best score, one after the other; what runs stays to its end."""
    scored = pick(SCORES, score, "score") if isinstance(score, str) else score
    x = np.where(state.previous > 0.5, 1.0, 0.0)
    free = cluster.count - (x * state.scale[:, None]).sum(axis=0).astype(np.int64)
    with np.errstate(divide="ignore"):
        end_s = state.left[:, None] / state.rates
    end_s[x.any(axis=1)] = np.inf
    while True:
        may = np.isfinite(end_s) & (state.scale[:, None] <= free)
        if not may.any():
            return Allocation(x, strict=True)
        row, j = best_pair(scored, end_s, state.deadline_s, may)
        x[row, j] = 1.0
        free[j] -= state.scale[row]
        end_s[row] = np.inf


fill_makespan, fill_deadline = partial(fill, score="makespan"), partial(fill, score="deadline")


def bubbles(
    bubble_s: ArrayLike, free_bytes: ArrayLike, step_s: float, rates: ArrayLike, bytes_needed: ArrayLike,
    *, switch_s: float = 0.0, budget: float = 0.02,
) -> tuple[Cluster, Values]:  # fmt: skip
    """Return one pool per stage [S] and rates [m, S] of fill jobs in its bubbles.

    `rates` [m] alone on such a device, `bytes_needed` [m], `free_bytes` [S].
    All switches together may cost at most `budget` of a step of the main job:
    the stages with the longest bubbles are kept. Raises `InputError`.
    """
    bubble, free = np.asarray(bubble_s, np.float64), np.asarray(free_bytes, np.float64)
    if not (step_s > 0 and (bubble >= 0).all() and (bubble <= step_s).all() and switch_s >= 0):
        raise InputError(f"bubbles of {bubble.tolist()} s in a step of {step_s} s; give 0 <= bubble <= step, step > 0.")
    used = np.maximum(bubble - switch_s, 0.0)
    order = np.argsort(-used, kind="stable")
    allowed = int(budget * step_s / switch_s) if switch_s > 0 else len(bubble)
    used[order[allowed:]] = 0.0
    fits = np.asarray(bytes_needed, np.float64)[:, None] <= free
    rate = np.asarray(rates, np.float64)[:, None] * fits * used / step_s
    return Cluster.of({f"bubble:{stage}": 1 for stage in range(len(bubble))}), rate


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


class SchedulingPolicy(Protocol):
    """A policy. Write a function of this shape; there is nothing to subclass."""

    def __call__(self, state: QueueState, cluster: Cluster, now_s: float, /) -> Allocation:
        """Decide who should run where, from now on."""
        ...


POLICIES: Mapping[str, SchedulingPolicy] = {
    "fifo": fifo,
    "fifo_aware": fifo_aware,
    "fifo_released": fifo_released,
    "backfill": backfill,
    "easy": easy,
    "las": fairness.las,
    "las_aware": fairness.las_aware,
    "las_packed": fairness.las_packed,
    "ftf": fairness.ftf_blind,
    "ftf_aware": fairness.ftf,
    "makespan": fairness.makespan,
    "max_sum": fairness.max_sum,
    "min_cost": fairness.min_cost,
    "hierarchical": fairness.hierarchical,
    "allox": allox,
    "gandiva": gandiva,
    "fill": fill,
    "fill_makespan": fill_makespan,
    "fill_deadline": fill_deadline,
    "hadar": hadar,
    "pollux": pollux,
    "tiresias": tiresias,
    "optimus": optimus,
}
"""Policies of a queue."""

MIXING: frozenset[SchedulingPolicy] = frozenset({hadar, pollux, tiresias, optimus})
"""Those that run a gang on several types at once."""

SERVED: Mapping[str, SchedulingPolicy] = {
    name: POLICIES[name] for name in ("fifo", "fifo_aware", "las", "las_aware", "max_sum", "min_cost", "hierarchical")
}
"""Those that need to know of no job how long it is, and run each by itself: what a service can go by."""

LENDING: frozenset[SchedulingPolicy] = frozenset({allox})
"""Those whose jobs without a share take free devices under the published rules; by our own rules they wait."""

AT_ONCE: frozenset[SchedulingPolicy] = frozenset({backfill, easy})
"""Those that give devices away the moment they fall free, not at the end of a round."""
