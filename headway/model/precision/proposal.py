"""A plan of precisions from measured phases: base times of uniform runs, mixtures replayed, the allocator's choice.

Operators' times alone are scaled so that each rank's uniform step is met;
what else a step has is that of the float32 run. Ranks that keep the pace of
the fastest one stay in float32, so a job whose ranks are alike does, too. The
bound is the fastest step with one precision for each slow rank: what it need
not lower for that, it computes in more bits.

Source: *QSync* (IPDPS 2024), sections 4 to 6.

>>> SLACK, ERROR
(0.001, 0.06)

What an operator loses in fewer bits: the variance of what is rounded, as far as the loss sees it.

An adjustable operator multiplies an input v by a weight w; its backward takes
the gradient g of its output. A number rounded at random to one of its two
neighbours at distance q errs with the variance f (1 - f) q^2 at the fraction
f, q^2 / 6 on average:

    int8   q = max|x| / 127, one scale for the tensor        bf16   q = 2^e eps, eps = 2^-7, e = floor(log2 rms(x))

With D numbers in a tensor, and the backward in bf16,

    s_f = (||w||^2 q_v^2 D_v + ||v||^2 q_w^2 D_w) / 6
    s_b = (||g||^2 q_v^2 D_v + ||v||^2 q_g^2 D_g) / 6        q_g always of bf16
    omega = 4 (L - d) s_f + d s_b                             d depth of the operator, L of the model

float32 loses 0. Numbers compare operators and precisions; they are no
variance of the output (D_v and D_w make them a score).

Source: *QSync* (IPDPS 2024), section 4, with the exponent of a tensor's rms
and squared norms, where its code takes the exponent linearly, capped at 5.

>>> x = TensorStatistics(numel=4, square_norm=16.0, largest=3.0)
>>> rounding_step(x, "int8") == 3 / 127, rounding_step(x, "bf16") == 2 * 2**-7
(True, True)

How long a step takes with operators in mixed precisions, on ranks that wait for each other.

Base times of each operator come from runs in which all operators had one
precision. The remedy hands every output on as float32, so changing one
operator changes its own cost, its casts included, and no other's.

Over ranks the step is replayed by `headway.sim.ddp`: each rank's forward, its backward
operator by operator, each bucket of gradients all-reduced as soon as every
rank has it, the update.

Source: *QSync* (IPDPS 2024), section 5 (cost mapper, cross-rank replay).

>>> operator_seconds([OperatorTimes("fc", (0.1, 0.2, 0.4), (0.2, 0.4, 0.8))], [1])
([0.2], [0.4])
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.core.units import NS_PER_S, seconds_to_ns
from headway.model.precision.allocation import MOST_ENUMERATED, allocate
from headway.model.remedies import PRECISIONS
from headway.sim.ddp.ddp_link import CollectiveLink, DdpStep, assign, compiled, limits, makespan_ns
from headway.sim.ddp.ddp_thread import CALL, WAIT, WORK, Thread


@dataclass(frozen=True, slots=True)
class OperatorTimes:
    """An adjustable operator on one rank."""

    name: str
    """Its module."""

    forward_s: tuple[float, ...]
    """[precisions] Base time of the forward, casts of a uniform run included; infinite where the device lacks it."""

    backward_s: tuple[float, ...]
    """[precisions] Of the backward."""


def operator_seconds(operators: Sequence[OperatorTimes], choice: Sequence[int]) -> tuple[list[float], list[float]]:
    """Return forward and backward of each operator, `choice` [operators] being columns of `PRECISIONS`.

    Raises `InputError` naming the operator whose device lacks a precision.
    """
    if len(choice) != len(operators):
        raise InputError(f"{len(choice)} precisions for {len(operators)} operators; give each one.")
    chosen = list(zip(operators, choice, strict=True))
    for operator, column in chosen:
        if not math.isfinite(operator.forward_s[column] + operator.backward_s[column]):
            precision = PRECISIONS[column]
            raise InputError(f"the device has no {precision} for {operator.name}. Leave {precision} out there.")
    forward = [max(0.0, operator.forward_s[column]) for operator, column in chosen]
    return forward, [max(0.0, operator.backward_s[column]) for operator, column in chosen]


@dataclass(frozen=True, slots=True)
class RankStep:
    """One rank's step but for its adjustable operators."""

    before_s: float
    """Forward, and what else comes before the first gradient: all but adjustable operators."""

    between_s: float
    """Backward of all but adjustable operators; spread evenly over it."""

    after_s: float
    """From the last bucket to the end of the step: the update."""


