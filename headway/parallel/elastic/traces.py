"""What a job of replicas of a pipeline gets done while hosts leave and join, by a trace of them, switches included.

Every host is one worker. One that leaves is a failure of its stage. One that joins waits until the bound on the step
gets shorter by it, or until there is a switch anyway; then it takes the role of a failed worker in the stage that lacks
most. A worker changes stages where the bound gets shorter by it. Whatever happens at one time is one switch:

    regroup      the survivors notice, meet and take the schedule for their number per stage
    lost part    the step under way is begun again where a worker left; other switches are between steps
    copy         weights and optimizer states, where a host joined or a worker changed stages
    restart      from a checkpoint, where a stage had lost all its workers

The baseline is whole replicas: with n hosts n // S of them run, re-packed at no cost at all, and share the same global
batch; a share that is not whole takes the time between those of the whole ones around it.

A trace is lines of `milliseconds,add|remove,host` (Oobleck's format), by time.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from headway.core.errors import FormatError, InputError
from headway.core.files.regular_file import read_text
from headway.parallel.elastic.replan import Counts, ElasticPlan, replan
from headway.sim.pipeline.list_schedule import graph_1f1b
from headway.sim.pipeline.lower import lower
from headway.sim.pipeline.orders import OrderFn
from headway.sim.pipeline.simulate import costs_of, simulate


@dataclass(frozen=True, slots=True)
class HostTrace:
    """When hosts join and leave."""

    time_s: tuple[float, ...]
    """[n] Time of each event, rising."""

    joins: tuple[bool, ...]
    """[n] Whether the host joins; it leaves otherwise."""

    host: tuple[str, ...]
    """[n] Name of the host."""

    @classmethod
    def read(cls, path: Path) -> HostTrace:
        """Read a file; raises `FormatError` with the line of what is no event, out of order or does not follow."""
        rows: list[tuple[float, bool, str]] = []
        present: set[str] = set()
        for number, line in enumerate(read_text(path, "a trace: milliseconds,add|remove,host").splitlines(), 1):
            if not line.strip():
                continue
            time, event, host, *more = (*map(str.strip, line.split(",")), "", "")
            if any(more) or not time.isdigit() or event not in ("add", "remove") or not host:
                raise FormatError(
                    f"{path}, line {number} is {line!r}; write milliseconds,add|remove,host: 480000,add,a."
                )
            if rows and int(time) / 1e3 < rows[-1][0]:
                raise FormatError(
                    f"{path}, line {number} is at {time} ms, before the line above it. Sort the lines by time."
                )
            if (host in present) == (event == "add"):
                state = "is there already" if event == "add" else "is not there"
                raise FormatError(f"{path}, line {number}: {host!r} {state}. Remove the line, or name another host.")
            present ^= {host}
            rows.append((int(time) / 1e3, event == "add", host))
        if not rows:
            raise FormatError(f"{path} has no event. Write lines of milliseconds,add|remove,host.")
        return cls(*zip(*rows, strict=True))


@dataclass(frozen=True, slots=True)
class SwitchCosts:
    """Seconds in which nobody trains."""

    regroup_s: float = 5.0
    """Every switch: noticing, meeting, the groups of the new schedule."""

    copy_s: float = 5.0
    """A switch in which some worker gets the state of a stage: 20 GB over 4 GB/s, for example."""

    restart_s: float = 120.0
    """A restart from a checkpoint."""

    def __post_init__(self) -> None:
        """Raise `InputError` on a time that is negative or not finite."""
        for name in ("regroup_s", "copy_s", "restart_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; give seconds >= 0.")


@dataclass(frozen=True, slots=True)
class TraceReport:
    """What was done over a trace."""

    steps: float
    """Steps with rerouting."""

    repacked_steps: float
    """Steps of whole replicas, re-packed at no cost."""

    switches: int
    """Switches that nobody trained in, restarts among them."""

    restarts: int
    """Restarts from a checkpoint."""

    paused_s: float
    """Seconds of switches, the parts of steps that were lost among them."""

    duration_s: float
    """From the first event to the last."""

    @property
    def gain(self) -> float:
        """Steps over those of whole replicas; infinite where these did none."""
        return self.steps / self.repacked_steps if self.repacked_steps else math.inf


@dataclass(slots=True)
class _Fleet:
    """Which host is in which stage."""

    plan: ElasticPlan
    stages: dict[str, int | None] = field(default_factory=dict)
    """Host -> its stage; None = it waits."""

    def counts(self) -> Counts:
        """Return the failed workers of each stage."""
        active = [stage for stage in self.stages.values() if stage is not None]
        lacking = self.plan.num_replicas - np.bincount(active, minlength=self.plan.shape.num_stages)
        return tuple(lacking.tolist())

    def empty(self) -> int:
        """Return how many stages have no worker."""
        return self.counts().count(self.plan.num_replicas)

    def cost(self) -> tuple[int, float]:
        """Return what is made small: stages without a worker, then the bound on the step."""
        return self.empty(), 0.0 if self.empty() else self.plan.bound_ns(self.counts())

    def settle(self) -> bool:
        """Give waiting hosts the roles of failed workers, move workers where that wins; say whether a host moved."""
        before = dict(self.stages)
        for host in [host for host, stage in self.stages.items() if stage is None]:
            counts = self.counts()
            if max(counts):
                self.stages[host] = counts.index(max(counts))
        while True:
            counts, cost = self.counts(), self.cost()
            mover = next((host for host, stage in self.stages.items() if stage == counts.index(min(counts))), None)
            if mover is None:
                break
            home, self.stages[mover] = self.stages[mover], counts.index(max(counts))
            if self.cost() >= cost:
                self.stages[mover] = home
                break
        return before != self.stages


def replay_trace(
    plan: ElasticPlan, trace: HostTrace, costs: SwitchCosts | None = None, *, baseline: OrderFn = graph_1f1b
) -> TraceReport:
    """Return the steps over a trace, from its first event to its last; `baseline` is the order of whole replicas."""
    costs = costs or SwitchCosts()
    fleet, p = _Fleet(plan), plan.shape.num_stages
    step_s: dict[Counts, float] = {}
    repacked_s: dict[int, float] = {}
    steps = repacked = paused_s = 0.0
    switches = restarts = 0
    now = ready = trace.time_s[0]
    started = stopped = False
    events = zip(trace.time_s, trace.joins, trace.host, strict=True)
    for time, group in itertools.groupby(events, key=lambda event: event[0]):
        counts, num_replicas = fleet.counts(), min(len(fleet.stages), plan.num_replicas * p) // p
        if not fleet.empty() and time > now:
            if counts not in step_s:
                step_s[counts] = _step_s(plan, counts)
            steps += max(0.0, time - max(now, ready)) / step_s[counts]
        if num_replicas and time > now:
            if num_replicas not in repacked_s:
                repacked_s[num_replicas] = _repacked_s(plan, num_replicas, baseline)
            repacked += (time - now) / repacked_s[num_replicas]
        lost = False
        for _, joins, host in group:
            if joins:
                fleet.stages[host] = None
            else:
                lost |= fleet.stages.pop(host) is not None
        stopped |= started and fleet.empty() > 0
        before, cost = dict(fleet.stages), fleet.cost()
        moved = fleet.settle()
        if moved and not lost and fleet.cost() >= cost:
            fleet.stages, moved = before, False
        if started and lost:
            paused_s += (steps - math.floor(steps)) * step_s.get(counts, 0.0)
            steps = float(math.floor(steps))
        if started and (lost or moved) and not fleet.empty():
            pause_s = costs.restart_s if stopped else costs.regroup_s + costs.copy_s * moved
            # A switch during a switch begins anew behind it.
            paused_s, ready = paused_s + pause_s, max(ready, time) + pause_s
            switches, restarts, stopped = switches + 1, restarts + stopped, False
        started |= not fleet.empty()
        now = time
    return TraceReport(steps, repacked, switches, restarts, paused_s, now - trace.time_s[0])


def _step_s(plan: ElasticPlan, counts: Counts) -> float:
    """Return the seconds of a step without so many workers of each stage."""
    return replan(plan, [(d, stage) for stage, count in enumerate(counts) for d in range(count)]).span_ns / 1e9


def _repacked_s(plan: ElasticPlan, num_replicas: int, baseline: OrderFn) -> float:
    """Return the seconds of a step of whole replicas with the global batch of all."""
    share = plan.shape.num_microbatches * plan.num_replicas / num_replicas

    def step_ns(num_microbatches: int) -> int:
        shape = replace(plan.shape, num_microbatches=num_microbatches)
        times = simulate(lower(baseline(shape), shape.graph), costs_of(shape))
        return int((times.last_ns - times.first_ns).max())

    below, above = step_ns(math.floor(share)), step_ns(math.ceil(share))
    return (below + (above - below) * (share - math.floor(share))) / 1e9
