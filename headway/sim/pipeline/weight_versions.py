"""Schedules that train on several versions of the weights: no flush between steps, updates inside the stream.

Sources: *PipeDream* (SOSP 2019, sections 3.2 and 3.3: weight stashing,
vertical sync) and *Memory-Efficient Pipeline-Parallel DNN Training*
(PipeDream-2BW, ICML 2021, section 3.1). Micro-batches of all steps are one
stream in 1F1B order: a rank's warm-up of a step runs between the backwards of
the step before it, so that after the start a rank is never idle.

    rank 0   F0 F1 F2 F3 B0 F4 B1 F5 | B2 F6 B3 F7 B4 ...          p = 3, m = 6
    rank 2         F0 B0 F1 B1 F2 B2   F3 B3 F4 B4 ...

    schedule      updates             a forward reads                   versions of stage s
    async_1f1b    each backward       the newest one of its stage       p - s
      with vertical sync              the one that stage 0 read         p
    two_buffer    each step           that of the step before           2

In formulas, with n stages and the gradient g: async_1f1b
W(t+1) = W(t) - lr g(W_1(t-n+1), .., W_n(t)), two_buffer
W(t+1) = W(t) - lr g(W(t-1)), where W(-1) = W(0).

>>> from headway.sim.pipeline.orders import PipelineShape
>>> program = versioned("two_buffer", PipelineShape(num_ranks=2, num_microbatches=2, num_steps=3))
>>> rows = (program.rank == 1) & (program.op == F)
>>> program.version[rows].tolist()
[-1, -1, 0, 0, 1, 1]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.sim.pipeline.actions import OPT, RECV, SEND, Action, B, F, Orders, PipelineProgram
from headway.sim.pipeline.lower import backward_rows, lower
from headway.sim.pipeline.orders import PipelineShape, one_f_one_b

Ints = NDArray[np.int64]

NONE = np.zeros(0, np.int64)


def async_1f1b(shape: PipelineShape) -> Orders:
    """Run the micro-batches of `num_steps` steps as one stream, with an update after every backward (PipeDream)."""
    return _with_updates(shape, every=1)


def two_buffer(shape: PipelineShape) -> Orders:
    """Run `num_steps` steps as one stream, with one update per step (PipeDream-2BW).

    Raises `InputError` for fewer micro-batches than ranks: a stage would need a third version.
    """
    p, m = shape.num_ranks, shape.num_microbatches
    if m < p:
        raise InputError(
            f"two_buffer has {m} micro-batches for {p} stages; two versions of the weights suffice from {p} on. "
            f"Give at least {p}."
        )
    return _with_updates(shape, every=m)


def _with_updates(shape: PipelineShape, *, every: int) -> Orders:
    """Return 1F1B over all steps, with an OPT behind every so many backwards of a rank."""
    stream = one_f_one_b(replace(shape, num_microbatches=shape.num_microbatches * shape.num_steps, num_steps=1))
    orders = []
    for rank, actions in enumerate(stream):
        rank_actions: list[Action] = []
        for action in actions:
            rank_actions.append(action)
            if action.op == B and (action.microbatch + 1) % every == 0:
                rank_actions.append(Action(OPT, rank, -1))
        orders.append(tuple(rank_actions))
    return tuple(orders)


FLUSH_FREE = {"async_1f1b": async_1f1b, "two_buffer": two_buffer}
"""Schedules of this module: name -> its order."""


# Which version each computation reads.


def versioned(name: str, shape: PipelineShape, *, vertical_sync: bool = False) -> PipelineProgram:
    """Return the lowered program of a schedule of `FLUSH_FREE`, with the version of the weights in every row."""
    program = lower(FLUSH_FREE[name](shape), shape.graph)
    if name == "two_buffer":
        step = np.arange(shape.num_steps * shape.num_microbatches) // shape.num_microbatches
        return with_versions(program, lambda newest: np.broadcast_to(step - 1, newest.shape))
    return with_versions(program, lambda newest: np.broadcast_to(newest[0], newest.shape) if vertical_sync else newest)


def with_versions(program: PipelineProgram, reads: Callable[[Ints], Ints]) -> PipelineProgram:
    """Number the versions: an OPT makes its stage's next one, computations read what `reads` says.

    `reads` gets [stages, microbatches] the newest version when the forward runs, and returns the one that it reads.
    """
    table = program.positions()
    version = program.version.copy()
    newest = np.zeros(table.shape[1:], np.int64)
    for stage in range(program.num_stages):
        made = np.cumsum((program.op == OPT) & (program.stage == stage))
        owned = (program.op == OPT) & (program.stage == stage)
        version[owned] = made[owned]
        newest[stage] = made[table[F, stage]]
    chosen = reads(newest)
    for rows in table:
        version[rows[rows >= 0]] = chosen[rows >= 0]
    return replace(program, version=version)


# The same program, cut into what one call of a step runs.


@dataclass(frozen=True, slots=True, eq=False)
class ProgramRows:
    """Rows of one rank, in order: what a call runs."""

    op: Ints
    """[n] Operation."""

    stage: Ints
    """[n] Stage."""

    microbatch: Ints
    """[n] Micro-batch, counted on over the steps; -1 for an update."""

    version: Ints
    """[n] Version read, or made; counted on over the steps."""

    peer: Ints
    """[n] Other rank of a message."""

    peer_stage: Ints
    """[n] Other stage of a message."""

    def shifted(self, microbatches: int, versions: int) -> ProgramRows:
        """Return the rows of a later step."""
        moved = np.where(self.microbatch >= 0, self.microbatch + microbatches, -1)
        return replace(self, microbatch=moved, version=self.version + versions)

    @property
    def reads_older(self) -> set[int]:
        """Stages a computation of which reads another version than the newest one, if these are all rows."""
        made, stages = dict[int, int](), set[int]()
        for op, stage, _, version in self.computations:
            if op == OPT:
                made[stage] = version
            elif version != made.get(stage, 0):
                stages.add(stage)
        return stages

    @property
    def computations(self) -> list[tuple[int, int, int, int]]:
        """(operation, stage, micro-batch, version) of every row that is no message."""
        computes = (self.op != SEND) & (self.op != RECV)
        columns = (self.op, self.stage, self.microbatch, self.version)
        return list(zip(*(column[computes].tolist() for column in columns), strict=True))


def rows_of(program: PipelineProgram, rank: int, rows: Ints | None = None) -> ProgramRows:
    """Return all rows of a rank, or some of them."""
    some = np.flatnonzero(program.rank == rank) if rows is None else rows
    columns = (program.op, program.stage, program.microbatch, program.version, program.peer, program.peer_stage)
    return ProgramRows(*(column[some].astype(np.int64) for column in columns))


@dataclass(frozen=True, slots=True, eq=False)
class StepLoop:
    """A stream of steps on one rank: the first ones, one that repeats, and what is left to do when it ends.

    A call of step t runs a rank's rows up to the first forward of step t + 1, because that needs the next batch.
    """

    program: PipelineProgram
    """The stream that it was cut from: as many steps as fill the pipeline, and two that repeat."""

    num_microbatches: int
    """m: micro-batches of a step."""

    updates: int
    """Updates of a stage in a step."""

    steps: tuple[ProgramRows, ...]
    """Rows of the first steps; the last entry repeats."""

    drains: tuple[ProgramRows, ...]
    """What is left to do after so many steps, from 0; the last entry repeats."""

    @property
    def flushes(self) -> bool:
        """Whether nothing is left to do behind a step."""
        return self.program.num_microbatches == self.num_microbatches

    def step(self, number: int) -> ProgramRows:
        """Return the rows of a step, from 0."""
        listed = min(number, len(self.steps) - 1)
        return self._moved(self.steps[listed], number - listed)

    def drain(self, number: int) -> ProgramRows:
        """Return what is left to do after `number` steps."""
        listed = min(number, len(self.drains) - 1)
        return self._moved(self.drains[listed], number - listed)

    def _moved(self, rows: ProgramRows, steps: int) -> ProgramRows:
        return rows.shifted(steps * self.num_microbatches, steps * self.updates) if steps else rows


def flushed_loop(program: PipelineProgram, rank: int) -> StepLoop:
    """Return the loop of a program that ends with nothing left to do: every step runs all of it.

    Stages without an update get one at the end of their rank's rows.
    """
    updated = set(program.stage[program.op == OPT].tolist())
    rows = rows_of(program, rank)
    lacking = sorted(set(rows.stage[rows.op == F].tolist()) - updated)
    columns = (rows.op, rows.stage, rows.microbatch, rows.version, rows.peer, rows.peer_stage)
    tail = np.array([[OPT, stage, -1, 1, -1, -1] for stage in lacking], np.int64).reshape(-1, 6).T
    all_rows = ProgramRows(*(np.concatenate(pair) for pair in zip(columns, tail, strict=True)))
    per_stage = np.bincount(all_rows.stage[all_rows.op == OPT], minlength=1)
    return StepLoop(
        program, program.num_microbatches, int(per_stage.max()), (all_rows,), (rows_of(program, rank, NONE),)
    )


def step_loop(name: str, shape: PipelineShape, rank: int, *, vertical_sync: bool = False) -> StepLoop:
    """Cut a schedule of `FLUSH_FREE` into the steps of one rank; raises `InputError` as the schedule does."""
    m = shape.num_microbatches
    # A rank's backwards lag up to p - 1 micro-batches, and so do the versions that its forwards read: from so many
    # steps on each one is like the next.
    settled = math.ceil(2 * (shape.num_ranks - 1) / m)
    programs = [
        versioned(name, replace(shape, num_steps=count), vertical_sync=vertical_sync) for count in range(1, settled + 4)
    ]
    steps = _cut(programs[-1], rank, m)[: settled + 2]
    assert steps[-1].computations == steps[-2].shifted(m, m if name == "async_1f1b" else 1).computations
    drains = []
    for count in range(settled + 3):
        if count == 0:
            drains.append(rows_of(programs[0], rank, NONE))
            continue
        done = {(op, stage, j) for rows in steps[:count] for op, stage, j, _ in rows.computations if j >= 0}
        drains.append(_rest(programs[count - 1], rank, done))
    return StepLoop(programs[-1], m, m if name == "async_1f1b" else 1, tuple(steps[:-1]), tuple(drains[:-1]))


def _cut(program: PipelineProgram, rank: int, num_microbatches: int) -> list[ProgramRows]:
    """Return the rows of each step of a rank; a message belongs to the step of its computation on this rank."""
    rank_rows = np.flatnonzero(program.rank == rank)
    order = _of_own_computation(program, rank_rows)
    opens = (program.op[rank_rows] == F) & (program.microbatch[rank_rows] % num_microbatches == 0)
    begins = np.cumsum(opens) - 1
    step = np.maximum(begins[order], 0)
    return [rows_of(program, rank, rank_rows[step == number]) for number in range(int(step.max()) + 1)]


def _rest(program: PipelineProgram, rank: int, done: set[tuple[int, int, int]]) -> ProgramRows:
    """Return the rows of a rank that are not of the computations `done`."""
    rank_rows = np.flatnonzero(program.rank == rank)
    keys = list(
        zip(*(column[rank_rows].tolist() for column in (program.op, program.stage, program.microbatch)), strict=True)
    )
    owner = _of_own_computation(program, rank_rows).tolist()
    remaining = [row for row, index in zip(rank_rows.tolist(), owner, strict=True) if keys[index] not in done]
    return rows_of(program, rank, np.array(remaining, np.int64))


def _of_own_computation(program: PipelineProgram, rank_rows: Ints) -> Ints:
    """Return [n] the place among `rank_rows` of the computation that each row is of.

    Of a message it is the one that makes its value, or uses it; of an update the backward before it.
    """
    table = program.positions()
    back, feeds = backward_rows(table), program.graph.feeds()
    owner, latest = rank_rows.copy(), dict[int, int]()
    for index, row in enumerate(rank_rows.tolist()):
        op, stage, other_stage, microbatch = (
            int(column[row]) for column in (program.op, program.stage, program.peer_stage, program.microbatch)
        )
        if op in (SEND, RECV):
            is_activation = feeds[stage, other_stage] if op == SEND else feeds[other_stage, stage]
            owner[index] = (table[F] if is_activation else back)[stage, microbatch]
        elif op == OPT:
            owner[index] = latest.get(stage, row)
        else:
            latest[stage] = row
    return np.searchsorted(rank_rows, owner)
