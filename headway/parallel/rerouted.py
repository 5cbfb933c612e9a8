"""A pipeline without some of its workers: data-parallel peers of the same stage take their microbatches.

Source: *SlipStream* (arXiv 2405.14009; SOSP 2024 as *ReCycle*). All replicas of a stage hold the same weights, so any
of them can compute a microbatch of another replica. Worker (d, s) is stage s of replica d, on rank d S + s of S stages.

    replica 0   (0, 0) --> (0, 1) --> (0, 2)          a microbatch of replica 1
    replica 1   (1, 0)       x        (1, 2)          1,0 -> 0,1 -> 1,2, and the gradients back the same way;
    replica 2   (2, 0) --> (2, 1) --> (2, 2)          the next one 1,0 -> 2,1 -> 1,2

The global batch, the examples of each microbatch and the scale of its gradients stay: the peers add what they compute
for others to their own gradients, and the survivors of a stage sum theirs as before. Data and random draws belong to
the microbatch, not to the worker. Three things hide the additional work in the bubbles of the pipeline:

    round robin   the microbatches of a failed worker are dealt to its peers, those with the least work first
    split         the gradient of the weights, W, is computed later than that of the input, I, which others wait for;
                  costs memory, and is done only on the stages where the step gets shorter by it
    staggered     each stage takes its optimizer step when its own gradients are summed, so that the next step fills
                  the pipeline while this one drains: a step costs the longest time that a stage works on it (its
                  span) instead of the whole makespan. Clipping by a global norm needs all stages: staggered=False

Which computation is next is chosen by list scheduling under a cap on activations (`sim.pipeline.list_schedule`).

>>> from headway.sim.pipeline.lower import lower
>>> from headway.sim.pipeline.orders import PipelineShape, one_f_one_b
>>> from headway.sim.pipeline.simulate import costs_of, simulate
>>> shape = PipelineShape(num_ranks=4, num_microbatches=6)
>>> program = replicate(lower(one_f_one_b(shape)), 3)
>>> for options in ({"split": False}, {}):
...     found = reroute(program, [(1, 2)], cap=8, **options)
...     times = simulate(found, costs_of(shape))
...     times.makespan_ns, stage_span_ns(found, times)
(36, 36)
(29, 27)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.sim.graph.dag import Dag
from headway.sim.pipeline.actions import OPT, Action, B, F, I, Orders, PipelineProgram, R, W
from headway.sim.pipeline.lower import checked_positions, lower
from headway.sim.pipeline.orders import MOST_ACTIONS
from headway.sim.pipeline.simulate import ListSchedule, ProgramTimes, StageCosts

TURNS = ((1, 0, 2), (0, 1, 2), (2, 0, 1))
"""Priorities of F, I and W that are tried, the smallest first: I F W, F I W, I W F."""

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Worker(NamedTuple):
    """A worker of a job with pipelines side by side."""

    replica: int
    """Pipeline, from 0."""

    stage: int
    """Stage, from 0."""

    def __str__(self) -> str:
        """Return it as the command line takes it: 1:2."""
        return f"{self.replica}:{self.stage}"


def replicate(program: PipelineProgram, num_replicas: int) -> PipelineProgram:
    """Return so many pipelines side by side; replica d has ranks d R .. and microbatches d M .. of R and M in each.

    Raises `InputError` for less than one replica, more computations than a schedule may have, and orders that go on
    without a flush or compute forwards again.

    >>> orders = ((Action(F, 0, 0), Action(B, 0, 0)), (Action(F, 1, 0), Action(B, 1, 0)))
    >>> replicate(PipelineProgram.from_orders(orders), 2).orders()[2]
    (Action(op=0, stage=0, microbatch=1), Action(op=1, stage=0, microbatch=1))
    """
    if num_replicas < 1:
        raise InputError(f"{num_replicas} replicas of a pipeline; give at least 1.")
    _check_flush(program)
    m = program.num_microbatches
    limit = MOST_ACTIONS // max(1, m * program.num_stages)
    if num_replicas > limit:
        raise InputError(
            f"{num_replicas} replicas of {program.num_stages} stages x {m} microbatches are more than {MOST_ACTIONS:,} "
            f"computations. Give at most {limit} replicas."
        )
    orders = [
        tuple(action._replace(microbatch=action.microbatch + d * m) for action in actions)
        for d in range(num_replicas)
        for actions in program.orders()
    ]
    return lower(tuple(orders), program.graph)


def checked_workers(failures: Iterable[Sequence[int]], num_replicas: int, num_stages: int) -> list[Worker]:
    """Return failed workers in order, each once.

    Raises `InputError` for a worker that the job does not have, and where no worker of a stage is left.
    """
    workers = sorted({Worker(*failure) for failure in failures})
    for d, s in workers:
        if not (0 <= d < num_replicas and 0 <= s < num_stages):
            near = Worker(min(max(d, 0), num_replicas - 1), min(max(s, 0), num_stages - 1))
            raise InputError(
                f"there is no worker {d}:{s}. Give replica:stage with replicas 0..{num_replicas - 1} and stages "
                f"0..{num_stages - 1}, for example {near}."
            )
    lost = np.bincount([worker.stage for worker in workers], minlength=num_stages)
    if (lost == num_replicas).any():
        raise InputError(
            f"all {num_replicas} workers of stage {int(np.argmax(lost == num_replicas))} failed: no peer has its "
            "weights. Restart from a checkpoint, with more replicas or fewer stages."
        )
    return workers


def reroute(
    program: PipelineProgram,
    failures: Iterable[Sequence[int]],
    *,
    costs: StageCosts | None = None,
    cap: int | None = None,
    split: bool = True,
    staggered: bool = True,
) -> PipelineProgram:
    """Return the program of a step without the failed workers, pairs (replica, stage), whose ranks then do nothing.

    `program` has pipelines side by side as `replicate` makes them, or is an answer of this function. `costs` are the
    times of the stages, all 1 ns if not given; `cap` is how many activations a worker may hold, twice the number of
    stages if not given. `split=False` keeps backwards whole, and in the turn of 1F1B. Without `staggered` the makespan
    is made short instead of the span. Without failures the answer is the program itself. Deterministic.

    Raises `InputError` for a program that is not replicas of one stage per rank with a flush, an unknown worker, and
    where no worker of a stage is left.
    """
    _check_flush(program)
    num_stages = program.num_stages
    num_replicas = program.num_ranks // num_stages
    if program.num_ranks % num_stages or (program.rank % num_stages != program.stage).any():
        raise InputError(
            "the program is not pipelines side by side with stage s of replica d on rank d x stages + s. Make it with "
            "`replicate`, from an order with one stage per rank."
        )
    cap = 2 * num_stages if cap is None else cap
    if cap < 1:
        raise InputError(f"infeasible: a worker needs 1 activation, cap {cap}. Raise the cap.")
    # A rank without an action failed before.
    before = set(range(program.num_ranks)) - set(program.rank.tolist())
    lost = checked_workers([*failures, *(divmod(rank, num_stages) for rank in before)], num_replicas, num_stages)
    if len(lost) == len(before):
        return program
    table = checked_positions(program)
    order = _turns(program, table)
    rank = _dealt(program.rank[table[F]][:, order].astype(np.int64), lost)
    ones = np.ones(num_stages, np.int64)
    costs = costs or StageCosts(ones, ones, ones)
    times_ns = np.array([costs.forward_ns, costs.input_ns, costs.weight_ns], np.int64)
    comm_ns = costs.comm_ns if costs.between_ns is None else int(costs.between_ns.max())
    work = ListSchedule((F, I, W), program.graph, rank, order.size, times_ns, comm_ns)
    orders, unsplit = _scheduled(work, work.dag(np.full(num_stages, cap)), split=split, staggered=staggered)
    joined = [tuple(_joined(actions, unsplit.tolist(), order.tolist())) for actions in orders]
    return lower((*joined, *((),) * (program.num_ranks - len(joined))), program.graph)


def stage_span_ns(program: PipelineProgram, times: ProgramTimes) -> int:
    """Return the period of steps with a staggered optimizer, which `times` of `simulate` are one of.

    A stage begins the next step when all its workers have added their gradients: the longest time, over stages, from
    the first start to the last end of any of its workers.
    """
    ranks = np.unique(program.rank)
    stage = ranks % program.num_stages
    first, last = np.full(program.num_stages, np.iinfo(np.int64).max), np.zeros(program.num_stages, np.int64)
    np.minimum.at(first, stage, times.first_ns[ranks])
    np.maximum.at(last, stage, times.last_ns[ranks])
    return int((last - first).max())


def _check_flush(program: PipelineProgram) -> None:
    """Refuse steps that overlap, and forwards that are computed again."""
    again = np.isin(program.op, (R, OPT)) | (program.version != 0)
    if again.any():
        raise InputError(
            f"the program has {program.name(int(np.argmax(again)))}; replicas take orders with a flush and without "
            "forwards that are computed again. Choose '1f1b' or 'zero_bubble'."
        )


def _turns(program: PipelineProgram, table: Ints) -> Ints:
    """Return [m] the microbatches in the order in which the replicas start them, in turn."""
    first = next(stage for stage, sources in enumerate(program.graph.preds) if not sources)
    rows = np.sort(table[F, first])
    rank = program.rank[rows]
    turn = np.arange(rows.size) - np.searchsorted(rank, rank)
    return np.asarray(program.microbatch[rows[np.lexsort((rank, turn))]], np.int64)


def _dealt(rank: Ints, lost: Sequence[Worker]) -> Ints:
    """Return [S, m] the rank of each stage and microbatch, those of lost workers dealt to peers round robin."""
    num_stages = rank.shape[0]
    num_replicas = int(rank.max()) // num_stages + 1
    dealt = rank.copy()
    for stage in {worker.stage for worker in lost}:
        gone = [worker.replica * num_stages + stage for worker in lost if worker.stage == stage]
        peers = np.setdiff1d(np.arange(num_replicas) * num_stages + stage, gone)
        work = np.bincount(rank[stage], minlength=num_replicas * num_stages)
        peers = peers[np.argsort(work[peers], kind="stable")]
        moved = np.flatnonzero(np.isin(rank[stage], gone))
        dealt[stage, moved] = peers[np.arange(moved.size) % peers.size]
    return dealt


class _ListTrial(NamedTuple):
    """A schedule: the smallest is the best."""

    figures_ns: tuple[int, int]
    turn: tuple[int, ...]
    start_ns: Ints


def _scheduled(work: ListSchedule, dag: Dag, *, split: bool, staggered: bool) -> tuple[Orders, Flags]:
    """Return the orders of I and W with the least span (or makespan), and [S] where I and W are a whole backward.

    The best turn of kinds is taken; then backwards are whole again on each stage where the step is no longer by it.
    """
    num_stages = work.duration_ns.shape[1]
    unsplit = np.full(num_stages, not split)

    def tried(turn: tuple[int, ...], unsplit: Flags) -> _ListTrial:
        # A whole backward is an I of the length of both, and a W of no length that is next.
        priority = np.repeat(np.array(turn, float)[:, None], num_stages, axis=1)
        priority[2, unsplit] = -1
        times = replace(work, duration_ns=_durations(work, unsplit)).run(dag, priority[:, :, None])
        start, end = (ns.reshape(3, num_stages, -1).astype(np.int64) for ns in (times.start_ns, times.end_ns))
        last = end.max(axis=(0, 2))
        figures = int((last - start[0].min(axis=1)).max()), int(last.max())
        return _ListTrial(figures if staggered else figures[::-1], turn, start.ravel())

    best = min(
        (tried(turn, unsplit) for turn in TURNS[: len(TURNS) if split else 1]), key=lambda trial: trial.figures_ns
    )
    for stage in np.flatnonzero(~unsplit):
        joined = unsplit | (np.arange(num_stages) == stage)
        trial = tried(best.turn, joined)
        if trial.figures_ns <= best.figures_ns:
            best, unsplit = trial, joined
    return replace(work, duration_ns=_durations(work, unsplit)).orders(best.start_ns), unsplit


def _durations(work: ListSchedule, unsplit: Flags) -> Ints:
    """Return [3, S] the durations with whole backwards on some stages."""
    forward, inputs, weights = work.duration_ns
    return np.array([forward, np.where(unsplit, inputs + weights, inputs), np.where(unsplit, 0, weights)])


def _joined(actions: Sequence[Action], unsplit: Sequence[bool], order: Sequence[int]) -> list[Action]:
    """Return the actions of a worker with the numbers of its microbatches, and I W as one B on `unsplit` stages."""
    named: list[Action] = []
    for op, stage, turn in actions:
        action = Action(op, stage, order[turn])
        if op == W and unsplit[stage] and named[-1] == (I, *action[1:]):
            named[-1] = Action(B, *action[1:])
        else:
            named.append(action)
    return named
