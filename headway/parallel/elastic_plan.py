"""What lost ranks would cost a recorded job of replicas of a pipeline: `replan` under the times of its run.

The order and the times of the stages are those of the first replica. Each set of up to two lost workers that has other
workers of its stages is one case; where another one ends the job is counted. A step with a staggered optimizer takes
the span, one of headway's runner, whose optimizers wait for all stages, the makespan.

Schedules of a job with replicas of a pipeline for the failures that may come, made before they come.

Workers of a stage hold the same weights, so a failure is known by its stage alone: whichever worker of the stage
failed, the survivors share its roles in the same schedule (SlipStream's normalisation of failures; source:
`elastic.reroute`). The schedules are made for failed roles in the last replicas, on all stages the same ones, because
one pipeline that lost several workers disturbs the others less than several that lost one each:

    failed workers        0:1  2:2              failed roles     2:1  2:2
    who has which role    0:2 and 1:2 their own; 2:1 has 0:1; all others their own

No weights are copied for that; where optimizer states are cut over the replicas of a stage, theirs are.

>>> plan = ElasticPlan.build(PipelineShape(num_ranks=4, num_microbatches=6), num_replicas=3)
>>> found = replan(plan, [(1, 2)])
>>> found.span_ns, found.makespan_ns, found.fault_free_span_ns, found.bound_ns, found.roles[6], found.roles[10]
(27, 29, 27, 27, -1, 6)

What a job of replicas of a pipeline gets done while hosts leave and join, by a trace of them, switches included.

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import read_text
from headway.parallel.rerouted import Worker, checked_workers, replicate, reroute, stage_span_ns
from headway.sim.pipeline.actions import PipelineProgram, StageGraph
from headway.sim.pipeline.lower import lower
from headway.sim.pipeline.orders import OrderFn, PipelineShape, one_stage_per_rank
from headway.sim.pipeline.simulate import costs_of, graph_1f1b, simulate
from headway.sim.recorded.program import Program
from headway.sim.recorded.stage_orders import RecordedPipeline

MOST_SCHEDULES = 1000
"""Schedules of a plan; each takes some 10 ms to make."""

Counts = tuple[int, ...]
"""[stages] Failed workers of each stage."""


@dataclass(frozen=True, slots=True)
class Replanned:
    """What a job does without some of its workers."""

    program: PipelineProgram
    """What each rank does; a failed one does nothing. Rank d S + s is worker (d, s) of S stages."""

    roles: tuple[int, ...]
    """[ranks] The rank of the schedule that each rank is; -1 for a failed one."""

    span_ns: int
    """A step with a staggered optimizer: the longest time that the workers of a stage are at work on it."""

    makespan_ns: int
    """A step with an optimizer that waits for all stages."""

    fault_free_span_ns: int
    """A step without failures under 1F1B."""

    bound_ns: float
    """The longer of that and the work of the stage with the fewest workers for its microbatches, shared evenly."""


@dataclass(frozen=True, slots=True, eq=False)
class ElasticPlan:
    """A job of replicas of a pipeline with one stage per rank, and its schedules by failed workers per stage."""

    shape: PipelineShape
    """One replica: its stages, their times, its microbatches, and how many activations a worker may hold."""

    num_replicas: int
    """D: replicas."""

    fault_free_span_ns: int
    """A step without failures, under 1F1B or the order that was given."""

    schedules: dict[Counts, PipelineProgram]
    """Failed workers per stage -> the program without those roles of the last replicas. (0, ..., 0) is 1F1B."""

    @classmethod
    def build(
        cls, shape: PipelineShape, num_replicas: int, *, most_failures: int = 1, order: PipelineProgram | None = None
    ) -> ElasticPlan:
        """Make the schedules for up to so many failures; a cap that is not given is twice the number of stages.

        `order` is what a replica does without failures, 1F1B if not given.

        Raises `InputError` for several stages per rank, less than one replica, and more schedules than
        `MOST_SCHEDULES`.
        """
        one_stage_per_rank(shape, "an elastic plan")
        shape = replace(shape, cap=2 * shape.num_stages if shape.cap is None else int(shape.cap))
        # C(S + K, K) ways to have at most K failures on S stages.
        ways = math.comb(shape.num_stages + max(most_failures, 0), shape.num_stages)
        if most_failures < 0 or ways > MOST_SCHEDULES:
            raise InputError(
                f"{most_failures} failures on {shape.num_stages} stages would be {ways} schedules; give 0 or more "
                f"failures with at most {MOST_SCHEDULES} schedules. Others are made when they are needed."
            )
        order = order or lower(graph_1f1b(shape), shape.graph)
        times = simulate(order, costs_of(shape))
        none = (0,) * shape.num_stages
        plan = cls(shape, num_replicas, stage_span_ns(order, times), {none: replicate(order, num_replicas)})
        for counts in _counts(shape.num_stages, most_failures, num_replicas):
            plan.schedules[counts] = plan.schedule(counts)
        return plan

    def schedule(self, counts: Counts) -> PipelineProgram:
        """Return the program without so many workers of each stage, of those made before or made now."""
        if counts in self.schedules:
            return self.schedules[counts]
        roles = [(self.num_replicas - 1 - k, stage) for stage, count in enumerate(counts) for k in range(count)]
        healthy = self.schedules[(0,) * self.shape.num_stages]
        cap = None if self.shape.cap is None else int(self.shape.cap)
        return reroute(healthy, roles, costs=costs_of(self.shape), cap=cap)

    def bound_ns(self, counts: Counts) -> float:
        """Return the longer of the step without failures and M D / (D - f) of a stage's work, f of D workers failed."""
        costs, d = costs_of(self.shape), self.num_replicas
        work_ns = (costs.forward_ns + costs.input_ns + costs.weight_ns) * self.shape.num_microbatches
        # As whole numbers where they are, which is exact.
        shares = [divmod(int(ns) * d, d - failed) for ns, failed in zip(work_ns, counts, strict=True)]
        loads = [q + r / (d - failed) if r else q for (q, r), failed in zip(shares, counts, strict=True)]
        return max(self.fault_free_span_ns, *loads)


