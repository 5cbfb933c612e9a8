"""What multiplies the compute durations of a traced job: its workers, its stages, its micro-batches, its pauses.

Use it through `root_cause`. Durations of forwards and backwards are laid out
[steps, dp, stages of the model, micro-batches] per direction and taken apart
with medians, so that one factor does not leak into another: a pause is more
than three times the usual, a worker is compared with the same stage on other
DP ranks, the last stage with the other stages, a micro-batch with the usual
of each place it passes.

>>> from headway.ledger.operations.operation_table import arrange
>>> from benchmarks._synthetic import SyntheticFault, SyntheticJob, generate
>>> job = SyntheticJob(dp=3, pp=2, num_microbatches=4, num_steps=4)
>>> made = generate(job, seed=1, faults=[SyntheticFault("worker", 1.5, dp=2, stage=1)])
>>> factors(arrange(made.trace)).worker.round(1).tolist()
[[1.0, 1.0], [1.0, 1.0], [1.0, 1.5]]

How far the clocks of the ranks of an operation trace stand apart, found only where they must.

Use it before comparing times of different ranks. What communicates ends at
about the same moment for all its members, and never before the last of them
has started. Where that is broken by more than clock noise, offsets are
estimated from the ends of what the ranks did together
(`headway.trace.sync.end_differences`), without drift: published traces count each
step from zero. A trace whose clocks agree is left alone, to the last bit.
Offsets are kept in `trace.ranks`, never written into the times.

>>> from benchmarks._synthetic import SyntheticJob, generate
>>> trace = generate(SyntheticJob(dp=2, pp=2, num_microbatches=4, num_steps=2), seed=1).trace
>>> aligned(trace) is trace
True
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.core.units import NS_PER_S
from headway.ledger.operations.dependencies import STREAMS, Dependencies, infer
from headway.ledger.operations.operation_table import OperationTable, arrange, clock_ns
from headway.ledger.operations.whatif_groups import CLOCK_NOISE_S
from headway.trace.events.trace import Trace
from headway.trace.sync.end_differences import estimate
from headway.trace.sync.meetings import Meetings

Block = NDArray[np.float64]

OUTLIER = 3.0
"""A compute this many times the median of its place is a pause."""

UNLIKE = 2.0
"""Forward and backward of a micro-batch differ from their usual by factors at most this far apart."""

MIN_CORRELATION, MIN_SPREAD = 0.9, 0.05
"""Micro-batches differ in work when forwards and backwards correlate, and forwards spread, at least so much."""

DIRECTIONS = ("forward-compute", "backward-compute")


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors, per direction (T = 2: forward, backward), step, DP rank, stage of the model and micro-batch."""

    ops: NDArray[np.int64]
    """[T, G, M] Operation of each compute."""

    rank_of: NDArray[np.int64]
    """[G] Pipeline rank that runs each stage of the model."""

    seconds: Block
    """[T, S, D, G, M] Recorded durations."""

    paused: NDArray[np.bool_]
    """[T, S, D, G, M] More than `OUTLIER` times what its place and micro-batch let expect."""

    clean: Block
    """[T, S, D, G, M] Durations without the pauses."""

    r: Block
    """[D, P] Correlation of the forward of a micro-batch with its backward, per worker, pauses left out."""

    cv: Block
    """[D, P] Coefficient of variation of the forwards of each worker, pauses left out."""

    shared_r: float
    """The same correlation of `work`: averaged over stages, the noise of one hides less of it."""

    imbalanced: bool
    """Micro-batches differ in work: r >= 0.9 and cv >= 0.05, in the median of the workers or averaged over stages."""

    usual: Block
    """[T, D, G] Median of a place without pauses, and without `work` where that is imbalanced."""

    work: Block
    """[T, S, D, M] How much longer than usual a micro-batch takes wherever it passes; its mean is 1."""

    worker: Block
    """[D, P] How much longer a worker takes than the same pipeline rank on other DP ranks (lower median)."""

    stage: Block
    """[T, G] How much longer a stage takes than the median of those on other pipeline ranks (1 when there is none)."""

    noise: tuple[float, float]
    """What noise alone makes of a (worker, stage) factor at most: 1 + 4 standard errors of a ratio of medians."""

    def slow_ranks(self, least: float) -> Block:
        """Return [P] how much longer a pipeline rank takes on all DP ranks than the others, 1 below `least`.

        The last pipeline rank is left out: that it is slow has a name of its
        own. Fewer than 3 ranks do not tell which of them is slow.
        """
        last = int(self.rank_of.max())
        stage = self.stage.min(axis=0)
        factor = np.array([stage[self.rank_of == p].min() for p in range(last)] + [1.0])
        return np.where((factor > least) & (last >= 2), factor, 1.0)

    def divided(self, factor: Block) -> Block:
        """Return the durations with the computes `factor` times faster; a pause keeps its length."""
        return np.asarray(self.clean / factor + (self.seconds - self.clean))

    def put(self, observed_s: Block, values: Block) -> Block:
        """Return a copy of `observed_s` [S, D, K] with the computes set to `values` [T, S, D, G, M]."""
        result = observed_s.copy()
        result[:, :, self.ops] = np.moveaxis(values, 0, 2)
        return result


