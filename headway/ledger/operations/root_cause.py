"""The causes of a straggling job: what is wrong, where, and what its removal would win.

Use it through `headway.ledger.operations.straggler.root_causes`. Each rule takes one
factor out of the observed durations (`compute_factors`) and replays: the
seconds lost are what that replay wins, so two causes that hide each other
both show what they cost on top of the other. A rule speaks when its replay
wins at least `WORTH`.

>>> list(CAUSES)
['straggler.worker', 'straggler.sequence', 'straggler.last_stage', 'host.gc', 'comm.exposed']

The ledger of an operation trace: where each rank's time went, to the nanosecond.

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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.units import format_seconds
from headway.ledger.booking.account import Account, blank_subs
from headway.ledger.buckets import BUCKET_CODE_OF_SUB, BUCKETS, SUB_CODE
from headway.ledger.cause import Cause, ranked
from headway.ledger.operations.compute_factors import Factors, aligned, factors
from headway.ledger.operations.dependencies import COMPUTE, STREAMS, infer
from headway.ledger.operations.operation_table import OperationTable, arrange, clock_ns
from headway.ledger.operations.whatif_groups import COMMUNICATION, WhatIf, merged
from headway.trace.events.intervals import Ints, sweep
from headway.trace.events.trace import Trace
from headway.trace.recording.run_facts import RunFacts

Block = NDArray[np.float64]

WORTH = 0.02
"""Least share of the step time that the removal of a cause must win to be listed."""

SLOW = 1.05
"""A worker, or a stage, counts as slow from this factor on, if noise does not explain it."""

SPARSE = 0.05
"""Pauses are garbage collection only while fewer than this share of the computes pause."""

SLOW_TRANSFER = 1.5
"""A transfer counts as slow from this many medians of its type on."""

LAUNCH_SHARE = 0.03
"""Launch delays are listed from this share of the observed step time on."""


@dataclass(frozen=True, slots=True)
class Correlation:
    """Evidence for or against sequence-length imbalance."""

    r: float
    """Median over workers of the correlation of a micro-batch's forward with its backward."""

    cv: float
    """Median over workers of the coefficient of variation of forwards."""

    shared_r: float
    """The same correlation with micro-batches averaged over the stages they pass: noise of a stage hides less of it."""

    imbalanced: bool
    """r >= 0.9 and cv >= 0.05, per worker or averaged over stages."""


def correlation(whatif: WhatIf) -> Correlation:
    """Return how forwards and backwards of the same micro-batch vary together."""
    found = factors(whatif.table)
    if found is None:
        return Correlation(0.0, 0.0, 0.0, False)
    middle, spread = float(np.median(found.r)), float(np.median(found.cv))
    return Correlation(middle, spread, found.shared_r, found.imbalanced)


@dataclass(frozen=True, slots=True)
class _JobEvidence:
    """What the rules look at."""

    whatif: WhatIf
    """The replays."""

    factors: Factors | None
    """What multiplies the computes, None when they are not comparable."""

    sequence: Correlation
    """Whether micro-batches differ in work."""

    shares: Mapping[str, float]
    """'M_W' and 'M_S', for the evidence."""


@dataclass(frozen=True, slots=True)
class _Finding:
    """What a rule found: durations without the cause, [S, D, K], and what to say."""

    where: str
    """The place, in words."""

    evidence: str
    """What led to it, with numbers."""

    without_s: Block
    """[S, D, K] Durations as they would be without the cause."""


@dataclass(frozen=True, slots=True)
class RootCauseRule:
    """A rule that looks for one cause."""

    find: Callable[[_JobEvidence], _Finding | None]
    """Returns None when there is no sign of the cause."""

    fix: str
    """What to do about it."""


def _worker(job: _JobEvidence) -> _Finding | None:
    """Workers that compute slower than the same pipeline rank on other DP ranks, or than other pipeline ranks."""
    found = job.factors
    if found is None:
        return None
    by_worker, by_stage = (max(SLOW, chance) for chance in found.noise)
    whole = found.slow_ranks(by_stage)
    slow = np.where(found.worker > by_worker, found.worker, 1.0)
    if (slow * whole <= 1).all():
        return None
    table = job.whatif.table
    dp, pp = np.nonzero(slow > 1)
    worst = np.argsort(-slow[dp, pp], kind="stable")
    names = [f"dp {table.dp[dp[i]]} / pp {pp[i]} (rank {table.rank[dp[i], pp[i]]})" for i in worst]
    names += [f"pp {p} on all DP ranks" for p in np.flatnonzero(whole > 1)]
    return _Finding(
        ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
        f"computes take {float((slow * whole).max()):.2f} times as long as on its peers; the worst 3 % of the workers "
        f"explain M_W = {job.shares['M_W']:.2f} of the loss",
        found.put(job.whatif.observed_s, found.divided((slow * whole)[:, found.rank_of][None, None, :, :, None])),
    )


