"""What multiplies the compute durations of a traced job: its workers, its stages, its micro-batches, its pauses.

Use it through `root_cause`. Durations of forwards and backwards are laid out
[steps, dp, stages of the model, micro-batches] per direction and taken apart
with medians, so that one factor does not leak into another: a pause is more
than three times the usual, a worker is compared with the same stage on other
DP ranks, the last stage with the other stages, a micro-batch with the usual
of each place it passes.

>>> OUTLIER
3.0
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.ledger.operation_table import OperationTable

Block = NDArray[np.float64]

OUTLIER = 3.0
"""A compute this many times the median of its place is a pause."""

UNLIKE = 2.0
"""Forward and backward of a micro-batch differ from their usual by factors at most this far apart."""

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

    usual: Block
    """[T, D, G] Median of a place without pauses and micro-batch factors."""

    work: Block
    """[T, S, D, M] How much longer than usual a micro-batch takes wherever it passes; its mean is 1."""

    worker: Block
    """[D, P] How much longer a worker takes than the same pipeline rank on other DP ranks (lower median)."""

    stage: Block
    """[T, G] How much longer a stage takes than the median of the others (1 when there is no other)."""

    def slow_ranks(self, least: float) -> Block:
        """Return [P] how much longer a pipeline rank takes on all DP ranks than the others, 1 below `least`.

        The last stage of the model is left out: that it is slow has a name of
        its own. Fewer than 3 stages do not tell which of them is slow.
        """
        stage = self.stage.min(axis=0)
        stage[-1] = 1.0
        ranks = range(int(self.rank_of.max()) + 1)
        factor = np.array([stage[self.rank_of == p].min() for p in ranks])
        return np.where((factor > least) & (len(stage) > 2), factor, 1.0)

    def correlations(self) -> tuple[Block, Block]:
        """Return per worker [D, P] the forward-backward correlation and the spread of forwards, pauses left out."""
        forward, backward = (_normal(values, self.usual[t]) for t, values in enumerate(self.clean))
        ranks = range(int(self.rank_of.max()) + 1)
        pairs = [[_pair(forward, backward, d, self.rank_of == p) for p in ranks] for d in range(forward.shape[1])]
        table = np.array(pairs)
        return table[:, :, 0], table[:, :, 1]

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
    seconds = np.moveaxis(table.duration_s[:, :, ops].astype(np.float64), 2, 0)
    common = _lower(np.median(seconds, axis=(1, 4), keepdims=True), 2)
    ratio = np.where(common > 0, seconds / np.where(common > 0, common, 1.0), 1.0)
    rough = _rough_work(ratio)
    place = np.median(ratio / rough, axis=(1, 4), keepdims=True)
    expected = common * place * rough
    paused = (seconds > OUTLIER * expected) & (expected > 0)
    clean = np.where(paused, expected, seconds)
    work = _work(clean, common * place)
    usual = np.median(clean / work[:, :, :, None, :], axis=(1, 4))
    rank_of = table.stage[ops[0, :, 0]]
    return Factors(ops, rank_of, seconds, paused, clean, usual, work, _worker(usual, rank_of), _stage(usual))


def _rough_work(ratio: Block) -> Block:
    """Return [T, S, D, 1, M] how much longer than usual a micro-batch takes, from `ratio` [T, S, D, G, M].

    The lower median over the stages: a pause, or one slow worker, does not
    move it. A direction far above the other one of its micro-batch has met
    pauses on most stages; the other one is believed. With one stage only, the
    lower of both, and what all micro-batches of a DP rank share is left to
    its worker, unless chance explains it (4 standard errors of the median).
    """
    if ratio.shape[3] > 1:
        work = _lower(ratio, 3)
        return np.where(work > UNLIKE * work[::-1], work[::-1], work)
    lower = np.broadcast_to(ratio.min(axis=0, keepdims=True), ratio.shape)
    share = np.median(lower, axis=(1, 4), keepdims=True)
    share = np.where(share > 0, share, 1.0)
    spread = np.median(np.abs(lower / share - 1), axis=(1, 4), keepdims=True) / 0.6745
    chance = 4 * 1.2533 * spread / np.sqrt(ratio.shape[1] * ratio.shape[4])
    middle = _lower(share, 2)
    return np.asarray(lower / np.where(np.abs(share / middle - 1) > chance, share, middle))


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


def _stage(usual: Block) -> Block:
    """Return [T, G]: lower median over DP ranks of a stage over the median of the other stages."""
    place = _lower(usual, 1)[:, 0]
    stages = place.shape[1]
    if stages == 1:
        return np.ones_like(place)
    others = np.stack([np.median(np.delete(place, g, axis=1), axis=1) for g in range(stages)], axis=1)
    return np.asarray(place / np.where(others > 0, others, 1.0))


def _normal(values: Block, usual: Block) -> Block:
    return np.asarray(values / np.where(usual > 0, usual, 1.0)[None, :, :, None])


def _pair(forward: Block, backward: Block, dp: int, stages: NDArray[np.bool_]) -> tuple[float, float]:
    """Return (correlation, coefficient of variation of forwards) of one worker."""
    x, y = forward[:, dp][:, stages].ravel(), backward[:, dp][:, stages].ravel()
    spread = float(x.std() / x.mean()) if x.mean() > 0 else 0.0
    if x.std() == 0 or y.std() == 0:
        return 0.0, spread
    return float(np.corrcoef(x, y)[0, 1]), spread
