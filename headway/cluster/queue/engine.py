"""A queue played through under a policy: who would have run when, where, and how long each job would have taken.

Rounds of `round_s` seconds. At the end of one the steps that were done are
credited, finished jobs leave, arrivals enter; when the set of jobs changed
and `reset_s` has passed, the policy decides anew. Deterministic in the seed.

>>> jobs = Jobs(["a", "b"], [1, 1], [3600.0, 7200.0], [0.0, 0.0])
>>> outcome = simulate(jobs, Cluster.of({"v100": 1}), "fifo", rates=[[1.0], [1.0]])
>>> outcome.jct_s.tolist()
[3600.0, 10800.0]
"""

from __future__ import annotations

import functools
import math
import random
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from headway.cluster.model import (
    Adapting,
    Allocation,
    Cluster,
    Indices,
    Jobs,
    QueueState,
    Rates,
    Resize,
    Values,
    check_fits,
    check_resizes,
    pools_that_fit,
)
from headway.cluster.policies import AT_ONCE, LENDING, MIXING, POLICIES, SERVED, SchedulingPolicy
from headway.cluster.queue.outcome import Outcome
from headway.cluster.queue.rounds import MOMENT_S, ORDERS, CandidateRows, RoundReport, RunningRows, Timing, chosen_rows
from headway.core.errors import HeadwayError, InputError
from headway.core.tables import pick
from headway.sim.graph.process import Process

MOST_ROUNDS = 100_000
"""Rounds that all jobs need at least: each takes half a millisecond."""

PER_JOB = (
    "left", "finish_s", "start_s", "isolated_s", "isolated_rate", "moves", "previous", "partner", "ran_on", "kind_of",
    "debt_s", "served_s", "memory", "stranded",
)  # fmt: skip
"""What an engine keeps of each job, [n] or [n, W]."""

MOST_IDLE_ROUNDS = 1000
"""Rounds in a row in which a policy may run nothing, with jobs waiting and none to come."""


def simulate(
    jobs: Jobs,
    cluster: Cluster | Mapping[str, int],
    policy: str | SchedulingPolicy,
    *,
    rates: ArrayLike | Rates,
    seed: int = 0,
    window: tuple[int, int] | None = None,
    round_s: float = 360.0,
    reset_s: float = 1920.0,
    rules: str = "headway",
    adapting: Adapting | None = None,
    resizes: Sequence[Resize] = (),
    fills: bool = False,
) -> Outcome:
    """Play a queue through; `rates` [n, W] are steps/s of each whole job on each type of the cluster.

    `window` (first, last) ends the simulation when jobs first..last-1 are
    done; figures are means over them. `rules` "gavel" is the published
    mechanism. With `adapting`, columns of the cluster are hosts, rounds begin
    where it says, each with a decision, and what a job does in one
    is asked of `adapting`; the policy must pick whole devices. `resizes` change pools
    while it runs: a round ends there, gangs on devices that leave are preempted,
    and a job that no pool can ever run again is left unfinished, and named in the
    notes. With `fills`, devices that fall free within a round are given away at
    once. Raises `InputError` on jobs that fit no pool at the start, on NaN or
    negative rates, and on an unknown policy.
    """
    pools = cluster if isinstance(cluster, Cluster) else Cluster.of(cluster)
    check_resizes(pools, resizes)
    decide = pick(POLICIES, policy, "policy") if isinstance(policy, str) else policy
    if adapting is not None and isinstance(policy, str) and decide not in MIXING:
        raise InputError("this policy does not place jobs on hosts. Choose pollux, tiresias or optimus.")
    if adapting is not None and resizes:
        raise InputError(
            "jobs that adapt run on hosts that stay. Leave out the resizes, or simulate jobs of fixed size."
        )
    if fills and decide not in (*SERVED.values(), *AT_ONCE):
        raise InputError(f"with fills a policy gives each job its own devices. Choose one of: {', '.join(SERVED)}.")
    table = Rates.of(rates, jobs, pools)
    check_fits(jobs, pools, table.alone, mixed=decide in MIXING)
    first, last = window or (0, len(jobs))
    if not 0 <= first < last <= len(jobs):
        raise InputError(f"the window is {first}:{last}, there are {len(jobs)} jobs; choose 0 <= first < last <= that.")
    timing = Timing(rules, round_s, reset_s, fills)
    alone_s = (jobs.steps / table.alone.max(axis=1, initial=0.0).clip(1e-300))[:last]
    least_s = max(alone_s.max(), (alone_s * jobs.scale[:last]).sum() / pools.count.sum()) if adapting is None else 0.0
    if least_s > MOST_ROUNDS * round_s:
        raise InputError(
            f"the jobs need {least_s:.3g} s on these devices, in rounds of {round_s:g} s; at most {MOST_ROUNDS:,} are "
            f"simulated. Correct the longest job ({jobs.ids[int(alone_s.argmax())]!r}), or pass --round-s "
            f"{math.ceil(least_s / MOST_ROUNDS)}."
        )
    return RoundEngine(jobs, pools, decide, table, seed, (first, last), timing, adapting, resizes).run()


