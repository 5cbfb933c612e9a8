"""What an operation of a pipeline- and data-parallel training step waits for, inferred from the trace alone.

Use it on operation traces (`headway.trace.readers.straggler`). Every step and every
DP rank runs the same operations, so the order is inferred once, from the
first DP rank of the first step, and tiled: `arrange` puts the rows into
[steps, dp, operations], `infer` finds the order, `compile_dag` builds one
`headway.sim.Dag` in which a group of communicating operations is a barrier
op before their ends: an end is the latest arrival plus the own transfer time.
The model is that of the straggler what-if study (arXiv 2505.05713).

>>> from headway.ledger.operations.operation_table import arrange
>>> from benchmarks._synthetic import SyntheticJob, generate
>>> table = arrange(generate(SyntheticJob(dp=2, pp=2, num_microbatches=2, num_steps=2), seed=1).trace)
>>> order, forward = infer(table), table.find(1, "forward-compute", 1)
>>> [table.label(op) for op in order.source[order.target == forward]]
['backward-compute 0 on stage 1', 'forward-recv 1 on stage 1']
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import CycleError, InputError
from headway.ledger.operations.operation_table import OperationTable
from headway.sim.graph.dag import Dag

ORDER_SLACK_S = 5e-5
"""Clock noise allowed when a send or receive is told from one that was recorded but never launched."""

BLOCKING_SLACK_S, BLOCKING_FROM = 1e-3, 0.95
"""A receive counts as posted after a compute down to this much before its end; so many must be."""

COMPUTE = ("forward-compute", "backward-compute")
STREAMS = ("forward-send", "forward-recv", "backward-send", "backward-recv")
DP_SYNCHRONISED = (
    "params-all-gather",
    "grads-reduce-scatter",
    "separate-grads-all-reduce",
    "optimizer-clip-main-grad",
)
"""Operation types whose group spans all DP ranks of the step."""

PEER = {
    "forward-send": ("forward-recv", 1),
    "forward-recv": ("forward-send", -1),
    "backward-send": ("backward-recv", -1),
    "backward-recv": ("backward-send", 1),
}
"""Point-to-point type -> (type of the peer, distance of its stage)."""


@dataclass(frozen=True, slots=True)
class Dependencies:
    """The order inside one step of one DP rank; operations are indices into `OperationTable.optype` [K]."""

    source: NDArray[np.int64]
    """[E] The operation that must end ..."""

    target: NDArray[np.int64]
    """[E] ... before this one starts."""

    groups: tuple[tuple[int, ...], ...]
    """Operations that communicate with each other; an operation stands in one group at most."""

    synchronised: NDArray[np.bool_]
    """[len(groups)] The group also spans the DP ranks of a step."""

    group_of: NDArray[np.int64]
    """[K] Group of each operation, -1 = computes alone."""


@dataclass(slots=True)
class _Builder:
    """Edges and groups under construction; one per inference."""

    table: OperationTable
    edges: set[tuple[int, int]] = field(default_factory=set)
    groups: list[tuple[int, ...]] = field(default_factory=list)

    def chain(self, ops: Iterable[int], after: Sequence[int] = ()) -> None:
        """Order `ops` one behind the other, the first behind all of `after`."""
        before = list(after)
        for op in ops:
            self.edges.update((b, op) for b in before)
            before = [op]

    def of(self, stage: int, *optypes: str) -> list[int]:
        """Return the operations of these types on pipeline rank `stage`, by observed start."""
        return self.table.by_start(stage, optypes)

    def one(self, stage: int, optype: str, seq: int = 0) -> list[int]:
        """Return that operation as a list, empty when the trace has none."""
        op = self.table.find(stage, optype, seq)
        return [] if op is None else [op]


def infer(table: OperationTable, *, blocking: bool = False) -> Dependencies:
    """Infer the order of one step from its first DP rank.

    A receive waits for the compute before its own in that direction; with
    `blocking`, for the compute before its own in any, as `blocks` tells of a
    trace. Raises `InputError` on a send or receive without its compute or its peer.
    """
    builder = _Builder(table)
    if blocking:
        for receive, compute in _receives(table):
            builder.edges.add((compute, receive))
    stages = range(table.num_stages)
    for stage in stages:
        builder.chain(_in_order(builder, stage))
        for optype in STREAMS:
            builder.chain(builder.of(stage, optype))
        _first_backward(builder, stage)
    _pair(builder, [_match_compute(builder, stage) for stage in stages])
    overlapped = any(builder.of(stage, "separate-grads-all-reduce") for stage in stages)
    for stage in stages:
        _data_parallel(builder, stage, overlapped)
        _close_step(builder, stage, overlapped)
    return _finished(builder)


def blocks(table: OperationTable) -> bool:
    """Say whether receives of this trace are posted only when the compute before their own is over.

    True when at least 95 % of them are, over all steps and DP ranks, and some could have been earlier.
    """
    pairs = _receives(table)
    if not pairs:
        return False
    receive, compute = np.array(pairs).T
    # [steps, dp, receives]: one posted only when the device was free was posted behind the compute before its own.
    posted = table.start_s[:, :, receive] >= table.end_s[:, :, compute] - BLOCKING_SLACK_S
    return bool(posted.mean() >= BLOCKING_FROM)


def _receives(table: OperationTable) -> list[tuple[int, int]]:
    """Return (receive, compute just before its own on the pipeline rank) for each receive that has one."""
    pairs = []
    for stage in range(table.num_stages):
        # before[c]: the compute that ran just before c on this pipeline rank, of whatever direction.
        order = table.by_start(stage, COMPUTE)
        before = dict(zip(order[1:], order, strict=False))
        for direction, compute in zip(("forward", "backward"), COMPUTE, strict=True):
            receives = table.by_seq(stage, f"{direction}-recv")
            computes = table.by_seq(stage, compute)
            if len(receives) == len(computes):
                own = zip(receives, computes, strict=True)
                pairs += [(receive, before[op]) for receive, op in own if op in before]
    return pairs


def _in_order(builder: _Builder, stage: int) -> list[int]:
    """Return the ops of the compute stream by start; unknown types, where admitted, compute."""
    return builder.of(stage, *COMPUTE, *builder.table.unknown)


def _match_compute(builder: _Builder, stage: int) -> dict[str, list[int]]:
    """Tie each send behind and each receive before its compute; return the real ones per type, by start."""
    real: dict[str, list[int]] = {}
    for direction, compute in zip(("forward", "backward"), COMPUTE, strict=True):
        computes = builder.of(stage, compute)
        by_seq = _numbered(builder.table, computes)
        for optype in (f"{direction}-send", f"{direction}-recv"):
            launched = _launched(builder.table, builder.of(stage, optype), computes, optype)
            # The first stage may have no send or receive for its first microbatch: then they are numbered from 1.
            first = _first_seq(builder.table, stage, optype, len(launched), len(computes))
            real[optype] = []
            for seq, op in enumerate(launched, start=first):
                own = by_seq[seq]
                if optype.endswith("send"):
                    builder.edges.add((own, op))
                else:
                    builder.edges.add((op, own))
                    # A receive buffer is free again when the compute before it has read it.
                    if seq - 1 in by_seq:
                        builder.edges.add((by_seq[seq - 1], op))
                # The global stage that the compute's message goes to or comes from exists.
                peer = int(builder.table.global_stage[own]) + PEER[optype][1]
                if 0 <= peer < builder.table.num_layers * builder.table.num_stages:
                    real[optype].append(op)
    return real


def _numbered(table: OperationTable, computes: list[int]) -> dict[int, int]:
    """Return seq -> compute; refuse a numbering with gaps."""
    by_seq = {int(table.seq[op]): op for op in computes}
    if computes and max(by_seq) != len(by_seq) - 1:
        raise InputError(
            f"{table.label(by_seq[max(by_seq)])} is one of {len(by_seq)}; the operations of a type are numbered from 0 "
            "without gaps. Add the missing rows or number them again."
        )
    return by_seq


def _launched(table: OperationTable, ops: list[int], computes: list[int], optype: str) -> list[int]:
    """Drop what was recorded but never launched: receives after the last compute, sends before the first one ended."""
    if not computes:
        return []
    if optype.endswith("recv"):
        last_start = table.start_s[0, 0, computes].max()
        return [op for op in ops if table.start_s[0, 0, op] <= last_start + ORDER_SLACK_S]
    first_end = table.end_s[0, 0, computes].min()
    return [op for op in ops if table.end_s[0, 0, op] >= first_end - ORDER_SLACK_S]


def _first_seq(table: OperationTable, stage: int, optype: str, count: int, num_computes: int) -> int:
    """Return the compute that the first send or receive belongs to, or refuse a count that cannot be."""
    if count == num_computes or (count == 0 and stage in (0, table.num_stages - 1)):
        return 0
    if stage in (0, table.num_stages - 1) and count + 1 == num_computes:
        return 1 if optype.endswith("recv") else 0
    raise InputError(
        f"stage {stage} has {count} {optype} operations for {num_computes} {optype.split('-')[0]}-compute ones; "
        "an inner stage needs as many, the first and the last as many, one less or none. "
        "Record the step again or drop it from the trace."
    )


def _pair(builder: _Builder, real: Sequence[dict[str, list[int]]]) -> None:
    """Pair the n-th real send of a stage with the n-th real receive of its neighbour; the others stand alone."""
    table = builder.table
    for stage, ours in enumerate(real):
        for optype in ("forward-send", "backward-send"):
            peer_type, distance = PEER[optype]
            peer_stage = (stage + distance) % table.num_stages
            sends, receives = ours[optype], real[peer_stage][peer_type]
            if len(sends) != len(receives):
                lone, place = (sends, stage) if len(sends) > len(receives) else (receives, peer_stage)
                raise InputError(
                    f"{table.label(lone[min(len(sends), len(receives))])} has no peer: stage {stage} has {len(sends)} "
                    f"{optype} operations, stage {peer_stage} has {len(receives)} {peer_type} ones, and a group needs "
                    f"both. Record stage {place}'s step again or drop it from the trace."
                )
            builder.groups.extend(zip(sends, receives, strict=True))
    paired = {op for group in builder.groups for op in group}
    for stage in range(table.num_stages):
        builder.groups.extend((op,) for op in builder.of(stage, *STREAMS) if op not in paired)


def _first_backward(builder: _Builder, stage: int) -> None:
    """Let the first backward send and receive wait for the last forward but one before the first backward."""
    order = builder.of(stage, *COMPUTE)
    backward = next((i for i, op in enumerate(order) if builder.table.optype_of(op) == COMPUTE[1]), 0)
    if backward >= 2:
        for optype in ("backward-recv", "backward-send"):
            # warm-up forwards:   F0 F1 F2 | B0 ...   B0's receive is posted while the last of them runs: behind F1.
            builder.chain(builder.one(stage, optype), after=[order[backward - 2]])


def _data_parallel(builder: _Builder, stage: int, overlapped: bool) -> None:
    """Order parameter gathers and gradient reductions among themselves and against the compute of their layer."""
    table = builder.table
    builder.chain(builder.of(stage, "params-all-gather", "grads-reduce-scatter"))
    gathers = table.by_seq(stage, "params-all-gather")
    for layer, gather in {int(table.layer[op]): op for op in gathers}.items():
        forward = [op for op in builder.of(stage, COMPUTE[0]) if table.layer[op] == layer]
        # A layer's first forward waits for its parameters; later ones find them there.
        builder.chain(forward[:1], after=[gather])
    if not overlapped:
        return
    reductions = table.by_seq(stage, "grads-reduce-scatter")
    for layer, reduction in {int(table.layer[op]): op for op in reversed(reductions)}.items():
        backward = [op for op in builder.of(stage, COMPUTE[1]) if table.layer[op] == layer]
        # Gradients of a layer are whole when its last backward has ended.
        if backward:
            builder.edges.add((max(backward, key=lambda op: table.end_s[0, 0, op]), reduction))


def _close_step(builder: _Builder, stage: int, overlapped: bool) -> None:
    """Order what follows the last compute: collection, gradient reductions, clipping, optimizer."""
    table = builder.table
    order = _in_order(builder, stage)
    last = [max(order, key=lambda op: table.end_s[0, 0, op])] if order else []
    garbage = builder.one(stage, "gc")
    builder.chain(garbage, after=last)
    after = garbage or last
    reductions = table.by_seq(stage, "grads-reduce-scatter")
    if overlapped:
        after = after + reductions[-1:]
        reductions = builder.one(stage, "separate-grads-all-reduce")
    between = [
        *builder.one(stage, "layernorm-grads-all-reduce"),
        *(builder.one(stage, "embedding-grads-all-reduce") if stage in (0, table.num_stages - 1) else []),
        *reductions,
        *builder.one(stage, "optimizer-clip-main-grad"),
        *builder.one(stage, "optimizer"),
    ]
    builder.chain(between, after=after)


def _finished(builder: _Builder) -> Dependencies:
    """Add the groups of the collectives and freeze everything as arrays."""
    table = builder.table
    stages = range(table.num_stages)
    for stage in stages:
        builder.groups.extend((op,) for op in builder.of(stage, *DP_SYNCHRONISED[:3]))
    ends = sorted({0, table.num_stages - 1})
    for optype, members in (("embedding-grads-all-reduce", ends), ("optimizer-clip-main-grad", stages)):
        group = tuple(op for stage in members for op in builder.one(stage, optype))
        if group:
            builder.groups.append(group)
    # group_of is the inverse of groups: an operation stands in at most one.
    group_of = np.full(len(table.optype), -1, dtype=np.int64)
    for index, group in enumerate(builder.groups):
        group_of[list(group)] = index
    synchronised = [table.optype_of(group[0]) in DP_SYNCHRONISED for group in builder.groups]
    edges = np.array(sorted(builder.edges), dtype=np.int64).reshape(-1, 2)
    return Dependencies(edges[:, 0], edges[:, 1], tuple(builder.groups), np.array(synchronised, dtype=bool), group_of)


@dataclass(frozen=True, slots=True)
class CompiledOperations:
    """The Dag of all steps and DP ranks, and where an operation stands in it."""

    dag: Dag
    """Ops in blocks: a step is one component."""

    index: NDArray[np.int64]
    """[steps, dp, K] Op at which an operation ends."""

    start_index: NDArray[np.int64]
    """[steps, dp, K] Op at which it arrives: its own arrival op, only when compiled with arrivals, else = `index`."""

    component: NDArray[np.int32]
    """[n] Number of the step."""

    def spread(self, values: NDArray[Any], blank: float = 0.0) -> NDArray[Any]:
        """Return [n] with `values` [steps, dp, K] at the operations' ends and `blank` at the barriers."""
        result = np.full(self.dag.n, blank, dtype=values.dtype)
        result[self.index] = values
        return result


