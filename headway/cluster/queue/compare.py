"""What a recorded queue suffered, and what each policy would have made of it.

First the log is played again as it was: on each pool the jobs start in the
order in which they did, as soon as their devices are free. Where that misses
the observed mean completion time by more than 5 %, the devices that were
named, or the log, do not explain the queue, and no policy is ranked on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from headway.cluster.adaptive.workload import MeasuredJobs, published_jct_s, read_applications, read_workload
from headway.cluster.model import Cluster, Indices, Jobs, Values, check_fits
from headway.cluster.policies import AT_ONCE, POLICIES, SERVED
from headway.cluster.queue.engine import simulate
from headway.cluster.queue.logs import RecordedQueue
from headway.cluster.queue.outcome import Outcome
from headway.cluster.queue.rounds import ROUNDS_PER_DECISION
from headway.core.errors import InputError
from headway.core.tables import pick
from headway.sim.graph.process import Process

FIDELITY = 0.05
"""Largest relative error of the replayed mean completion time."""

DEFAULT_POLICIES = ("fifo", "backfill", "las", "las_aware")


@dataclass(frozen=True, slots=True, eq=False)
class PolicyComparison:
    """Policies beside what was observed."""

    observed: Outcome | None
    """As recorded; None where the log does not say when jobs started."""

    replayed: Outcome | None
    """The log played again in its own order."""

    policies: dict[str, Outcome]
    """What each would have made of it; empty where the replay is off."""

    unfit: dict[str, str] = field(default_factory=dict)
    """Policies that cannot take one of the jobs -> why."""

    @property
    def error_fraction(self) -> float | None:
        """Relative error of the replayed mean completion time."""
        if self.observed is None or self.replayed is None:
            return None
        return float(self.replayed.jct_s.mean() / self.observed.jct_s.mean() - 1)

    def explained(self, name: str) -> float | None:
        """Relative error of a policy's mean completion time against the observed one: near 0, the queue ran by it."""
        if self.observed is None:
            return None
        return float(self.policies[name].jct_s.mean() / self.observed.jct_s.mean() - 1)

    @property
    def best(self) -> str | None:
        """The policy with the least mean completion time; the first of equals."""
        return min(self.policies, key=lambda name: float(self.policies[name].jct_s.mean()), default=None)


def pools_of(queue: RecordedQueue, cluster: Cluster) -> Indices:
    """[n] The pool of each job: its recorded type, or the only one; -1 = not known. Raises `InputError`."""
    if len(cluster.names) == 1:
        return np.zeros(len(queue.jobs), np.int64)
    names = {name: j for j, name in enumerate(cluster.names)}
    strange = [kind for kind in queue.device_type if kind and kind not in names]
    if strange:
        raise InputError(
            f"the log names devices {strange[0]!r}; --devices has {', '.join(names)}. Add {strange[0]}=count."
        )
    return np.array([names.get(kind, -1) for kind in queue.device_type], np.int64)


def replay_in_order(queue: RecordedQueue, cluster: Cluster, pool: Indices) -> Values:
    """[n] When each job starts if those of a pool start in their recorded order, as soon as their devices are free."""
    process, free = Process(0), cluster.count.astype(np.int64).copy()
    order = np.lexsort((np.arange(len(queue.jobs)), queue.start_s))
    waiting = [order[pool[order] == j].tolist() for j in range(len(free))]
    head, here, start_s = [0] * len(free), np.zeros(len(queue.jobs), np.bool_), np.full(len(queue.jobs), math.nan)

    def begin(j: int) -> None:
        while head[j] < len(waiting[j]):
            job = waiting[j][head[j]]
            if not here[job] or queue.jobs.scale[job] > free[j]:
                return
            start_s[job] = process.now_s
            free[j] -= queue.jobs.scale[job]
            head[j] += 1
            process.after(float(queue.jobs.steps[job]), leave, job)

    def leave(job: int) -> None:
        free[pool[job]] += queue.jobs.scale[job]
        begin(int(pool[job]))

    def enter(job: int) -> None:
        here[job] = True
        begin(int(pool[job]))

    for job, arrival_s in enumerate(queue.jobs.arrival_s.tolist()):
        process.after(arrival_s, enter, job)
    process.run()
    return start_s


def recorded_outcome(queue: RecordedQueue, cluster: Cluster, start_s: Values, pool: Indices) -> Outcome:
    """Return what start times amount to."""
    jobs = queue.jobs
    used_s = np.bincount(np.maximum(pool, 0), jobs.steps * jobs.scale, len(cluster.names)).astype(np.float64)
    return Outcome(
        jobs, cluster, (0, len(jobs)), start_s, start_s + jobs.steps, jobs.steps, jobs.steps,
        np.zeros(len(jobs), np.int64), used_s, 0.0,
    )  # fmt: skip


