"""A plan of precisions from measured phases: base times of uniform runs, mixtures replayed, the allocator's choice.

Operators' times alone are scaled so that each rank's uniform step is met;
what else a step has is that of the float32 run. Ranks that keep the pace of
the fastest one stay in float32, so a job whose ranks are alike does, too. The
bound is the fastest step with one precision for each slow rank: what it need
not lower for that, it computes in more bits.

Source: *QSync* (IPDPS 2024), sections 4 to 6.

>>> SLACK, ERROR
(0.001, 0.06)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from headway.model.precision.allocation import MOST_ENUMERATED, allocate
from headway.model.precision.indicator import OperatorStatistics, TensorStatistics, omega_table
from headway.model.precision.step import KEPT_OUTPUT, OperatorTimes, RankStep, operator_seconds, replayed_step_s
from headway.model.remedies import PRECISIONS
from headway.sim.ddp.ddp_link import CollectiveLink, assign, limits

SLOW = 1.1
"""A rank is slow whose own float32 step is longer than that of the fastest rank times this."""

MOST_APART = 4
"""Up to so many ranks each get a precision of their own in the plans that give the bound; more get one together."""

SLACK, ERROR = 1e-3, 0.06
"""How far above the fastest step a plan may be predicted, and the replay's error that the interval allows for."""


class PhaseOfRank(msgspec.Struct, frozen=True):
    """What one rank measured in one phase: see `headway.model.precision.apply`."""

    rank: int
    names: list[str]
    lacks: dict[str, str]
    forward_s: dict[str, float]
    backward_s: dict[str, float]
    bytes: dict[str, int]
    statistics: dict[str, dict[str, list[tuple[int, float, float]]]]
    step_s: list[float]
    in_sync_s: float | None
    link: list[tuple[int, float]]


Phases = Mapping[str, Mapping[int, PhaseOfRank]]
"""Precision -> rank -> what it measured."""


@dataclass(frozen=True, slots=True)
class PrecisionChoice:
    """What is planned."""

    base_step_s: float
    """Measured step, all in float32."""

    step_s: float
    """Predicted under the plan."""

    interval: tuple[float, float]
    """The same with the replay's error to either side."""

    omega: float
    """Indicator's sum."""

    omega_bound: float
    """No plan that holds loses less; 0 where there are too many to be gone through."""

    operators: list[dict[str, str | int]]
    """Rank, name, precision of every operator."""


def planned(phases: Phases) -> PrecisionChoice:
    """Return the plan of measured phases.

    Operators' times are scaled so that each rank's uniform steps are met; the rest of a step is that of float32.
    """
    base = phases["float32"]
    ranks = sorted(base)
    names = base[ranks[0]].names
    times = {rank: operator_times(phases, rank, names) for rank in ranks}
    steps = {rank: rest_of(base[rank], names) for rank in ranks}
    link = _link_of(base[ranks[0]])
    sizes = [base[ranks[0]].bytes[name] for name in reversed(names)]
    buckets = [[len(names) - 1 - i for i in bucket] for bucket in assign(sizes, ["f"] * len(names), limits("default"))]
    bucket_bytes = [sum(sizes[len(names) - 1 - i] for i in bucket) for bucket in buckets] if link else []
    # The columns that each rank has of each operator: those that were not measured are left out.
    owners = list(itertools.product(ranks, range(len(names))))
    pace_s = min(sum(rank.step_s) for rank in base.values())
    slow = {rank for rank in ranks if sum(base[rank].step_s) > SLOW * pace_s}
    float32 = PRECISIONS.index("float32")
    columns = [
        [c for c in range(float32 + 1) if math.isfinite(times[rank][i].forward_s[c])] if rank in slow else [float32]
        for rank, i in owners
    ]
    tables = {rank: omega_table(_statistics(base[rank], names)) for rank in ranks}
    omega = [[tables[rank][i][c] for c in offered] for (rank, i), offered in zip(owners, columns, strict=True)]

    def step_s(choice: list[int]) -> float:
        """Replay the step of a choice over the ranks."""
        picked = [offered[index] for offered, index in zip(columns, choice, strict=True)]
        seconds = [
            operator_seconds(times[rank], picked[k * len(names) : (k + 1) * len(names)], {}, outputs=KEPT_OUTPUT)
            for k, rank in enumerate(ranks)
        ]
        return replayed_step_s(
            [steps[rank] for rank in ranks], seconds, buckets if link else [], bucket_bytes, link or NO_LINK
        )

    fastest = _fastest(step_s, columns, len(names), len(ranks))
    choice = allocate(omega, step_s, bound_s=step_s(fastest) * (1 + SLACK))
    lost = sum(row[index] for row, index in zip(omega, choice, strict=True))
    rows: list[dict[str, str | int]] = [
        {"rank": rank, "name": names[i], "precision": PRECISIONS[offered[index]]}
        for (rank, i), offered, index in zip(owners, columns, choice, strict=True)
    ]
    # The replay's own miss of the measured step is taken out: what is predicted is the measured one, changed.
    measured_s = max(rank.in_sync_s or sum(rank.step_s) for rank in base.values())
    predicted_s = measured_s * step_s(choice) / step_s([len(offered) - 1 for offered in columns])
    exact = math.prod(map(len, columns)) <= MOST_ENUMERATED or lost == 0
    interval = (predicted_s * (1 - ERROR), predicted_s * (1 + ERROR))
    return PrecisionChoice(measured_s, predicted_s, interval, lost, lost if exact else 0.0, rows)