def _last_stage(job: _JobEvidence) -> _Finding | None:
    """The last pipeline rank, or only the last stage of the model on it, takes longer than the others."""
    found = job.factors
    if found is None:
        return None
    last = found.rank_of == found.rank_of[-1]
    ratio = np.where(last & (found.stage.max(axis=0) > max(SLOW, found.noise[1])), np.maximum(found.stage, 1.0), 1.0)
    if (ratio <= 1).all():
        return None
    explained = " (the sequence-length imbalance comes first)" if job.sequence.imbalanced else ""
    return _Finding(
        f"pp {found.rank_of[-1]}",
        f"forwards of the last stage take {found.stage[0, -1]:.2f}, backwards {found.stage[1, -1]:.2f} times the "
        f"median of the other stages; it explains M_S = {job.shares['M_S']:.2f} of the loss{explained}",
        found.put(job.whatif.observed_s, found.divided(ratio[:, None, None, :, None])),
    )


def _sequence(job: _JobEvidence) -> _Finding | None:
    """Micro-batches differ in work: their forwards and backwards vary together."""
    found = job.factors
    if found is None or not job.sequence.imbalanced:
        return None
    return _Finding(
        "all workers",
        f"forward and backward of a micro-batch vary together (median r = {job.sequence.r:.3f}, "
        f"{job.sequence.shared_r:.3f} over all stages) and much (CV = {job.sequence.cv:.3f}): they differ in work",
        found.put(job.whatif.observed_s, found.divided(found.work[:, :, :, None, :])),
    )


def _gc(job: _JobEvidence) -> _Finding | None:
    """Sparse long computes, at steps that differ from worker to worker, or recorded collections."""
    found, whatif = job.factors, job.whatif
    without = whatif.observed_s.copy()
    recorded = whatif.table.of_type("gc")
    without[:, :, recorded] = 0.0
    collected = float(whatif.observed_s[:, :, recorded].sum())
    share, count = 0.0, 0
    if found is not None:
        share, count = float(found.paused.mean()), int(found.paused.sum())
        if 0 < share < SPARSE and _scattered(found):
            without = found.put(without, found.clean)
        else:
            count = 0
    if not count and not collected:
        return None
    return _Finding(
        "all workers",
        f"{count} computes ({100 * share:.1f} %) took over 3 times what their place takes, at different steps on "
        f"different workers; recorded collections took {format_seconds(collected)}",
        without,
    )


def _scattered(found: Factors) -> bool:
    """Say whether pauses fall on different steps for different workers: no step has most of the workers paused."""
    per_step = np.asarray(found.paused.any(axis=(0, 4)))
    ranks = range(int(found.rank_of.max()) + 1)
    workers = np.stack([per_step[:, :, found.rank_of == p].any(axis=2) for p in ranks], axis=2)
    together = np.asarray(workers, dtype=np.float64).mean(axis=(1, 2))
    return bool(workers[0].size == 1 or np.median(together[together > 0]) < 0.9)


def _comm(job: _JobEvidence) -> _Finding | None:
    """Transfers that take much longer than the usual of their type."""
    whatif = job.whatif
    table = whatif.table
    usual, excess = np.zeros(len(table.optype)), np.zeros(whatif.observed_s.shape)
    by_type: dict[str, float] = {}
    for code, name in enumerate(table.names):
        members = np.flatnonzero(table.optype == code)
        if name in COMMUNICATION and len(members):
            usual[members] = _usual_transfer(whatif.observed_s[:, :, members], table.stage[members])
            seconds = whatif.observed_s[:, :, members]
            excess[:, :, members] = np.where(seconds > SLOW_TRANSFER * usual[members], seconds - usual[members], 0.0)
            by_type[merged(name)] = by_type.get(merged(name), 0.0) + float(excess[:, :, members].sum())
    if not sum(by_type.values()):
        return None
    worst = max(by_type, key=lambda name: by_type[name])
    place = excess * np.array([merged(table.names[code]) == worst for code in table.optype])
    dp = int(place.sum(axis=(0, 2)).argmax())
    pp = int(np.bincount(table.stage, weights=place.sum(axis=(0, 1))).argmax())
    steps = int((place.sum(axis=(1, 2)) > 0).sum())
    return _Finding(
        f"{worst} of dp {table.dp[dp]} / pp {pp}",
        f"{int((excess > 0).sum())} transfers take over {SLOW_TRANSFER} times the usual of their type, {worst} most, "
        f"in {steps} of {len(table.steps)} steps",
        whatif.observed_s - excess,
    )


