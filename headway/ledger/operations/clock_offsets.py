"""How far the clocks of the ranks of an operation trace stand apart, found only where they must.

Use it before comparing times of different ranks. What communicates ends at
about the same moment for all its members, and never before the last of them
has started. Where that is broken by more than clock noise, offsets are
estimated from the ends of what the ranks did together
(`headway.trace.sync.end_differences`), without drift: published traces count each
step from zero. A trace whose clocks agree is left alone, to the last bit.
Offsets are kept in `trace.ranks`, never written into the times.

>>> from headway.trace.generated.synthetic import SyntheticJob, generate
>>> trace = generate(SyntheticJob(dp=2, pp=2, num_microbatches=4, num_steps=2), seed=1).trace
>>> aligned(trace) is trace
True
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headway.core.units import NS_PER_S
from headway.ledger.operations.dependencies import STREAMS, Dependencies, infer
from headway.ledger.operations.operation_table import OperationTable, arrange, clock_ns
from headway.ledger.operations.whatif_groups import CLOCK_NOISE_S
from headway.trace.events.trace import Trace
from headway.trace.sync.end_differences import estimate
from headway.trace.sync.meetings import Meetings

Ints = NDArray[np.int64]

NOISE_NS = round(CLOCK_NOISE_S * NS_PER_S)
"""Disagreement of clocks that counts as noise."""

_log = logging.getLogger(__name__)


def aligned(trace: Trace, *, unknown_as_compute: bool = False) -> Trace:
    """Return `trace` with `offset_ns` in `trace.ranks` where clocks disagree, `trace` itself where they do not.

    Raises `InputError` as `arrange` and `infer` do.
    """
    table = arrange(trace, unknown_as_compute=unknown_as_compute)
    order = infer(table)
    start = clock_ns(trace)[table.row]
    end = start + trace.events["duration_ns"][table.row]
    if not _broken(order, start, end):
        return trace
    offsets = _offsets(_meetings(table, order, start, end), table)
    ranks = {rank: dict(known) for rank, known in trace.ranks.items()}
    for rank, offset in offsets.items():
        ranks[rank]["offset_ns"] = int(ranks[rank].get("offset_ns", 0)) + offset
    _log.warning("clocks of %d of %d ranks stand apart; the analysis shifts them", len(offsets), table.rank.size)
    return replace(trace, ranks=ranks)


def meetings_of(trace: Trace, *, unknown_as_compute: bool = False) -> Meetings:
    """Return the collectives and messages of an operation trace, in raw times.

    Raises `InputError` as `arrange` and `infer` do.
    """
    table = arrange(trace, unknown_as_compute=unknown_as_compute)
    start = trace.events["start_ns"][table.row]
    return _meetings(table, infer(table), start, start + trace.events["duration_ns"][table.row])


def _broken(order: Dependencies, start: Ints, end: Ints) -> bool:
    """Say whether some operation ends, in most steps, well before the last of its group has started."""
    for group, joint in zip(order.groups, order.synchronised, strict=True):
        members = list(group)
        arrival = start[:, :, members].max(axis=2, keepdims=True)
        if joint:
            arrival = arrival.max(axis=1, keepdims=True)
        early = arrival - end[:, :, members] > NOISE_NS
        if bool((early.mean(axis=0) > 0.5).any()):
            return True
    return False


def _offsets(met: Meetings, table: OperationTable) -> dict[int, int]:
    """Return what to add to the clock of each rank that stands more than noise apart from the median one."""
    ranks = table.rank.ravel()
    place = np.argsort(ranks)
    # Clocks are numbered by their place in the job: the answer does not hang on what the ranks are called.
    clock = place[np.searchsorted(ranks[place], met.rank)]
    found = estimate(met, clock, len(ranks), window_s=None)
    value = found.clocks.theta_ns[:, 0]
    reference = float(np.median(value[found.reached]))
    moved = {int(ranks[at]): round(value[at] - reference) for at in np.flatnonzero(found.reached).tolist()}
    return {rank: offset for rank, offset in moved.items() if abs(offset) > NOISE_NS}


def _meetings(table: OperationTable, order: Dependencies, start: Ints, end: Ints) -> Meetings:
    """Put the groups of all steps and DP ranks side by side; `start`, `end` [S, D, K]."""
    steps, num_dp, _ = table.shape
    calls: list[Ints] = []
    channels: list[Ints] = []
    messages: list[bool] = []
    for index, (group, joint) in enumerate(zip(order.groups, order.synchronised, strict=True)):
        # Flat indices into [S, D, K], one line per meeting: the group's operations in one step on one DP rank, or in
        # one step on all of them where the group spans DP ranks. Those of one group and DP rank are a channel.
        block = np.arange(steps * num_dp).reshape(-1, 1) * table.shape[2] + np.array(group)
        block = block.reshape(steps, -1) if joint else block
        if block.shape[1] > 1:
            calls.append(block)
            channels.append(index * num_dp + np.arange(len(block)) % (1 if joint else num_dp))
            messages += [table.optype_of(group[0]) in STREAMS] * len(block)
    size = np.repeat([block.shape[1] for block in calls], [len(block) for block in calls]).astype(np.int64)
    flat = np.concatenate([block.ravel() for block in calls]) if calls else np.zeros(0, np.int64)
    dp, op = flat // table.shape[2] % num_dp, flat % table.shape[2]
    sending = table.of_type(*(name for name in STREAMS if name.endswith("send")))
    return Meetings(
        row=table.row.ravel()[flat],
        rank=table.rank[dp, table.stage[op]],
        start_ns=start.ravel()[flat],
        end_ns=end.ravel()[flat],
        first=np.concatenate([[0], np.cumsum(size)]).astype(np.int64),
        channel=np.concatenate(channels) if channels else np.zeros(0, np.int64),
        message=np.array(messages, dtype=bool),
        sends=sending[op],
    )
