"""The ledger of an operation trace: where each rank's time went, to the nanosecond.

Use it for traces of `headway.trace.readers.straggler`. The wall is the traced steps,
one behind the other, each from its first start to its last end; time between
traced steps is not in the trace. Per rank, computes own their time; of the
rest, communication after its last peer has arrived is `comm`; before that it
is `bubble` for transfers between stages and `straggler` for collectives. A
rank whose computes are over is in the `bubble` while its own pipeline still
computes, then waits for the `straggler` until all pipelines have computed, as
it does once it is through with the step. Time that no operation of the rank
covers otherwise is a launch delay (`host.launch`).

>>> from benchmarks._synthetic import SyntheticJob, generate
>>> trace = generate(SyntheticJob(dp=2, pp=2, num_microbatches=4, num_steps=2), seed=1).trace
>>> account = operation_account(trace)
>>> len(account.sub_ns), account.steps, all(amounts.sum() == account.wall_ns for amounts in account.sub_ns.values())
(4, 2, True)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.ledger.booking.account import Account, blank_subs
from headway.ledger.buckets import BUCKET_CODE_OF_SUB, BUCKETS, SUB_CODE, SUBS
from headway.ledger.operations.compute_factors import aligned
from headway.ledger.operations.dependencies import COMPUTE, STREAMS, infer
from headway.ledger.operations.operation_table import OperationTable, arrange, clock_ns
from headway.ledger.operations.whatif_groups import COMMUNICATION
from headway.trace.events.sweep import Ints, sweep
from headway.trace.events.trace import Trace
from headway.trace.recording.run_facts import RunFacts

BASIS = {"useful": "recorded", "comm": "recorded", "bubble": "recorded", "straggler": "recorded", "host": "remainder"}
"""Bucket -> how an operation trace knows it."""

_OTHERS, _AWAITED, _PIPELINE, _MOVED, _RAN, _COLLECTED = range(6)
"""Precedence: others not done < waiting for a peer < own pipeline not done < transfer < compute < collection."""


def operation_account(trace: Trace, *, unknown_as_compute: bool = False) -> Account:
    """Book every nanosecond of an operation trace.

    Raises `InputError` as `analyse` does on rows that are no steps of one job.
    """
    trace = aligned(trace, unknown_as_compute=unknown_as_compute)
    table = arrange(trace, unknown_as_compute=unknown_as_compute)
    start = clock_ns(trace)[table.row]
    begin = start.min(axis=(1, 2))
    end = start + trace.events["duration_ns"][table.row]
    step_wall = end.max(axis=(1, 2)) - begin
    shift = (np.cumsum(step_wall) - step_wall - begin)[:, None, None]
    arrival = _arrivals(table, start) + shift
    computed = _computed(table, end + shift)
    bounds = np.concatenate(([0], np.cumsum(step_wall)))
    subs: dict[int, Ints] = {}
    step_ns = np.zeros((len(BUCKETS), len(table.steps)), np.int64)
    bucket = np.array(BUCKET_CODE_OF_SUB)
    for d in range(len(table.dp)):
        for stage in range(table.num_stages):
            ops = np.flatnonzero(table.stage == stage)
            block = (start[:, d, ops] + shift[:, 0], end[:, d, ops] + shift[:, 0], arrival[:, d, ops])
            done = (computed[:, d, stage], computed[:, d].max(axis=1), computed.max(axis=(1, 2)))
            sub, duration, step = _booked(table, ops, block, done, bounds)
            amounts = blank_subs()
            np.add.at(amounts, sub, duration)
            np.add.at(step_ns, (bucket[sub], step), duration)
            subs[int(table.rank[d, stage])] = amounts
    return Account(
        wall_ns=int(step_wall.sum()),
        sub_ns=subs,
        steps=len(table.steps),
        basis=BASIS,
        step_ns=step_ns,
        step_wall_ns=step_wall,
        facts=RunFacts.of(trace.meta),
        notes=("the wall is the traced steps only",),
    )


def operation_ledger(trace: Trace) -> dict[str, Any]:
    """Return the ledger of an operation trace: devices, steps, wall_ns, ledger_ns, sub_ns, basis, coverage.

    `ledger_ns` sums to `devices * wall_ns` exactly. Raises `InputError` as `operation_account` does.
    """
    account = operation_account(trace)
    total = sum(account.sub_ns.values(), start=blank_subs())
    by_bucket = np.zeros(len(BUCKETS), np.int64)
    np.add.at(by_bucket, np.array(BUCKET_CODE_OF_SUB), total)
    ledger_ns = dict(zip(BUCKETS, by_bucket.tolist(), strict=True))
    allocated = len(account.sub_ns) * account.wall_ns
    return {
        "devices": len(account.sub_ns),
        "steps": account.steps,
        "wall_ns": account.wall_ns,
        "ledger_ns": ledger_ns,
        "sub_ns": {sub: int(amount) for sub, amount in zip(SUBS, total, strict=True) if amount},
        "basis": dict(account.basis),
        "coverage": 1 - ledger_ns["unknown"] / allocated if allocated else 0.0,
    }


def _arrivals(table: OperationTable, start: Ints) -> Ints:
    """Return [S, D, K] when the last peer of each operation arrived: its own start when it has none."""
    arrival = start.copy()
    order = infer(table)
    for group, joint in zip(order.groups, order.synchronised, strict=True):
        members = list(group)
        last = start[:, :, members].max(axis=2, keepdims=True)
        arrival[:, :, members] = last.max(axis=1, keepdims=True) if joint else last
    return arrival


def _computed(table: OperationTable, end: Ints) -> Ints:
    """Return [S, D, P] when the last forward or backward of each rank was over."""
    runs = table.of_type(*COMPUTE)
    stages = range(table.num_stages)
    return np.stack([end[:, :, runs & (table.stage == p)].max(axis=2, initial=0) for p in stages], axis=2)


def _booked(
    table: OperationTable, ops: Ints, block: tuple[Ints, Ints, Ints], done: tuple[Ints, Ints, Ints], bounds: Ints
) -> tuple[Ints, Ints, Ints]:
    """Return (sub-line, duration in ns, step) of every piece of one rank.

    `block` = start, end, last arrival [S, k]; `done` = when the rank, its
    pipeline and all pipelines had computed [S].
    """
    start, end, arrival = block
    optype = np.array([table.names[code] for code in table.optype[ops]])
    moves = table.of_type(*STREAMS)[ops]
    sub, level = _sub_lines(optype, moves)
    talks = level == _MOVED
    turn = np.clip(arrival, start, end)
    bubble, straggler = SUB_CODE["bubble.p2p"], SUB_CODE["straggler.compute"]
    waited = np.where(moves, bubble, straggler)[talks]
    through = end.max(axis=1)
    # Intervals that compete for the rank's time as (start, end, sub-line, precedence), broadcast to the shape of start:
    # operations, communication from the last arrival on; communication up to it; from the rank's last compute to that
    # of its pipeline, and to that of all pipelines; from the rank's last operation to the end of the step.
    parts = (
        (np.where(talks, turn, start), end, sub, level),
        (start[:, talks], turn[:, talks], waited, np.array(_AWAITED)),
        (done[0], done[1], np.array(bubble), np.array(_PIPELINE)),
        (done[0], done[2], np.array(straggler), np.array(_OTHERS)),
        (through, bounds[1:], np.array(straggler), np.array(_OTHERS)),
    )
    columns = [np.concatenate([np.broadcast_to(part[i], part[0].shape).ravel() for part in parts]) for i in range(4)]
    pieces = sweep(columns[0], columns[1], columns[3], window=(0, int(bounds[-1])), cuts=bounds)
    owner = np.where(pieces.row >= 0, columns[2][pieces.row], SUB_CODE["host.launch"])
    return owner, pieces.duration_ns, np.searchsorted(bounds, pieces.start_ns, side="right") - 1


def _sub_lines(optype: NDArray[Any], moves: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Return [k] the sub-line and the precedence of the operations of a rank."""
    collective = ~moves & np.isin(optype, list(COMMUNICATION))
    sub = np.full(len(optype), SUB_CODE["useful.compute"])
    sub[optype == "optimizer"] = SUB_CODE["useful.optimizer"]
    sub[optype == "gc"] = SUB_CODE["host.gc"]
    sub[moves] = SUB_CODE["comm.p2p"]
    sub[collective] = SUB_CODE["comm.collective"]
    level = np.full(len(optype), _RAN)
    level[optype == "gc"] = _COLLECTED
    level[moves | collective] = _MOVED
    return sub, level