def _usual_transfer(seconds: Block, stage: NDArray[np.int64]) -> float:
    """Return the lower median over workers of the median transfer, from [S, D, operations] of one type."""
    places = np.concatenate([np.median(seconds[:, :, stage == p], axis=(0, 2)) for p in np.unique(stage)])
    return float(np.sort(places)[(len(places) - 1) // 2])


CAUSES: dict[str, RootCauseRule] = {
    "straggler.worker": RootCauseRule(_worker, "replace or repair the host of {where}, or leave it out of the job"),
    "straggler.sequence": RootCauseRule(
        _sequence, "balance micro-batches by the sum of squared sequence lengths across DP ranks and micro-batches"
    ),
    "straggler.last_stage": RootCauseRule(
        _last_stage, "move layers from the last stage to the others: its loss layer costs as much as some of them"
    ),
    "host.gc": RootCauseRule(_gc, "freeze the collector and collect at the same step on all ranks (host.gc)"),
    "comm.exposed": RootCauseRule(
        _comm, "check the links named here: cables, switch ports, congestion; move the rank to another host"
    ),
}
"""Cause -> the rule that finds it. Adding one is adding a line here."""

LAUNCH_FIX = "take host work off the step: fewer small kernels, CUDA graphs, logging and data loading in other threads"


def find_causes(
    whatif: WhatIf,
    *,
    devices: int,
    observed_s: Block,
    shares: Mapping[str, float],
    sequence: Correlation,
) -> list[Cause]:
    """Return the causes found, largest first; the last stage stands below a sequence-length verdict.

    `observed_s` [S] recorded step times; `shares` = {'M_W', 'M_S'} for the evidence.
    """
    job = _JobEvidence(whatif, factors(whatif.table), sequence, shares)
    base = whatif.step_s(whatif.observed_s)
    fidelity = float(observed_s.sum() / base.sum())
    causes = []
    for name, rule in CAUSES.items():
        finding = rule.find(job)
        if finding is not None:
            after = whatif.step_s(finding.without_s)
            if base.sum() - after.sum() >= WORTH * base.sum():
                causes.append(
                    _cause(
                        name,
                        finding.where,
                        finding.evidence,
                        rule.fix.format(where=finding.where),
                        base,
                        after,
                        devices,
                        fidelity,
                    )
                )
    late = observed_s.sum() - base.sum()
    if late >= LAUNCH_SHARE * observed_s.sum():
        share = 100 * late / observed_s.sum()
        evidence = f"operations start later than their inputs allow: {share:.1f} % of the step time"
        causes.append(_cause("host.launch", "all ranks", evidence, LAUNCH_FIX, observed_s, base, devices, 1.0))
    return _explained(ranked(causes))


def _cause(
    name: str, where: str, evidence: str, fix: str, before: Block, after: Block, devices: int, fidelity: float
) -> Cause:
    """Return a cause whose removal turns step times `before` [S] into `after` [S]."""
    gain = max(float(before.sum() - after.sum()), 0.0)
    speedup = max(float(before.sum() / after.sum()), 1.0)
    lost = f"; without it a step takes {format_seconds(after.mean())}, not {format_seconds(before.mean())}"
    return Cause(name, where, gain * devices, evidence + lost, fix, speedup, _interval(before, after, fidelity))


def _interval(before: Block, after: Block, fidelity: float) -> tuple[float, float]:
    """Return the 95 % jackknife interval over steps of the speed-up, widened by what the replay does not explain."""
    num_steps = len(before)
    left_out = (before.sum() - before) / (after.sum() - after)
    error = np.sqrt((num_steps - 1) / num_steps * ((left_out - left_out.mean()) ** 2).sum())
    speedup = before.sum() / after.sum()
    half = 1.96 * error + abs(fidelity - 1) * (speedup - 1)
    return max(float(speedup - half), 1.0), float(speedup + half)


def _explained(causes: list[Cause]) -> list[Cause]:
    """Move the last stage behind a sequence-length verdict: uneven sequences look like a slow last stage."""
    names = [cause.cause for cause in causes]
    if "straggler.sequence" not in names or "straggler.last_stage" not in names:
        return causes
    last = causes.pop(names.index("straggler.last_stage"))
    at = [cause.cause for cause in causes].index("straggler.sequence") + 1
    while at < len(causes) and causes[at].lost_device_s > last.lost_device_s:
        at += 1
    return [*causes[:at], last, *causes[at:]]


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