def compare_policies(
    queue: RecordedQueue, cluster: Cluster, rates: Values, policies: Sequence[str] = DEFAULT_POLICIES, *, seed: int = 0,
    round_s: float = 360.0,
) -> PolicyComparison:  # fmt: skip
    """Play a recorded queue again as it was, then under each policy; raises `InputError` where none takes its jobs."""
    check_fits(queue.jobs, cluster, rates, mixed="hadar" in policies)
    observed = replayed = None
    pool = pools_of(queue, cluster)
    large = (pool >= 0) & (queue.jobs.scale > cluster.count[pool])
    if large.any():
        m = int(large.argmax())
        raise InputError(
            f"job {queue.jobs.ids[m]!r} ran on {queue.jobs.scale[m]} devices of {cluster.names[pool[m]]}; "
            f"--devices has {cluster.count[pool[m]]}. Give as many as there were."
        )
    if np.isfinite(queue.start_s).all() and (pool >= 0).all():
        observed = recorded_outcome(queue, cluster, queue.start_s, pool)
        replayed = recorded_outcome(queue, cluster, replay_in_order(queue, cluster, pool), pool)
        found = PolicyComparison(observed, replayed, {})
        if abs(found.error_fraction or 0.0) > FIDELITY:
            return found
    outcomes, unfit = dict[str, Outcome](), dict[str, str]()
    for name in policies:
        pick(POLICIES, name, "policy")
        try:
            reset_s = round_s * ROUNDS_PER_DECISION
            outcomes[name] = _as_served(queue.jobs, cluster, name, rates, seed=seed, round_s=round_s, reset_s=reset_s)
        except InputError as cause:
            unfit[name] = str(cause)
            if len(unfit) == len(policies):
                raise
    return PolicyComparison(observed, replayed, outcomes, unfit)


def compare_with_promise(
    observed: Outcome, rates: Values, policy: str, policies: Sequence[str], *, round_s: float, reset_s: float
) -> PolicyComparison:
    """Beside what a service's jobs came to, what its policy promised, and what others would have made of them.

    The promise is the simulation of the same rounds, with `rates` [n, W] as measured in the end and nothing lost to
    moves: starts of attempts are part of the work of `observed.jobs`.
    """
    jobs, cluster, each = observed.jobs, observed.cluster, dict.fromkeys([policy, *policies])
    played = {name: _as_served(jobs, cluster, name, rates, round_s=round_s, reset_s=reset_s) for name in each}
    return PolicyComparison(observed, played[policy], {name: played[name] for name in policies})


def _as_served(
    jobs: Jobs, cluster: Cluster, name: str, rates: Values, *, seed: int = 0, round_s: float, reset_s: float
) -> Outcome:  # fmt: skip
    """Simulate a policy as a service would go by it: devices that fall free within a round go to who waits."""
    fills = name in SERVED or POLICIES[name] in AT_ONCE
    return simulate(jobs, cluster, name, rates=rates, seed=seed, round_s=round_s, reset_s=reset_s, fills=fills)


def device_hours_by_owner(outcome: Outcome) -> dict[str, float]:
    """Owner -> device-hours alone on the fastest type, the largest first."""
    hours: dict[str, float] = {}
    for owner, seconds in zip(outcome.jobs.entity, outcome.alone_s * outcome.jobs.scale / 3600, strict=True):
        hours[owner or "(unknown)"] = hours.get(owner or "(unknown)", 0.0) + float(seconds)
    return dict(sorted(hours.items(), key=lambda item: -item[1]))


def answer(found: PolicyComparison) -> dict[str, object]:
    """Return the figures as `headway cluster compare --json` prints them."""
    error = found.error_fraction
    off = error is not None and abs(error) > FIDELITY
    observed = None
    if found.observed is not None:
        observed = {**found.observed.figures(), "device_hours_by_owner": device_hours_by_owner(found.observed)}
    return {
        "schema": "headway.cluster-compare/1",
        "simulated": True,
        "observed": observed,
        "replayed": found.replayed and found.replayed.figures(),
        "replay_error_fraction": error,
        "refused": f"the replay misses the observed mean completion time by {error:+.1%}" if off and error else None,
        "policies": [
            {"policy": name, "against_observed_fraction": found.explained(name), **outcome.figures()}
            for name, outcome in found.policies.items()
        ],
        "unfit": [{"policy": name, "reason": reason} for name, reason in found.unfit.items()],
        "best": found.best,
    }


# A published workload, of measured applications.

HOST_DEVICES = 4
"""Devices of a host of Pollux' measurements."""


def simulate_workload(
    trace: str, policy: str, devices: str, data: Path | None, load: float, window: tuple[int, int] | None,
    round_s: float, seed: int,
) -> tuple[Outcome, float | None]:  # fmt: skip
    """Simulate a workload of measured applications; return also the published mean completion time where there is one.

    Raises `InputError` unless the trace is pollux:W, and the devices are whole hosts of one type.
    """
    number, pool = trace.partition(":")[2], Cluster.parse(devices or "t4=64")
    total = int(pool.count.sum())
    if len(pool.names) != 1 or total % HOST_DEVICES or not number.isdigit():
        raise InputError(
            f"--trace is {trace}, --devices {devices}; write pollux:6, and one type with a multiple of {HOST_DEVICES}."
        )
    base = data or Path()
    places = (base / "data/cluster/pollux", base / "cluster/pollux", base / "pollux", base)
    folder = next((place for place in places if (place / "workloads.parquet").exists()), places[0])
    submitted = read_workload(folder, int(number), load)
    found = MeasuredJobs(submitted, read_applications(folder), adaptive=policy == "pollux")
    hosts = Cluster.of({f"host{index}": HOST_DEVICES for index in range(total // HOST_DEVICES)})
    outcome = simulate(
        found.jobs(), hosts, policy, rates=found.rates(len(hosts.names)), seed=seed, window=window, round_s=round_s,
        adapting=found,
    )  # fmt: skip
    published = published_jct_s(folder, policy, int(number), load=load, interval_s=round_s)
    return outcome, None if window or total != 64 else published