def compile_dag(table: OperationTable, order: Dependencies, *, arrivals: bool = False) -> CompiledOperations:
    """Tile `order` over the DP ranks and steps of `table`.

    With `arrivals`, each communicating operation gets an op of its own before
    the barrier: its end is the arrival, its duration a launch delay. Raises
    `CycleError` listing the operations that wait for each other.
    """
    num_steps, num_dp, num_ops = table.shape
    joint = np.flatnonzero(order.synchronised)
    own = np.flatnonzero(~order.synchronised)
    talking = np.flatnonzero(order.group_of >= 0)
    # Ops of one step, in blocks (D = DP ranks, K = operations, g = groups):
    #
    #     DP rank 0                              DP rank 1      ...    joint barriers, one for all DP ranks
    #     [K ends | g own barriers | arrivals]   [ ... ]               [g joint]
    #     `width` ops each                                             `per_step` ops in all
    width = num_ops + len(own) + (len(talking) if arrivals else 0)
    per_step = num_dp * width + len(joint)
    dp = np.arange(num_dp)[:, None] * width
    # barrier[d, g]: op of group g as DP rank d sees it; a joint group has one for all.
    barrier = np.empty((num_dp, len(order.groups)), dtype=np.int64)
    barrier[:, own] = dp + num_ops + np.arange(len(own))
    barrier[:, joint] = num_dp * width + np.arange(len(joint))
    # An operation that talks enters its group's barrier and ends behind it:
    #     what it waits for -> (arrival ->) barrier -> its end
    ends = dp + np.arange(num_ops)
    enter = ends.copy()
    enter[:, talking] = barrier[:, order.group_of[talking]]
    edges = [(barrier[:, order.group_of[talking]], ends[:, talking])]
    if arrivals:
        enter[:, talking] = dp + num_ops + len(own) + np.arange(len(talking))
        edges.append((enter[:, talking], barrier[:, order.group_of[talking]]))
    edges.append((ends[:, order.source], enter[:, order.target]))
    source = np.concatenate([s.ravel() for s, _ in edges])
    target = np.concatenate([t.ravel() for _, t in edges])
    try:
        dag = Dag.from_edges(per_step, source, target).tile(num_steps)
    except CycleError as cause:
        raise _named(cause, table, width) from cause
    # Steps do not wait for each other: the Dag of one step is tiled, each copy a component of its own.
    step = np.arange(num_steps)[:, None, None] * per_step
    component = np.repeat(np.arange(num_steps, dtype=np.int32), per_step)
    return CompiledOperations(dag, step + ends, step + (enter if arrivals else ends), component)


def _named(cause: CycleError, table: OperationTable, width: int) -> CycleError:
    """Return the cycle in words; barriers stand for their operations and are left out."""
    _, num_dp, num_ops = table.shape
    labels = [table.label(op % width) for op in cause.operations if op < num_dp * width and op % width < num_ops]
    return CycleError(
        f"these operations wait for each other in a circle: {' -> '.join(labels) or cause.operations}. "
        "Their recorded starts contradict the order of a pipeline; record the first step again or drop it.",
        cause.operations,
    )