def factors(table: OperationTable) -> Factors | None:
    """Take the computes of `table` apart; None when stages differ in their micro-batches or there are none."""
    ops = _ops(table)
    if ops is None:
        return None
    # A duration [T, S, D, G, M] is taken for place x work: place [T, 1, D, G, 1] is what a worker usually takes for a
    # stage, work [T, S, D, 1, M] how much longer a micro-batch takes. `common` [T, 1, 1, G, 1] is a stage on a typical
    # worker, `rough` a first estimate of the work.
    seconds = np.moveaxis(table.duration_s[:, :, ops].astype(np.float64), 2, 0)
    common = _lower(np.median(seconds, axis=(1, 4), keepdims=True), 2)
    ratio = np.where(common > 0, seconds / np.where(common > 0, common, 1.0), 1.0)
    rough, chance = _rough_work(ratio)
    place = common * np.median(ratio / rough, axis=(1, 4), keepdims=True)
    # What all stages of a DP rank share (`drift` [T, 1, D, 1, 1]) may be its workers or its micro-batches. Where chance
    # explains it, it moves from the place to the work.
    drift = _lower(place / np.where(common > 0, _lower(place, 2), 1.0), 3)
    place = place / np.where(np.abs(drift - 1) > chance, 1.0, drift)
    rough = rough * np.where(np.abs(drift - 1) > chance, 1.0, drift)
    paused = (seconds > OUTLIER * place * rough) & (place > 0)
    clean = np.where(paused, place * rough, seconds)
    work = _work(clean, place)
    rank_of = table.stage[ops[0, :, 0]]
    r, cv = _correlations(clean / np.where(place > 0, place, 1.0), rank_of)
    shared_r = _correlation(work[0], work[1])
    imbalanced = bool(np.median(r) >= MIN_CORRELATION and np.median(cv) >= MIN_SPREAD)
    imbalanced |= shared_r >= MIN_CORRELATION and float(work[0].std()) >= MIN_SPREAD
    even = clean / work[:, :, :, None, :] if imbalanced else clean
    usual = np.median(even, axis=(1, 4))
    noise = _noise(work, ratio.shape[3]) if imbalanced else _noise_of(even, usual)
    return Factors(
        ops, rank_of, seconds, paused, clean, r, cv, shared_r, imbalanced, usual, work,
        _worker(usual, rank_of), _stage(usual, rank_of), _chance(noise, even.shape, rank_of),
    )  # fmt: skip


def _rough_work(ratio: Block) -> tuple[Block, Block]:
    """Return how much longer than usual a micro-batch takes [T, S, D, 1, M], from `ratio` [T, S, D, G, M].

    The lower median over the stages: a pause, or one slow worker, does not
    move it. A direction far above the other one of its micro-batch has met
    pauses on most stages; the other one is believed. With one stage only, the
    lower of both. What all micro-batches of a DP rank share is left to its
    workers, unless chance [T, 1, D, 1, 1], the second result, explains it: 4
    standard errors of a ratio of medians.
    """
    if ratio.shape[3] > 1:
        work = _lower(ratio, 3)
        work = np.where(work > UNLIKE * work[::-1], work[::-1], work)
    else:
        work = np.broadcast_to(ratio.min(axis=0, keepdims=True), ratio.shape)
    share = np.median(work, axis=(1, 4), keepdims=True)
    share = np.where(share > 0, share, 1.0)
    spread = np.median(np.abs(work / share - 1), axis=(1, 4), keepdims=True) / 0.6745
    chance = 4 * np.sqrt(2) * 1.2533 * spread / np.sqrt(ratio.shape[1] * ratio.shape[4])
    middle = _lower(share, 2)
    return work / np.where(np.abs(share / middle - 1) > chance, share, middle), chance