class RoundEngine:
    """The state of one queue: `advance` ends a round, or a part of it, and begins the next one.

    `simulate` runs it on a simulated clock. A service (`live`) calls `advance` itself, with what its jobs did.
    """

    def __init__(
        self, jobs: Jobs, cluster: Cluster, decide: SchedulingPolicy, rates: Rates, seed: int, window: tuple[int, int],
        timing: Timing, adapting: Adapting | None = None, resizes: Sequence[Resize] = (), live: bool = False,
    ) -> None:  # fmt: skip
        n, num_types = rates.alone.shape
        self.jobs, self.cluster, self.decide, self.rates, self.timing = jobs, cluster, decide, rates, timing
        self.process, self.adapting = Process(seed), adapting
        self.shuffler, self.draws = random.Random(seed + 5), random.Random(seed)  # streams of the released code
        self.window, self.resizes = window, deque(sorted(resizes, key=lambda resize: resize.at_s))
        self.round_s, self.resized, self.stranded = timing.round_s, False, np.zeros(n, np.bool_)
        self.sizes = [(0.0, int(cluster.count.sum()))]  # from when on the cluster had how many devices
        self.entity = np.unique(np.array(jobs.entity), return_inverse=True)[1].reshape(-1)
        self.able = self.allowed = rates.alone
        self.find_pools()
        self.fastest = self.able.max(axis=1, initial=0.0).clip(1e-300)
        self.left, self.finish_s, self.start_s = jobs.steps.copy(), np.full(n, math.nan), np.full(n, math.nan)
        self.isolated_s, self.isolated_rate = np.zeros(n), np.zeros(n)
        self.moves, self.previous = np.zeros(n, np.int64), np.zeros((n, num_types))
        self.partner, self.ran_on, self.kind_of = np.full(n, -1), np.full(n, -1), np.full(n, -1)
        # Jobs that adapt are built anew for each size: their first start costs as much as a later one.
        self.debt_s = jobs.restart_s.copy() if adapting else np.zeros(n)
        self.served_s, self.memory = np.zeros(n), np.zeros(n)
        self.used_s = np.zeros(num_types)  # device-seconds
        self.next_job, self.waiting_window = 0, window[1] - window[0]
        self.active = self.picked_jobs = np.zeros(0, np.int64)
        self.rows = CandidateRows.none(num_types)
        self.need, self.reset_at_s, self.idle_rounds = False, -math.inf, 0
        self.allocation = Allocation(np.zeros((0, num_types)))
        self.running: RunningRows | None = None
        self.live, self.border_s, self.type_of = live, -math.inf, dict[int, int]()
        self.decide_s, self.notes = [0.0], dict[str, None]()
        self.prices: list[tuple[float, tuple[float, ...]]] = []

    def run(self) -> Outcome:
        """Let everything happen."""
        if len(self.jobs):
            self.process.after(self.wait_s(float(max(self.jobs.arrival_s[0], 0.0))), self.round)
        self.process.run()
        mixed = (self.rates.alone * self.cluster.count).sum(axis=1).clip(1e-300) / max(self.cluster.count.sum(), 1)
        return Outcome(
            self.jobs, self.cluster, self.window, self.start_s, self.finish_s, np.asarray(self.jobs.steps / mixed),
            np.asarray(self.jobs.steps / self.fastest), self.moves, self.used_s, max(self.decide_s),
            tuple(self.notes), tuple(self.prices), tuple(self.decide_s[1:]), tuple(self.sizes),
        )  # fmt: skip

    def round(self) -> None:
        """End a round and begin the next one."""
        length_s = self.advance(self.process.now_s)
        if length_s is not None:
            self.process.after(self.wait_s(length_s), self.round)

    def advance(
        self, now_s: float, reports: Mapping[int, RoundReport] | None = None, fixed: Collection[int] = ()
    ) -> float | None:
        """Book what has ended by now, decide if it is time, give devices to jobs; return the seconds to the next call.

        None: every job is done, or there is none. A live queue passes `reports`, job -> what it did, of all jobs that
        ran; at the end of a round the jobs `fixed` keep their devices, whatever the policy says.
        """
        over = not self.timing.fills or now_s >= self.border_s - MOMENT_S
        over = over or bool(self.resizes and self.resizes[0].at_s <= now_s + MOMENT_S)
        self.credit(now_s, over, reports)
        self.resize(now_s)
        self.arrive(now_s)
        over = over or self.running is None
        arrivals = self.next_job < len(self.jobs)
        if not self.waiting_window or not (arrivals or self.active.size):
            return None
        self.need = self.need or self.adapting is not None  # what jobs report changes with every round
        due = now_s - self.reset_at_s >= self.timing.reset_s or self.allocation.devices is not None
        # Where jobs without a share wait, free devices wait too: by our own rules such policies decide each round.
        due = due or self.resized or (self.allocation.strict and self.timing.rules != "gavel")
        until_s = self.resizes[0].at_s - now_s if self.resizes else math.inf
        if over:
            self.border_s = now_s + min(self.timing.round_s, until_s)
        self.round_s = self.border_s - now_s if self.timing.fills else min(self.timing.round_s, until_s)
        if self.active.size and self.need and due:
            self.solve(now_s)
        length_s = self.start(now_s, over, fixed) if self.active.size else 0.0
        if length_s > 0:
            self.idle_rounds = 0
        elif arrivals:
            length_s = self.jobs.arrival_s[self.next_job] - now_s
        elif self.resizes and not self.need:  # jobs wait for devices to come back
            length_s = until_s
        else:  # nobody runs and nobody comes: decide at once, then let time pass
            self.idle_rounds += 1
            length_s = 0.0 if self.need else self.timing.round_s
            self.reset_at_s = -math.inf
            if self.idle_rounds > MOST_IDLE_ROUNDS and not self.live:
                raise HeadwayError(
                    f"the policy leaves {self.active.size} jobs waiting for ever. Choose another policy."
                )
        return min(max(length_s, 0.0), until_s)

    def find_pools(self) -> None:
        """Note where jobs run now: not on a pool that is smaller than the gang."""
        jobs, cluster, alone = self.jobs, self.cluster, self.rates.alone
        fits = (jobs.scale[:, None] <= cluster.count) | (self.adapting is not None)
        self.able = np.where(fits, alone, 0.0)
        self.allowed = alone * (cluster.count > 0) if self.decide in MIXING else self.able
        self.fit = pools_that_fit(jobs, cluster, alone, mixed=self.decide in MIXING)

    def resize(self, now_s: float) -> None:
        """Let devices leave or come back; who ran on those that left waits, and is decided on at once."""
        before = self.cluster
        while self.resizes and self.resizes[0].at_s <= now_s + MOMENT_S:
            self.cluster = self.resizes.popleft().of(self.cluster)
        if self.cluster is before:
            return
        self.find_pools()
        self.need = self.resized = True
        self.sizes.append((now_s, int(self.cluster.count.sum())))
        # Whoever keeps its devices to the end (fifo, allox) keeps them in order of arrival, as far as they go.
        for j in np.flatnonzero(self.cluster.count < before.count):
            there = self.active[self.previous[self.active, j] > 0.5]
            self.previous[there[np.cumsum(self.jobs.scale[there]) > self.cluster.count[j]], j] = 0.0
        fits, later = np.isfinite(self.finish_s) | self.stranded, self.cluster
        for resize in (None, *self.resizes):
            later = resize.of(later) if resize else later
            fits |= pools_that_fit(self.jobs, later, self.rates.alone, mixed=self.decide in MIXING)
        lost = np.flatnonzero(~fits & (not self.live))  # of a service's devices nobody knows whether they come back
        self.stranded[lost] = True
        self.waiting_window -= int(((lost >= self.window[0]) & (lost < self.window[1])).sum())
        self.active = self.active[~self.stranded[self.active]]
        self.rows.keep(~(self.stranded[self.rows.a] | ((self.rows.b >= 0) & self.stranded[self.rows.b])))
        self.notes.update(
            (f"job {self.jobs.ids[job]!r} needs {self.jobs.scale[job]} devices: none are left for it", None)
            for job in lost.tolist()
        )

    def wait_s(self, length_s: float) -> float:
        """Time to the next round: with jobs that adapt and are aligned, to the first multiple of its length."""
        if self.adapting is None or not self.adapting.aligned:
            return length_s
        now_s, round_s = self.process.now_s, self.timing.round_s
        later = math.floor(now_s / round_s + 1e-9) + 1
        return max(math.ceil((now_s + length_s) / round_s - 1e-9), later) * round_s - now_s

    def credit(self, now_s: float, over: bool, reports: Mapping[int, RoundReport] | None) -> None:
        """Book the steps and the time of rows that end now: all at the end of a round, else those that are done."""
        if self.running is None:
            return
        ended, rows, ends = self.running, self.rows, np.ones(self.running.a.size, np.bool_)
        if not over:
            ends = ended.since_s + ended.seconds <= now_s + MOMENT_S
            if reports is not None:
                ends = np.array([reports[job].ended for job in ended.a.tolist()])
        if self.timing.fills:  # the ledger may be another one by now
            ended.row = rows.of(ended.a)
        self.running = None if ends.all() else ended.take(~ends)
        ended = ended.take(ends)
        for row, job in enumerate(ended.a.tolist() if reports else ()):  # measured, not as predicted
            report = (reports or {})[job]
            ended.seconds[row], ended.steps_a[row] = report.seconds, self.left[job] if report.done else report.steps
        rows.time_on[ended.row, ended.kind] += ended.seconds
        done: list[int] = []
        for jobs, steps in ((rows.a[ended.row], ended.steps_a), (rows.b[ended.row], ended.steps_b)):
            there = jobs >= 0
            who, amount = jobs[there], steps[there]
            self.left[who] -= amount
            self.isolated_s[who] += amount / self.isolated_rate[who]
            finished = self.left[who] <= 1e-9 * self.jobs.steps[who]
            self.finish_s[who[finished]] = (ended.since_s + ended.seconds)[there][finished]
            done.extend(who[finished].tolist())
        if done:
            self.waiting_window -= sum(self.window[0] <= job < self.window[1] for job in done)
            self.forget_finished()

    def forget_finished(self) -> None:
        """Let jobs that are done leave the queue."""
        gone, rows = np.isfinite(self.finish_s), self.rows
        self.active = self.active[~gone[self.active]]
        rows.keep(~(gone[rows.a] | ((rows.b >= 0) & gone[rows.b])))
        self.need = True

    def add(self, jobs: Jobs, alone: Values) -> None:
        """Let more jobs come, at `alone` [k, W] steps/s, no sooner than those that are here (a live queue)."""
        table = Rates.of(alone, jobs, self.cluster)
        fresh = RoundEngine(jobs, self.cluster, self.decide, table, 0, self.window, self.timing, live=True)
        for name in PER_JOB:
            setattr(self, name, np.concatenate((getattr(self, name), getattr(fresh, name))))
        self.jobs = self.jobs.with_more(jobs)
        self.entity = np.unique(np.array(self.jobs.entity), return_inverse=True)[1].reshape(-1)
        self.set_rates(np.concatenate((self.rates.alone, alone)))

    def set_rates(self, alone: Values) -> None:
        """Go on with other rates [n, W] of single jobs, steps/s as measured."""
        self.rates = Rates.of(alone, self.jobs, self.cluster)
        self.find_pools()
        self.fastest = self.able.max(axis=1, initial=0.0).clip(1e-300)
        self.rows.rate_a = self.able[self.rows.a]

    def arrive(self, now_s: float) -> None:
        """Let in the jobs that have been submitted by now."""
        last = int(np.searchsorted(self.jobs.arrival_s, now_s, "right"))
        if last == self.next_job:
            return
        new = np.arange(self.next_job, last)[~self.stranded[self.next_job : last]]
        self.next_job = last
        self.active = np.concatenate((self.active, new))
        self.need = True
        new = new[self.fit[new]]  # the others wait until devices come back
        self.isolated_rate[new] = self.isolated(new)
        share = np.zeros((new.size, len(self.cluster.names)))
        decided = self.timing.rules != "gavel"
        if decided and not self.allocation.strict:  # an equal share until the next decision
            share = self.equal(new)
        half_s = self.timing.round_s / 2
        fresh = CandidateRows.singles(new, self.jobs.scale[new], share, self.able[new], half_s, decided)
        fresh.owed = -share * min(now_s - self.reset_at_s, now_s)  # of the time before it came it is owed nothing
        self.rows.append(fresh)

    def following_cluster(self) -> Cluster:
        """Return the cluster behind the changes that are still to come."""
        return functools.reduce(lambda cluster, resize: resize.of(cluster), self.resizes, self.cluster)

    def equal(self, jobs: Indices) -> Values:
        """[k, W] An equal share of the cluster for each job, where it runs, at most its whole time."""
        share = self.cluster.count / (max(self.active.size, 1) * self.jobs.scale[jobs, None])
        return np.asarray(share / np.maximum(share.sum(axis=1, keepdims=True), 1.0))

    def isolated(self, jobs: Indices) -> Values:
        """[k] Steps per second with an equal share of the cluster (Gavel's normaliser of finish-time fairness)."""
        return np.asarray((self.rates.alone[jobs] * self.equal(jobs)).sum(axis=1)).clip(1e-300)

    def solve(self, now_s: float) -> None:
        """Ask the policy, and begin a new ledger."""
        at, jobs, rates = self.active[self.fit[self.active]], self.jobs, self.rates
        # Row i of what the policy sees is job at[i]; `position` [n] leads from a job back to its row.
        position = np.full(len(jobs), -1)
        position[at] = np.arange(at.size)
        partner = np.where(self.partner[at] >= 0, position[self.partner[at]], -1)
        self.isolated_rate[at] = self.isolated(at)
        state = QueueState(
            at, self.allowed[at], rates.kind[at], rates.shared, self.left[at], jobs.scale[at], jobs.weight[at],
            self.entity[at], jobs.arrival_s[at], jobs.deadline_s[at], self.isolated_s[at], jobs.restart_s[at],
            self.previous[at], partner, self.process.rng("policy"), self.moves[at], self.served_s[at], self.memory[at],
            self.adapting, jobs.limit_s[at], self.draws, self.type_of,
        )  # fmt: skip
        clock = time.perf_counter()
        found = self.allocation = self.decide(state, self.cluster, now_s) if at.size else Allocation(state.rates)
        self.decide_s.append(time.perf_counter() - clock)
        self.notes.update((f"the deadline of job {jobs.ids[job]!r} cannot be met", None) for job in found.late)
        if found.prices.size:
            self.prices.append((now_s, tuple(found.prices.tolist())))
        self.previous[at] = found.x if found.devices is None else found.devices
        if found.memory is not None:
            self.memory[at] = found.memory
        self.partner[at] = -1
        # The new ledger begins with what the old one owed to rows of single jobs; what pairs were owed lapses.
        elapsed_s = min(now_s - self.reset_at_s, now_s)
        half_s = self.timing.round_s / 2
        alone = self.rows.b < 0
        owed = np.zeros((len(jobs), len(self.cluster.names)))
        owed[self.rows.a[alone]] = ORDERS[self.timing.rules].carry(self.rows, elapsed_s, half_s)[alone]
        self.rows = CandidateRows.singles(at, jobs.scale[at], found.x, self.able[at], half_s, True)
        self.rows.owed = owed[at]
        if len(found.pairs):
            a, b = at[found.pairs[:, 0]], at[found.pairs[:, 1]]
            self.partner[a], self.partner[b] = b, a
            pairs = CandidateRows.singles(a, jobs.scale[a], found.pair_x, self.able[a], half_s, True)
            pairs.b, pairs.rate_a = b, rates.shared[rates.kind[a], rates.kind[b]]
            pairs.rate_b = rates.shared[rates.kind[b], rates.kind[a]]
            self.rows.append(pairs)
        self.need, self.reset_at_s, self.picked_jobs, self.resized = False, now_s, at, False

    def start(self, now_s: float, over: bool, fixed: Collection[int] = ()) -> float:
        """Give devices to rows, and return how long until one ends, or the round does (0: nothing runs).

        Who runs keeps its devices within a round (not `over`), and `fixed` jobs keep them at its end too.
        """
        rows, found, count, runs = self.rows, self.allocation, self.cluster.count, self.running
        stays = np.array(sorted(fixed), np.int64) if over or runs is None else runs.a
        stays = stays[self.fit[stays] & np.isnan(self.finish_s[stays])]
        if stays.size:
            taken = np.bincount(self.kind_of[stays], self.jobs.scale[stays], count.size).astype(np.int64)
            count = np.maximum(count - taken, 0)
        # For each of r chosen rows: row [r] of the ledger, kind [r] its type, used [r, W] devices, rate [r] steps/s.
        if found.devices is not None:
            row, kind, used, rate = self.picked(found.devices)
        else:
            types = list(range(len(count)))
            if self.timing.rules == "headway":
                rows.starving = rows.lateness(now_s, self.jobs, self.left, self.fastest)
            if self.timing.rules == "gavel" and not found.aware:
                self.shuffler.shuffle(types)
            elif not found.aware:
                types = self.process.rng("types").permutation(len(count)).tolist()
            strict = found.strict and not (self.timing.rules == "gavel" and self.decide in LENDING)
            row, kind = chosen_rows(
                rows, types, count, len(self.jobs), ORDERS[self.timing.rules], strict,
                now_s - self.reset_at_s, self.timing.round_s / 2, stays,
            )  # fmt: skip
            if over and stays.size:
                row, kind = np.append(row, rows.of(stays)), np.append(kind, self.kind_of[stays])
            used, rate = np.zeros((row.size, count.size)), rows.rate_a[row, kind]
            used[np.arange(row.size), kind] = rows.scale[row]
        if not row.size:
            if over or runs is None:
                self.ran_on[:] = -1
                return 0.0
            return self.until_next_s(now_s)
        a, b = rows.a[row], rows.b[row]
        before = self.ran_on
        lost_s = self.moved(a, b, kind, used)
        if not over:
            self.ran_on[stays] = before[stays]
        if self.adapting is None:
            steps_a, seconds_a = self.work(a, rate, lost_s)
        else:
            steps_a, seconds_a = self.adapting.work(a, used, self.round_s - lost_s)
            steps_a, seconds_a = np.minimum(steps_a, self.left[a]), seconds_a + lost_s
        steps_b, seconds_b = np.zeros(row.size), np.zeros(row.size)
        paired = np.flatnonzero(b >= 0)
        if paired.size:
            steps_b[paired], seconds_b[paired] = self.work(
                b[paired], rows.rate_b[row[paired], kind[paired]], lost_s[paired]
            )
        # A pair keeps its devices until both of its jobs are done.
        seconds = np.maximum(seconds_a, seconds_b)
        first = a[np.isnan(self.start_s[a])]
        self.start_s[first] = now_s
        first = b[paired][np.isnan(self.start_s[b[paired]])]
        self.start_s[first] = now_s
        self.used_s += (used * seconds[:, None]).sum(axis=0)
        self.served_s[a] += used.sum(axis=1) * seconds
        self.kind_of[a] = kind
        begins = RunningRows(row, kind, a, np.full(row.size, now_s), seconds, steps_a, steps_b)
        self.running = begins if over or runs is None else runs.with_more(begins)
        return self.until_next_s(now_s)

    @property
    def num_free(self) -> int:
        """Devices that nobody has."""
        used = 0 if self.running is None else int(self.jobs.scale[self.running.a].sum())
        return int(self.cluster.count.sum()) - used

    def until_next_s(self, now_s: float) -> float:
        """Seconds until the round ends; with fills until somebody is done, or comes while devices are free."""
        assert self.running is not None, "somebody runs"
        if not self.timing.fills:
            return float(self.running.seconds.max())
        next_s = min(self.border_s, float((self.running.since_s + self.running.seconds).min()))
        if self.next_job < len(self.jobs) and self.num_free:
            next_s = min(next_s, float(self.jobs.arrival_s[self.next_job]))
        return next_s - now_s

    def picked(self, devices: Indices) -> tuple[Indices, Indices, Values, Values]:
        """Return rows, their slowest types, devices and rates of whole picks."""
        decided = self.picked_jobs
        alive = np.flatnonzero((devices.sum(axis=1) > 0) & np.isnan(self.finish_s[decided]))
        used = devices[alive]
        rates = np.where(used > 0, self.rates.alone[decided[alive]], math.inf)
        return self.rows.of(decided[alive]), rates.argmin(axis=1), used.astype(np.float64), rates.min(axis=1)

    def moved(self, a: Indices, b: Indices, kind: Indices, used: Values) -> Values:
        """Count the jobs that start again elsewhere or after a pause, and return the time that each row loses to it."""
        # Placements are compared by hash: with jobs that adapt `used` has a column per host, hundreds of them, and the
        # counts as digits of one number would not fit. The hash of bytes is never -1, which is "did not run".
        here = np.fromiter((hash(row.tobytes()) for row in used), np.int64, len(used))
        before, self.ran_on = self.ran_on, np.full(len(self.jobs), -1)
        for who, at in ((a, here), (b[b >= 0], here[b >= 0])):
            again = who[np.isfinite(self.start_s[who]) & (before[who] != at)]
            self.moves[again] += 1
            self.debt_s[again] = self.jobs.restart_s[again]
            self.ran_on[who] = at
        lost_s = np.minimum(self.debt_s[a], self.round_s)
        lost_s[b >= 0] = np.minimum(np.maximum(lost_s[b >= 0], self.debt_s[b[b >= 0]]), self.round_s)
        self.debt_s[a] = np.maximum(self.debt_s[a] - lost_s, 0.0)
        self.debt_s[b[b >= 0]] = np.maximum(self.debt_s[b[b >= 0]] - lost_s[b >= 0], 0.0)
        return lost_s

    def work(self, jobs: Indices, rate: Values, lost_s: Values) -> tuple[Values, Values]:
        """Return the steps that jobs do in a round, and the seconds that takes; the published rules do whole steps."""
        steps = rate * (self.round_s - lost_s)
        if self.timing.rules == "gavel":
            steps = np.where(steps >= 1, np.floor(steps), steps)
        steps = np.minimum(steps, self.left[jobs])
        return steps, lost_s + steps / rate