def replan(plan: ElasticPlan, failures: Iterable[Sequence[int]]) -> Replanned:
    """Return what the job does without the failed workers, pairs (replica, stage).

    Its schedule is the one made before for as many failures per stage, or is made now. Raises `InputError` for an
    unknown worker, and where no worker of a stage is left.
    """
    num_stages, d = plan.shape.num_stages, plan.num_replicas
    lost = checked_workers(failures, d, num_stages)
    counts = tuple(np.bincount([worker.stage for worker in lost], minlength=num_stages).tolist())
    logical = plan.schedule(counts)
    roles = [-1] * (d * num_stages)
    for stage, count in enumerate(counts):
        gone = {worker.replica for worker in lost if worker.stage == stage}
        # Workers of replicas that have no role in the schedule take those of failed workers; all others have their own.
        vacated = iter(sorted(gone & set(range(d - count))))
        for replica in sorted(set(range(d)) - gone):
            roles[replica * num_stages + stage] = (
                replica if replica < d - count else next(vacated)
            ) * num_stages + stage
    orders = logical.orders()
    program = lower(tuple(() if role < 0 else orders[role] for role in roles), logical.graph)
    times = simulate(program, costs_of(plan.shape))
    span_ns = stage_span_ns(program, times)
    return Replanned(program, tuple(roles), span_ns, times.makespan_ns, plan.fault_free_span_ns, plan.bound_ns(counts))


def _counts(num_stages: int, most_failures: int, num_replicas: int) -> Iterator[Counts]:
    """Yield how many workers of each stage may have failed, fewest failures first, never all of a stage."""
    for failures in range(1, most_failures + 1):
        for stages in itertools.combinations_with_replacement(range(num_stages), failures):
            counts = tuple(np.bincount(stages, minlength=num_stages).tolist())
            if max(counts) < num_replicas:
                yield counts


MOST_LOST = 2
"""Lost workers at once that are looked at."""

MOST_SCHEDULED = 300_000
"""Computations of all cases together, from which on only one lost worker is looked at: some seconds of scheduling."""

EDIT = "elastic=True in headway.parallel.pipeline(...)"
"""What a script says so that its job goes on without a rank that is killed."""