def _lower(values: Block, axis: int) -> Block:
    """Return the lower median along `axis`, kept as an axis of length 1: of two, the smaller one."""
    return np.take(np.sort(values, axis=axis), [(values.shape[axis] - 1) // 2], axis=axis)


def _ops(table: OperationTable) -> NDArray[np.int64] | None:
    """Return [2, G, M] the operation of each direction, stage of the model and micro-batch."""
    found = []
    for optype in DIRECTIONS:
        ops = np.flatnonzero(table.of_type(optype))
        stage = table.layer[ops] * table.num_stages + table.stage[ops]
        order = np.lexsort((table.seq[ops], table.microbatch[ops], stage))
        counts = np.unique(stage, return_counts=True)[1]
        if not len(ops) or len(set(counts.tolist())) != 1:
            return None
        found.append(ops[order].reshape(len(counts), -1))
    if found[0].shape != found[1].shape:
        return None
    return np.stack(found)


def _work(clean: Block, place: Block) -> Block:
    """Return [T, S, D, M] a micro-batch's duration over the usual one, geometric mean over stages; its mean is 1."""
    usual = np.where(place > 0, place, 1.0)
    ratio = np.where(clean > 0, clean / usual, 1.0)
    work = np.exp(np.log(ratio).mean(axis=3))
    return np.asarray(work / work.mean(axis=(1, 2, 3), keepdims=True))


def _worker(usual: Block, rank_of: NDArray[np.int64]) -> Block:
    """Return [D, P]: time of a worker over the lower median of its pipeline rank across DP ranks."""
    ranks = range(int(rank_of.max()) + 1)
    total = np.stack([usual[:, :, rank_of == p].sum(axis=(0, 2)) for p in ranks], axis=1)
    reference = _lower(total, 0)
    return np.asarray(total / np.where(reference > 0, reference, 1.0))


def _stage(usual: Block, rank_of: NDArray[np.int64]) -> Block:
    """Return [T, G]: lower median over DP ranks of a stage over the median of the other pipeline ranks' stages."""
    place = _lower(usual, 1)[:, 0]
    if rank_of.max() == 0:
        return np.ones_like(place)
    others = np.stack([np.median(place[:, rank_of != rank], axis=1) for rank in rank_of], axis=1)
    return np.asarray(place / np.where(others > 0, others, 1.0))


def _noise(work: Block, num_stages: int) -> float:
    """Return the relative noise of one compute, from how forwards and backwards of a micro-batch disagree."""
    apart = np.log(work[0] / work[1])
    return float(np.median(np.abs(apart - np.median(apart))) / 0.6745 * np.sqrt(num_stages / 2))


def _noise_of(even: Block, usual: Block) -> float:
    """Return the relative noise of one compute, from `even` [T, S, D, G, M] around its place."""
    place = np.where(usual > 0, usual, 1.0)[:, None, :, :, None]
    return float(np.median(np.abs(even / place - 1)) / 0.6745)


def _chance(noise: float, shape: tuple[int, ...], rank_of: NDArray[np.int64]) -> tuple[float, float]:
    """Return 1 + 4 standard errors of a worker's and of a stage's factor, ratios of medians of so many computes."""
    directions, steps, _, stages, microbatches = shape
    error = 4 * np.sqrt(2) * 1.2533 * noise
    per_rank = stages // (int(rank_of.max()) + 1)
    worker = error / np.sqrt(steps * microbatches * directions * per_rank)
    return 1 + float(worker), 1 + float(error / np.sqrt(steps * microbatches))


def _correlations(normal: Block, rank_of: NDArray[np.int64]) -> tuple[Block, Block]:
    """Return per worker [D, P] the forward-backward correlation and the spread of forwards, from [T, S, D, G, M]."""
    shape = (normal.shape[2], int(rank_of.max()) + 1)
    r, cv = np.zeros(shape), np.zeros(shape)
    for d, p in np.ndindex(shape):
        forward, backward = (values[:, d][:, rank_of == p] for values in normal)
        r[d, p] = _correlation(forward, backward)
        cv[d, p] = forward.std() / forward.mean() if forward.mean() > 0 else 0.0
    return r, cv


def _correlation(x: Block, y: Block) -> float:
    """Return the correlation of two blocks, 0 when one of them is constant."""
    if x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x.ravel(), y.ravel())[0, 1])


# How far the clocks of the ranks of an operation trace stand apart, found only where they must.

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
    found = estimate(met, clock, len(ranks), drift=False)
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
