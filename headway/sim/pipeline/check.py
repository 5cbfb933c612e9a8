"""Checks of a lowered program: complete, free of deadlock without any buffer, and within memory.

Use it on what `lower` did not make: a program read from a file, or changed.
A message is one meeting of two ranks here: sender and receiver both wait
until the other is there (rendezvous). What passes runs under any amount of
buffering. Activations and gradients travel on channels of their own.

>>> from headway.sim.pipeline.lower import lower
>>> from headway.sim.pipeline.orders import PipelineShape, one_f_one_b
>>> check(lower(one_f_one_b(PipelineShape(num_ranks=3, num_microbatches=4)))).peak_activations
(3, 2, 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import CycleError, InputError
from headway.sim.graph.dag import Dag
from headway.sim.pipeline.actions import OPT, RECV, SEND, B, F, PipelineProgram, R, W
from headway.sim.pipeline.lower import checked_positions, message_ends


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """What a program that passed needs."""

    num_actions: int
    """Actions of all ranks, messages among them."""

    num_messages: int
    """Messages."""

    peak_activations: tuple[int, ...]
    """[ranks] The most activations of a stage and microbatch that a rank holds at once."""


def check(program: PipelineProgram, caps: Sequence[float] | float | None = None) -> ProgramReport:
    """Check a program; `caps` are the activations that each rank may hold, one for all or one per rank.

    Raises `InputError` on a computation or message that is missing, doubled or out of order, a weight version that
    differs between forward and backward, ranks that wait for each other, and a rank above its cap.
    """
    table = checked_positions(program)
    sends, receives = matched_messages(program, table)
    _check_versions(program, table)
    _check_rendezvous(program, sends, receives)
    peaks = peak_activations(program)
    if caps is not None:
        limits = np.broadcast_to(np.asarray(caps, float), (program.num_ranks,))
        if (peaks > limits).any():
            rank = int(np.argmax(peaks > limits))
            stage = int(program.stage[np.argmax(program.rank == rank)])
            raise InputError(
                f"infeasible: stage {stage} needs {peaks[rank]} activations, cap {limits[rank]:g} (rank {rank}). "
                "Raise the cap, or choose an order that holds fewer."
            )
    return ProgramReport(program.rank.size, sends.size, tuple(peaks.tolist()))


def peak_activations(program: PipelineProgram) -> NDArray[np.int64]:
    """Return [ranks] the most activations held at once: from the forward (R where there is one) to B or W."""
    table = program.positions()
    change = np.zeros(program.rank.size, np.int64)
    change[np.where(table[R] >= 0, table[R], table[F])] += 1
    change[np.maximum(table[B], table[W])] -= 1
    # The running sum over all rows starts anew at each rank: every rank ends with what it began with.
    held = np.cumsum(change)
    peaks = np.zeros(program.num_ranks, np.int64)
    np.maximum.at(peaks, program.rank, held)
    return peaks


def matched_messages(program: PipelineProgram, table: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of each SEND and of its RECV, or raise `InputError` on one that is missing, alone or too late.

    The k-th SEND of a channel (rank, rank, activation or gradient) meets its k-th RECV: both must carry one value.
    """
    feeds = program.graph.feeds()
    sends, receives = np.flatnonzero(program.op == SEND), np.flatnonzero(program.op == RECV)
    forward = feeds[program.stage[sends], program.peer_stage[sends]]
    arriving = feeds[program.peer_stage[receives], program.stage[receives]]
    # Both sides in order of (sender, receiver, activations first, row): in a correct program position k of `sends` and
    # position k of `receives` are one message, and the first difference shows what is wrong.
    by_send = np.lexsort((sends, ~forward, program.peer[sends], program.rank[sends]))
    by_receive = np.lexsort((receives, ~arriving, program.rank[receives], program.peer[receives]))
    sends, receives = sends[by_send], receives[by_receive]
    both = min(sends.size, receives.size)
    one, two = sends[:both], receives[:both]
    differs = (program.rank[one] != program.peer[two]) | (program.peer[one] != program.rank[two])
    differs |= (program.stage[one] != program.peer_stage[two]) | (program.peer_stage[one] != program.stage[two])
    differs |= program.microbatch[one] != program.microbatch[two]
    if differs.any() or sends.size != receives.size:
        k = int(np.argmax(differs)) if differs.any() else both
        row = int(sends[k] if k < sends.size else receives[k])
        raise InputError(
            f"rank {program.rank[row]}, step {program.steps()[row]}: {program.name(row)} has no partner in the same "
            f"order on rank {program.peer[row]}. Write both sides in one order, or lower the orders anew."
        )
    _check_ends(program, table, sends, receives)
    return sends, receives


