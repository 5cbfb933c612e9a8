"""The causes of a straggling job: what is wrong, where, and what its removal would win.

Use it through `headway.ledger.operations.straggler.root_causes`. Each rule takes one
factor out of the observed durations (`compute_factors`) and replays: the
seconds lost are what that replay wins, so two causes that hide each other
both show what they cost on top of the other. A rule speaks when its replay
wins at least `WORTH`.

>>> list(CAUSES)
['straggler.worker', 'straggler.sequence', 'straggler.last_stage', 'host.gc', 'comm.exposed']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.units import format_seconds
from headway.ledger.cause import Cause, ranked
from headway.ledger.operations.compute_factors import Factors, factors
from headway.ledger.operations.whatif_groups import COMMUNICATION, WhatIf, merged

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
        _few(names),
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


def _few(names: list[str]) -> str:
    """Join up to three names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
