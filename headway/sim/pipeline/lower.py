"""Lowering: from the computations of each rank to a program with messages that cannot deadlock.

All computations get one global order that respects every rank's own order and
every dependency (a linear extension). A message is written at the place of its
producer in that order, SEND on the sender's list and RECV on the receiver's.
Both lists are projections of the same global order, so the messages between
two ranks stand in the same order on both sides, and even without any buffer
no rank waits for ever (`check` proves it for a program from elsewhere).

    global    0F0 [0>1] 0F1 1F0 [0>1] 1B0 ...
    rank 0    0F0 SEND  0F1     SEND          a message is one event
    rank 1        RECV      1F0 RECV  1B0     of the global order

>>> from headway.sim.pipeline.orders import PipelineShape, gpipe
>>> print(lower(gpipe(PipelineShape(num_ranks=2, num_microbatches=1))).text())
rank 0: 0F0 0SEND0>1 0RECV0>1 0B0
rank 1: 1RECV0>0 1F0 1B0 1SEND0>0

Checks of a lowered program: complete, free of deadlock without any buffer, and within memory.

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
from headway.sim.graph.dag import Dag, replay
from headway.sim.pipeline.actions import OPT, RECV, SEND, B, F, I, Orders, PipelineProgram, R, StageGraph, W


def lower(orders: Orders, graph: StageGraph | None = None) -> PipelineProgram:
    """Return the program with its messages. Without `graph`, stages are a chain.

    Raises `InputError` where a computation is missing, doubled, on the wrong
    rank or before what it needs, and where the orders wait for each other.
    """
    program = PipelineProgram.from_orders(orders, graph)
    table = checked_positions(program)
    order = _global_order(program, table)
    place = np.empty(order.size, np.int64)
    place[order] = np.arange(order.size)
    producer, consumer = message_ends(program, table)
    # Messages of one producer follow it in the order of the stages that take them.
    by = np.lexsort((program.stage[consumer], place[producer]))
    producer, consumer = producer[by], consumer[by]
    computed, sent = np.arange(order.size), np.arange(producer.size)
    owner = np.concatenate([computed, producer, consumer])
    other = np.concatenate([np.full(order.size, -1), consumer, producer])
    op = np.concatenate([program.op, np.full(sent.size, SEND), np.full(sent.size, RECV)])
    place = np.concatenate([place, place[producer], place[producer]])
    turn = np.concatenate([np.full(order.size, -1), sent, sent])
    rows = np.lexsort((turn, place, program.rank[owner]))
    owner, other, op = owner[rows], other[rows], op[rows].astype(np.int32)
    message = other >= 0
    return PipelineProgram(
        rank=program.rank[owner], op=op, stage=program.stage[owner], microbatch=program.microbatch[owner],
        version=program.version[owner], peer=np.where(message, program.rank[other], -1).astype(np.int32),
        peer_stage=np.where(message, program.stage[other], -1).astype(np.int32),
        num_ranks=program.num_ranks, graph=program.graph,
    )  # fmt: skip


def checked_positions(program: PipelineProgram) -> NDArray[np.int64]:
    """Return the table of rows of `PipelineProgram.positions`, or raise `InputError` with rank, step and actions.

    Each microbatch of each stage needs one F and one B, or one F, one I and one W, on one rank and in this order.
    """
    table = program.positions()
    rows = np.flatnonzero(program.op <= R)
    # table [op, stage, microbatch] keeps the last row of each: a row that its own entry does not name is a duplicate.
    again = rows[table[program.op[rows], program.stage[rows], program.microbatch[rows]] != rows]
    if again.size:
        raise _wrong(program, int(again[0]), "is there twice", "Remove one of them")
    has = table >= 0
    # Allowed are F with B alone, and F with I and W but no B.
    missing = ~has[F] | ~(has[B] ^ (has[I] & has[W])) | (has[B] & (has[I] | has[W]))
    if missing.any():
        stage, microbatch = map(int, np.argwhere(missing)[0])
        present = [name for name, code in (("F", F), ("B", B), ("I", I), ("W", W)) if has[code, stage, microbatch]]
        raise InputError(
            f"stage {stage}, microbatch {microbatch} has {' '.join(present) or 'no computation'}; "
            f"give it F and B, or F, I and W.\n{program.text()[:2000]}"
        )
    for before, after in ((F, B), (F, I), (I, W), (F, R), (R, B), (R, I)):
        both = has[before] & has[after]
        first, second = table[before][both], table[after][both]
        apart = program.rank[first] != program.rank[second]
        if apart.any():
            row = int(second[np.argmax(apart)])
            raise _wrong(program, row, "is on another rank than its forward", "Move it: the activation is there")
        if (first > second).any():
            row = int(second[np.argmax(first > second)])
            raise _wrong(program, row, f"is before its {'FBIWR'[before]}", "Reorder the rank")
    return table


def backward_rows(table: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [stages, microbatches] the row that makes the gradient of the input: B or I."""
    return np.asarray(np.maximum(table[B], table[I]))


def message_ends(program: PipelineProgram, table: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows (producer, consumer) of each value that crosses from one rank to another."""
    producer, consumer = _values(program, table)
    crossing = program.rank[producer] != program.rank[consumer]
    return producer[crossing], consumer[crossing]


def _values(program: PipelineProgram, table: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows (producer, consumer) of every activation and gradient between two stages."""
    sources, targets = np.nonzero(program.graph.feeds())
    back = backward_rows(table)
    producer = np.concatenate([table[F][sources].ravel(), back[targets].ravel()])
    consumer = np.concatenate([table[F][targets].ravel(), back[sources].ravel()])
    return producer, consumer


def _global_order(program: PipelineProgram, table: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows in one order for all ranks: by start, where every computation takes as long.

    Starts of operations that take time rise along every dependency, so sorting by them is a linear extension;
    it is also close to how the step runs, so that a receive is posted shortly before its message is sent.
    """
    producer, consumer = _values(program, table)
    try:
        dag = Dag.from_edges(program.rank.size, producer, consumer, lane=program.rank)
    except CycleError as cause:
        rows = cause.operations
        circle = ", ".join(f"rank {program.rank[row]} at {program.name(row)}" for row in rows[:8])
        raise InputError(
            f"these orders wait for each other: {circle}. Reorder one of these ranks.\n{program.text(rows[0])}"
        ) from None
    start = replay(dag, np.where(program.op == OPT, 1, 2)).start_ns
    return np.asarray(np.argsort(start, kind="stable"))


def _wrong(program: PipelineProgram, row: int, fault: str, fix: str) -> InputError:
    """Return the error about one action, with what the ranks do around it."""
    step = int(program.steps()[row])
    return InputError(
        f"rank {program.rank[row]}, step {step}: {program.name(row)} {fault}. {fix}.\n{program.text(row)}"
    )


# Checks of a lowered program: complete, free of deadlock without any buffer, and within memory.


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """What a program that passed needs."""

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
    return ProgramReport(sends.size, tuple(peaks.tolist()))


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
    back = backward_rows(table)
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