NO_LINK = CollectiveLink(0.0, math.inf, 0.0)
"""Of one rank."""


def _fastest(
    step_s: Callable[[list[int]], float], columns: Sequence[Sequence[int]], per_rank: int, ranks: int
) -> list[int]:
    """Return the fastest of the plans with one precision for each rank."""
    together = ranks > MOST_APART
    uniform = itertools.product(range(len(PRECISIONS)), repeat=1 if together else ranks)
    plans = [
        [
            max((i for i, c in enumerate(offered) if c <= of_rank[0 if together else k // per_rank]), default=0)
            for k, offered in enumerate(columns)
        ]
        for of_rank in uniform
    ]
    return min(plans, key=step_s)


def operator_times(phases: Phases, rank: int, names: list[str]) -> list[OperatorTimes]:
    """Return a rank's operators, scaled to its uniform steps; infinite where it lacks a precision."""
    base = phases["float32"][rank]
    rest_s = sum(base.step_s) - sum(base.forward_s.values()) - sum(base.backward_s.values())
    forward: dict[str, list[float]] = {name: [] for name in names}
    backward: dict[str, list[float]] = {name: [] for name in names}
    for precision_name in PRECISIONS:
        phase = phases[precision_name][rank]
        # Operators that lack this precision ran in float32 there.
        ran = {n: (phase if n in phase.forward_s else base) for n in names}
        alone_s = sum(ran[n].forward_s[n] + ran[n].backward_s[n] for n in names)
        factor = max(0.1, (sum(phase.step_s) - max(rest_s, 0.0)) / alone_s) if alone_s else 1.0
        for name in names:
            forward[name].append(factor * phase.forward_s.get(name, math.inf))
            backward[name].append(factor * phase.backward_s.get(name, math.inf))
    return [OperatorTimes(name, tuple(forward[name]), tuple(backward[name])) for name in names]


def rest_of(base: PhaseOfRank, names: list[str]) -> RankStep:
    """Return what a rank's step has besides its operators."""
    forward_s, backward_s, after_s = base.step_s
    ours_s = [sum(table[name] for name in names) for table in (base.forward_s, base.backward_s)]
    return RankStep(max(0.0, forward_s - ours_s[0]), max(0.0, backward_s - ours_s[1]), after_s)


def _link_of(base: PhaseOfRank) -> CollectiveLink | None:
    """Return the link between ranks; None of one rank."""
    if not base.link:
        return None
    (small, short_s), (large, long_s) = base.link
    rate = (large - small) / max(long_s - short_s, 1e-9)
    return CollectiveLink(max(0.0, short_s - small / rate) * 1e9, rate, 0.0)


def _statistics(base: PhaseOfRank, names: list[str]) -> list[OperatorStatistics]:
    """Return the means over batches, operators numbered in the order of the forward."""
    rows = []
    for depth, name in enumerate(names, 1):
        parts = {
            key: TensorStatistics.mean([TensorStatistics(*row) for row in table])
            for key, table in base.statistics[name].items()
        }
        rows.append(OperatorStatistics(parts["input"], parts["weight"], parts["gradient"], depth))
    return rows