def _check_ends(
    program: PipelineProgram, table: NDArray[np.int64], sends: NDArray[np.int64], receives: NDArray[np.int64]
) -> None:
    """Every value that crosses has one message, after its producer and before its consumer."""
    producer, consumer = message_ends(program, table)
    wanted = sorted(zip(producer.tolist(), consumer.tolist(), strict=True))
    found = sorted(zip(*(rows.tolist() for rows in message_owners(program, table, sends)), strict=True))
    if wanted != found:
        lost = (set(wanted) ^ set(found) or {found[0]}).pop()
        raise InputError(
            f"the value of {program.name(lost[0])} for {program.name(lost[1])} needs one message from rank "
            f"{program.rank[lost[0]]} to {program.rank[lost[1]]}. Lower the orders anew."
        )
    made, used = message_owners(program, table, sends)
    late = (sends < made) | (receives > used)
    if late.any():
        k = int(np.argmax(late))
        raise InputError(
            f"{program.name(int(sends[k]))} is sent before it is made or received after it is used "
            f"(rank {program.rank[sends[k]]} to {program.peer[sends[k]]}). Reorder it."
        )


def message_owners(
    program: PipelineProgram, table: NDArray[np.int64], sends: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the computations that make and that take the value of each SEND."""
    stage, other, microbatch = program.stage[sends], program.peer_stage[sends], program.microbatch[sends]
    forward = program.graph.feeds()[stage, other]
    back = np.maximum(table[B], table[2])
    made = np.where(forward, table[F, stage, microbatch], back[stage, microbatch])
    used = np.where(forward, table[F, other, microbatch], back[other, microbatch])
    return made, used


def _check_versions(program: PipelineProgram, table: NDArray[np.int64]) -> None:
    """A backward reads the weights that its forward read; a version is made before it is read."""
    for later in table[1:]:
        both = (later >= 0) & (table[F] >= 0)
        differs = program.version[later[both]] != program.version[table[F][both]]
        if differs.any():
            row = int(later[both][np.argmax(differs)])
            raise InputError(
                f"rank {program.rank[row]}, step {program.steps()[row]}: {program.name(row)} reads version "
                f"{program.version[row]} of the weights, its forward another. Give both the same."
            )
    made = {(int(program.rank[row]), int(program.stage[row]), int(program.version[row])): row
            for row in np.flatnonzero(program.op == OPT)}  # fmt: skip
    for row in np.flatnonzero((program.op == F) & (program.version > 0)).tolist():
        if made.get((int(program.rank[row]), int(program.stage[row]), int(program.version[row])), row + 1) > row:
            raise InputError(
                f"rank {program.rank[row]}: {program.name(row)} reads version {program.version[row]}, which no "
                "optimizer step before it makes. Add the OPT, or read an older version."
            )


def _check_rendezvous(program: PipelineProgram, sends: NDArray[np.int64], receives: NDArray[np.int64]) -> None:
    """Contract each message to one event: the ranks' orders must then still have a common order."""
    event = np.arange(program.rank.size)
    event[receives] = sends
    same = program.rank[:-1] == program.rank[1:]
    try:
        Dag.from_edges(program.rank.size, event[:-1][same], event[1:][same])
    except CycleError as cause:
        circle = ", ".join(f"rank {program.rank[row]} at {program.name(row)}" for row in cause.operations[:8])
        raise InputError(f"deadlock without buffers: {circle}. Lower the orders anew.") from None