@dataclass(frozen=True, slots=True)
class LossCosts:
    """The cases of a job, the fewest lost workers first."""

    fault_free: Replanned
    """Without lost workers, under the recorded order."""

    cases: tuple[tuple[tuple[Worker, ...], Replanned], ...]
    """The lost workers, one set for each number by stage, and what the others do."""

    num_replicas: int
    """Replicas of the job."""

    is_elastic: bool
    """Whether the job goes on without a rank that is killed; else it ends."""

    @classmethod
    def of(cls, program: Program) -> LossCosts | None:
        """Return them; None for another job than replicas on headway's runner, and one whose order is not known."""
        facts = program.run.parts.ranks.values() if program.run is not None else ()
        rows = (row["pipeline"] for row in facts if isinstance(row.get("pipeline"), dict))
        row: dict[str, object] = next(rows, {})
        recording, count, num_stages = program.recording, row.get("replicas"), row.get("num_stages")
        if not (isinstance(count, int) and isinstance(num_stages, int) and count > 1):
            return None
        pairs = zip(recording.lanes, recording.stages, strict=True)
        first = tuple(work if lane.rank < num_stages else None for lane, work in pairs)
        try:
            plan = _planned(RecordedPipeline.of(replace(recording, stages=first)), count)
        except InputError:
            return None
        lost = [
            tuple(Worker(count - 1 - k, stage) for stage, failed in enumerate(counts) for k in range(failed))
            for counts in plan.schedules
        ]
        cases = [(workers, replan(plan, workers)) for workers in lost]
        return cls(cases[0][1], tuple(cases[1:]), count, bool(row.get("elastic")))

    def to_json(self) -> dict[str, object]:
        """Return the object `failures` of `headway plan --json`."""
        return {
            "replicas": self.num_replicas, "elastic": self.is_elastic,
            "fault_free_span_ns": self.fault_free.span_ns, "fault_free_makespan_ns": self.fault_free.makespan_ns,
            "cases": [
                {
                    "lost": list(map(str, workers)), "span_ns": case.span_ns, "makespan_ns": case.makespan_ns,
                    "bound_ns": case.bound_ns,
                }
                for workers, case in self.cases
            ],
            "note": self.in_words(),
        }  # fmt: skip

    def in_words(self) -> str:
        """Say what one and two lost ranks cost at most, and what the script has to say for it."""
        clauses = []
        for number, subject in ((1, "one lost rank makes"), (2, "two make")):
            rows = [row for row in self.cases if len(row[0]) == number]
            if rows:
                workers, worst = max(rows, key=lambda row: row[1].makespan_ns)
                stages = " and ".join(str(stage) for stage in sorted({worker.stage for worker in workers}))
                slower = worst.makespan_ns / self.fault_free.makespan_ns
                span = worst.span_ns / self.fault_free.span_ns
                clauses.append(f"{subject} a step {slower:.2f}x as long at most (of stage {stages}; span {span:.2f}x)")
        ends = f"all {self.num_replicas} ranks of one stage end the job"
        text = f"By replay, {'; '.join([*clauses, ends])}."
        return text if self.is_elastic else f"{text} Now one ends it: {EDIT} lets the other ranks go on."


def loss_costs(program: Program | None) -> dict[str, object] | None:
    """Return `LossCosts.to_json` of a recorded run; None where `LossCosts.of` has none."""
    costs = LossCosts.of(program) if program is not None else None
    return None if costs is None else costs.to_json()


def _planned(pipeline: RecordedPipeline, num_replicas: int) -> ElasticPlan:
    """Return the schedules for as many lost workers as can be looked at; raises as `ElasticPlan.build` does."""
    costs, graph = pipeline.costs, pipeline.graph or StageGraph.chain(len(pipeline.rank_index))
    times: Sequence[Sequence[int]] = (costs.forward_ns.tolist(), costs.input_ns.tolist(), costs.weight_ns.tolist())
    shape = PipelineShape.of_graph(graph, pipeline.num_microbatches, *times, comm_ns=costs.comm_ns)
    stages = len(graph.preds)
    computations = 3 * stages * pipeline.num_microbatches * num_replicas
    failures = MOST_LOST if stages * (stages + 3) // 2 * computations <= MOST_SCHEDULED else 1
    return ElasticPlan.build(shape, num_replicas, most_failures=failures, order=lower(pipeline.orders, graph))


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