def replayed_step_s(
    ranks: Sequence[RankStep],
    seconds: Sequence[tuple[Sequence[float], Sequence[float]]],
    buckets: Sequence[Sequence[int]],
    sizes: Sequence[int],
    link: CollectiveLink,
) -> float:
    """Return the seconds of a data-parallel step.

    `seconds` is forward and backward of each rank's operators, `buckets` the operators whose gradients share one, in
    the order in which buckets are full, `sizes` their bytes. Operators run backward in reverse. A bucket begins when
    every rank has it and the one before it has begun; without buckets, or alone, ranks do not meet.
    """
    threads = []
    for rank, (step, (forward, backward)) in enumerate(zip(ranks, seconds, strict=True)):
        items = [(WORK, seconds_to_ns(step.before_s + sum(forward)), -1)]
        share_s, done = step.between_s / max(1, len(backward)), set[int]()
        for operator in reversed(range(len(backward))):
            items.append((WORK, seconds_to_ns(backward[operator] + share_s), -1))
            done.add(operator)
            items += [(CALL, 0, k) for k, bucket in enumerate(buckets) if operator in bucket and done >= set(bucket)]
        items += [(WAIT, 0, k) for k in range(len(buckets))]
        items.append((WORK, seconds_to_ns(step.after_s), -1))
        what, own_ns, ref = (np.array(column, np.int64) for column in zip(*items, strict=True))
        unknown, none = np.zeros(what.size, np.int64), np.zeros(len(buckets), np.int64)
        threads.append(Thread(rank, what, unknown, own_ns, ref, unknown, none, none))
    count = len(buckets)
    if not count:
        return max(int(thread.own_ns.sum()) for thread in threads) / NS_PER_S
    nothing = np.zeros(count, np.int64)
    step_of_all = DdpStep(
        tuple(threads), np.array(sizes, np.int64), nothing, np.zeros((count, len(threads)), np.bool_), 1,
        np.zeros(len(threads), np.int64), 0,
    )  # fmt: skip
    return makespan_ns(compiled(step_of_all, link)) / NS_PER_S


FORWARD_WEIGHT = 4.0
"""gamma: what an error of the forward counts beside one of the backward."""

BF16_EPS = 2.0**-7
"""Distance of neighbours in [1, 2)."""


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """What is known of a tensor, over the batches looked at."""

    numel: int
    """Numbers in it."""

    square_norm: float
    """Sum of squares; over batches, the mean."""

    largest: float
    """Largest absolute value; over batches, the mean."""

    def __post_init__(self) -> None:
        """Raise `InputError` on what no tensor of finite numbers has."""
        finite = math.isfinite(self.square_norm) and math.isfinite(self.largest)
        if self.numel < 1 or not finite or min(self.square_norm, self.largest) < 0:
            raise InputError(f"{self} is of no tensor with finite numbers. Measure batches whose loss is finite.")

    @classmethod
    def mean(cls, batches: Sequence[TensorStatistics]) -> TensorStatistics:
        """Return the mean over batches; raises `InputError` for none."""
        if not batches:
            raise InputError("no batch was looked at. Give statistics of at least one.")
        n = len(batches)
        return cls(
            round(sum(one_batch.numel for one_batch in batches) / n),
            sum(one_batch.square_norm for one_batch in batches) / n,
            sum(one_batch.largest for one_batch in batches) / n,
        )


@dataclass(frozen=True, slots=True)
class OperatorStatistics:
    """What is known of one operator."""

    input: TensorStatistics
    """v: what it multiplies."""

    weight: TensorStatistics
    """w: by what; of a product of two activations, the second one."""

    gradient: TensorStatistics
    """g: of its output."""

    depth: int
    """d: operators in front of it, itself included."""


def rounding_step(tensor: TensorStatistics, precision: str) -> float:
    """Return q, the distance of neighbours (module docstring); 0 for float32. Raises `UnknownNameError`."""
    rms = math.sqrt(tensor.square_norm / tensor.numel)
    steps = {
        "int8": tensor.largest / 127,
        "bf16": 2.0 ** math.floor(math.log2(rms)) * BF16_EPS if rms else 0.0,
        "float32": 0.0,
    }
    return pick(steps, precision, "precision")


def rounding_variance(tensor: TensorStatistics, precision: str) -> float:
    """Return the mean variance of one number, rounded at random: q^2 / 6."""
    return rounding_step(tensor, precision) ** 2 / 6


def omega_of(operator: OperatorStatistics, precision: str, model_depth: int) -> float:
    """Return the indicator of one operator in one precision (module docstring); 0 for float32."""
    if not 1 <= operator.depth <= model_depth:
        raise InputError(f"depth {operator.depth} is outside 1 to {model_depth}; number the operators from 1.")
    if pick(dict.fromkeys(PRECISIONS, precision), precision, "precision") == "float32":
        return 0.0
    v, w, g = operator.input, operator.weight, operator.gradient
    of_v = rounding_variance(v, precision) * v.numel
    forward = w.square_norm * of_v + v.square_norm * rounding_variance(w, precision) * w.numel
    backward = g.square_norm * of_v + v.square_norm * rounding_variance(g, "bf16") * g.numel
    return FORWARD_WEIGHT * (model_depth - operator.depth) * forward + operator.depth * backward


def omega_table(operators: Sequence[OperatorStatistics]) -> list[list[float]]:
    """Return [operators][precisions] the indicator, depths counted up to the deepest operator."""
    depth = max((operator.depth for operator in operators), default=1)
    return [[omega_of(operator, precision, depth) for precision in PRECISIONS] for operator in operators]


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
            operator_seconds(times[rank], picked[k * len(names) : (k + 1) * len(names)]) for k, rank in enumerate(ranks)
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
