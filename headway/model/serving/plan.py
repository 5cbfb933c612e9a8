"""The partition, bits, micro-batches and device order with which a model is served fastest: one program for each order.

With `theta` the plan has the least makespan + theta omega. Without it the
best uniform precision, with its own best partition, is looked for first: the
one of the least makespan + omega, all layers in 4 bits counting as a tenth of
the fastest one's makespan. Then come the fastest plan that loses no more than
that one, and of those no slower the one that loses least.

The programs of all orders and micro-batch sizes are solved in the order of
their lower bounds (all variables fractions), until no bound is below the best
plan by more than `gap`: `bound` is proven for all of them. An indicator of
more than `MOST_RUNS` different layers in a row is averaged over neighbours
there; then, in the partitions found, each layer's bits are chosen by itself,
and `bound` is that of divisible layers, each losing as its group's least one.

Source: *LLM-PQ* (arXiv 2403.01136), algorithm 1; HiGHS instead of Gurobi.

>>> from headway.cost.specs import shipped
>>> specs, model = shipped(), Transformer(12, 2048, 16, sequence=1024, vocabulary=50272)
>>> rows = [serving_row(specs, "T4", 1), serving_row(specs, "V100-SXM2-16GB", 1)]
>>> plan = serve_plan(model, rows, ServingLoad(512, 100, 8))
>>> [(stage.device, stage.first, stage.last) for stage in plan.stages]
[('V100-SXM2-16GB', 0, 11)]
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.tables import suggestion
from headway.core.units import NS_PER_S
from headway.cost.specs import Specs
from headway.cost.transformer import Transformer
from headway.model.serving.costs import (
    BITS,
    LayerSeconds,
    ServingLoad,
    ServingRow,
    half_peak,
    layer_bytes,
    layer_omega,
    roofline,
)
from headway.model.serving.program import LayerRuns, ServingProgram, Solved
from headway.model.serving.times import PipelineCosts, RoundTimes, pipelines

GAP = 1e-3
"""How far a plan may be above the proven bound, as a share of it."""

MOST_RUNS, FEW_RUNS = 16, 4
"""Runs of layers in a program, above which they are averaged, and up to which every order is searched again."""

USUAL_BITS, USUAL_SHARE = 4, 0.1
"""Without theta: all layers in so many bits lose as much as this share of the makespan is worth."""

BETWEEN_HOSTS = "ethernet-10g"
"""Link between rows that name none."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ServeStage:
    """Layers of one device."""

    device: str
    """Its name in the table of devices."""

    first: int
    """First layer."""

    last: int
    """Last layer, included."""

    bits: tuple[int, ...]
    """[layers] Bits of each."""


@dataclass(frozen=True, slots=True, eq=False)
class ServeChoice:
    """Layers and bits on the devices of one order: what a search returns."""

    costs: PipelineCosts
    """The order and the micro-batch sizes."""

    per_stage: tuple[int, ...]
    """[stages] Number of layers; 0 on a device that is left out."""

    columns: tuple[int, ...]
    """[layers] Bits of each layer, as a column of the costs."""

    @property
    def counts(self) -> Ints:
        """[stages, bits] How many layers each stage has in which bits."""
        stage = np.repeat(np.arange(len(self.per_stage)), self.per_stage)
        num_bits = self.costs.layer_bytes.size
        return np.bincount(stage * num_bits + self.columns, minlength=len(self.per_stage) * num_bits).reshape(
            -1, num_bits
        )

    @property
    def times(self) -> RoundTimes:
        """Its resources' times."""
        return self.costs.times(self.counts)

    @property
    def makespan_s(self) -> float:
        """Predicted time of the batch."""
        return self.times.makespan_ns / NS_PER_S

    @property
    def fits(self) -> bool:
        """Whether every device has room for its layers."""
        return bool((self.counts @ self.costs.layer_bytes <= self.costs.room_bytes * (1 + 1e-9)).all())

    def omega(self, table: Floats) -> float:
        """Return the indicator's sum, `table` [layers, bits]."""
        return float(table[np.arange(len(self.columns)), list(self.columns)].sum())

    @classmethod
    def of(cls, costs: PipelineCosts, layers: Ints, table: Floats) -> ServeChoice:
        """Return the choice of `layers` [runs, stages, bits]: of a run on a stage, what loses most gets most bits."""
        columns: list[int] = []
        for stage in layers.reshape(-1, layers.shape[2]):
            first = len(columns)
            lost = table[first : first + stage.sum(), 0]
            bits = np.empty(lost.size, np.int64)
            bits[np.argsort(-lost, kind="stable")] = np.repeat(np.arange(stage.size), stage)[::-1]
            columns += bits.tolist()
        return cls(costs, tuple(layers.sum((0, 2)).tolist()), tuple(columns))


@dataclass(frozen=True, slots=True)
class UniformPlan:
    """One precision for all layers, with its own best partition, order and micro-batch sizes."""

    bits: int
    """Bits of every layer."""

    tokens_per_s: float
    """Predicted."""

    omega: float
    """The indicator's sum."""


@dataclass(frozen=True, slots=True, eq=False)
class ServePlan:
    """A plan, and what it is compared with."""

    stages: tuple[ServeStage, ...]
    """In the order of the pipeline."""

    choice: ServeChoice
    """The same, with its costs."""

    tokens_per_s: float
    """B n / makespan."""

    omega: float
    """The indicator's sum over layers."""

    objective: float
    """makespan + theta omega."""

    bound: float
    """No plan has a smaller objective; without theta none that loses as little is faster."""

    solve_s: float
    """Seconds of CPU for all programs."""

    theta: float
    """Seconds that one of the indicator is worth."""

    uniform: UniformPlan | None
    """The best uniform precision; None where none fits."""

    uniforms: tuple[UniformPlan, ...]
    """Every uniform precision that fits."""


def serving_row(specs: Specs, name: str, count: int, link: str = BETWEEN_HOSTS) -> ServingRow:
    """Return `count` devices of a table on one host; raises `UnknownNameError` with the nearest names."""
    device = specs.device(name)
    return ServingRow(device, count, specs.link(device.link), specs.link(link))


def serve_plan(
    model: Transformer,
    cluster: Sequence[ServingRow],
    load: ServingLoad,
    *,
    bits: Sequence[int] = BITS,
    theta: float | None = None,
    gap: float = GAP,
    omega: Floats | None = None,
    seconds: LayerSeconds | None = None,
) -> ServePlan:
    """Return the best plan (module docstring).

    `omega` [layers, bits] replaces the indicator, columns as in `bits` ascending; `seconds` the roofline. Raises
    `InputError` on theta < 0, bits that are not offered, fewer layers than devices, and, with the missing MB of each
    device, where nothing fits.
    """
    begin = time.process_time()
    widths = _checked(model, cluster, bits, theta, gap)
    for row in cluster if seconds is None else ():
        half_peak(row.device)
    table = layer_omega(model, widths) if omega is None else _omega(omega, model.layers, widths)
    runs = LayerRuns.of(table)
    every = list(pipelines(model, cluster, load, widths, roofline(model) if seconds is None else seconds))
    alone = _uniforms(every, table, gap)
    if not alone and not any(_fits_mixed(costs, runs) for costs in every):
        raise InputError(_missing(model, cluster, load, every, widths[0]))
    reference = _reference(alone, table, widths, theta)
    start = None if reference is None else reference[1]
    limit = math.inf if theta is not None or start is None else start.omega(table)
    goal = ServingGoal(table, theta or 0.0, omega_most=limit)
    best, bound = searched(every, runs, goal, gap, start)
    if runs.sizes.size > MOST_RUNS:  # what was averaged: the bits of each layer, in the partitions found so far
        for partition in (best, *([start] if start else [])):
            best = _rebitted(partition, goal, gap, best)
        bound = _relaxed(every, goal)
    if theta is None:
        limit_s = best.makespan_s
        orders = every if runs.sizes.size <= FEW_RUNS else [best.costs]
        goal = ServingGoal(table, None, omega_most=best.omega(table), time_most=limit_s * (1 - 1e-7))
        best, _ = searched(orders, runs, goal, gap, best)
        best = _rebitted(best, goal, gap, best) if runs.sizes.size > MOST_RUNS else best
    makespan_s = best.makespan_s
    tokens = load.batch * load.new
    compared = [
        UniformPlan(widths[column], tokens / choice.makespan_s, choice.omega(table)) for column, choice, _ in alone
    ]
    chosen = None if reference is None else compared[alone.index(reference)]
    objective = makespan_s + (theta or 0.0) * best.omega(table)
    return ServePlan(
        stages_of(best, cluster, widths), best, tokens / makespan_s, best.omega(table), objective,
        min(bound, objective), time.process_time() - begin, theta or 0.0, chosen, tuple(compared),
    )  # fmt: skip


def stages_of(choice: ServeChoice, cluster: Sequence[ServingRow], widths: Sequence[int]) -> tuple[ServeStage, ...]:
    """Return the stages that have layers."""
    stages, first = [], 0
    for row, count in zip(choice.costs.rows, choice.per_stage, strict=True):
        if count:
            bits = tuple(widths[column] for column in choice.columns[first : first + count])
            stages.append(ServeStage(cluster[row].device.name, first, first + count - 1, bits))
        first += count
    return tuple(stages)


def _checked(
    model: Transformer, cluster: Sequence[ServingRow], bits: Sequence[int], theta: float | None, gap: float
) -> tuple[int, ...]:
    """Return the bits in ascending order. Raises `InputError`."""
    for width in bits:
        if width not in BITS:
            raise InputError(f"bits {width} are not offered. {suggestion(map(str, BITS), str(width))}")
    if not bits or not cluster:
        raise InputError("no bits or no devices are given; give at least one of each.")
    if theta is not None and not (theta >= 0 and math.isfinite(theta)):
        raise InputError(f"theta is {theta}; give a finite number >= 0: seconds that one of the indicator is worth.")
    if not 0 <= gap < 1:
        raise InputError(f"gap is {gap}; give a number from 0 to below 1, such as 1e-3.")
    devices = sum(row.count for row in cluster)
    if model.layers < devices:
        raise InputError(
            f"the model has {model.layers} layers for {devices} devices, and each needs one. Remove "
            f"{devices - model.layers} of the devices."
        )
    return tuple(sorted(set(bits)))


def _omega(omega: Floats, layers: int, widths: Sequence[int]) -> Floats:
    """Return the given indicator; raises `InputError` on a wrong shape or value."""
    table = np.asarray(omega, np.float64)
    if table.shape != (layers, len(widths)):
        raise InputError(
            f"the indicator has shape {list(table.shape)}; give [{layers}, {len(widths)}]: a row per layer, a column "
            f"for each of {', '.join(map(str, widths))} bits."
        )
    if not (np.isfinite(table) & (table >= 0)).all():
        layer = int(np.argwhere(~(np.isfinite(table) & (table >= 0)))[0][0])
        raise InputError(f"the indicator of layer {layer} is {table[layer].tolist()}; give finite numbers >= 0.")
    return table


Uniform = tuple[int, ServeChoice, float]
"""Column of the bits, the choice, its makespan in seconds."""


def _uniforms(every: Sequence[PipelineCosts], table: Floats, gap: float) -> list[Uniform]:
    """Return each precision that fits, with its own best partition."""
    plans = []
    # All layers in one precision are alike: one run, whatever each of them loses.
    run, lossless = LayerRuns(np.array([len(table)]), np.zeros((1, 1))), np.zeros((len(table), 1))
    for column in range(table.shape[1]):
        single = [_one_column(costs, column) for costs in every]
        try:
            choice, _ = searched(single, run, ServingGoal(lossless, 0.0), gap)
        except InputError:
            continue
        costs = every[next(i for i, costs in enumerate(single) if costs is choice.costs)]
        plans.append((column, ServeChoice(costs, choice.per_stage, (column,) * len(table)), choice.makespan_s))
    return plans


def _reference(alone: Sequence[Uniform], table: Floats, widths: Sequence[int], theta: float | None) -> Uniform | None:
    """Return the best uniform precision (module docstring); None where none fits."""
    if theta is None and alone:
        column = next((i for i, width in enumerate(widths) if width >= USUAL_BITS), len(widths) - 1)
        lost = float(table[:, column].sum())
        theta = USUAL_SHARE * min(plan[2] for plan in alone) / lost if lost else 0.0
    return min(alone, default=None, key=lambda plan: plan[2] + (theta or 0.0) * plan[1].omega(table))


def _one_column(costs: PipelineCosts, column: int) -> PipelineCosts:
    """Return the costs with one precision."""
    only = slice(column, column + 1)
    return PipelineCosts(
        costs.rows, costs.optional, costs.prefill_microbatch, costs.decode_microbatch, costs.num_microbatches,
        costs.rounds, costs.prefill_ns[:, only], costs.decode_ns[:, only], costs.head_ns, costs.link_ns,
        costs.layer_bytes[only], costs.room_bytes,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class ServingGoal:
    """What is smallest, and what bounds it."""

    table: Floats
    """[layers, bits] Indicator."""

    theta: float | None
    """Of makespan + theta omega; None: omega alone is smallest."""

    omega_most: float = math.inf
    """Largest indicator's sum."""

    time_most: float = math.inf
    """Largest makespan, in seconds."""

    def value(self, choice: ServeChoice) -> float:
        """Return what is smallest."""
        lost = choice.omega(self.table)
        return lost if self.theta is None else choice.makespan_s + self.theta * lost

    def allows(self, choice: ServeChoice) -> bool:
        """Say whether a choice fits and keeps the bounds, counted exactly: the solver's rows have a tolerance."""
        within = choice.omega(self.table) <= self.omega_most * (1 + 1e-12)
        return within and choice.fits and choice.makespan_s <= self.time_most


def searched(
    every: Sequence[PipelineCosts], runs: LayerRuns, goal: ServingGoal, gap: float, start: ServeChoice | None = None
) -> tuple[ServeChoice, float]:
    """Return the best choice of all orders and the proven bound; raises `InputError` where none fits.

    `start` is a choice to begin with: nothing above it by more than `gap` is looked at.
    """
    table = goal.table
    if runs.sizes.size > MOST_RUNS:
        runs = _grouped(table, np.mean)

    def solved_by(costs: PipelineCosts, value_most: float = math.inf, relaxed: bool = False) -> Solved:
        return ServingProgram(costs, runs).solved(
            theta=goal.theta or 0.0, timed=goal.theta is not None, omega_most=goal.omega_most,
            time_most=goal.time_most, value_most=value_most, relaxed=relaxed, gap=gap / 2,
        )  # fmt: skip

    lower = [solved_by(costs, relaxed=True) for costs in every]
    ranked = sorted((solved[1].bound, i) for i, solved in enumerate(lower) if solved is not None)
    best, value = start, math.inf if start is None else goal.value(start)
    proven = value
    for bound, index in ranked:
        cut = value * (1 - gap / 2)
        if bound >= value * (1 - gap):
            proven = min(proven, bound)
            break
        solved = solved_by(every[index], cut)
        proven = min(proven, cut if solved is None else max(bound, solved[1].bound))
        if solved is not None and math.isfinite(solved[1].value):
            choice = ServeChoice.of(every[index], solved[0], table)
            if goal.value(choice) < value and goal.allows(choice):
                best, value = choice, goal.value(choice)
    if best is None:
        raise InputError("nothing fits the devices. Add a device, or offer fewer bits.")
    return best, min(proven, value)


def _grouped(table: Floats, function: Callable[..., Floats]) -> LayerRuns:
    """Return `MOST_RUNS` runs of neighbours, each with `function` of its layers' indicators over axis 0."""
    group = np.arange(len(table)) * MOST_RUNS // len(table)
    return LayerRuns(np.bincount(group), np.stack([function(table[group == g], axis=0) for g in range(MOST_RUNS)]))


def _relaxed(every: Sequence[PipelineCosts], goal: ServingGoal) -> float:
    """Return a bound of all plans: layers lose what the one of their group does that loses least, and are divisible."""
    least_runs = _grouped(goal.table, np.min)
    solved = [
        ServingProgram(costs, least_runs).solved(theta=goal.theta or 0.0, omega_most=goal.omega_most, relaxed=True)
        for costs in every
    ]
    return min(optimum[1].bound for optimum in solved if optimum is not None)


def _rebitted(partition: ServeChoice, goal: ServingGoal, gap: float, best: ServeChoice) -> ServeChoice:
    """Return `best`, or what is better in the stages of `partition`: every layer's bits chosen anew, each by itself."""
    layers = LayerRuns(np.ones(len(goal.table), np.int64), goal.table)
    solved = ServingProgram(partition.costs, layers).solved(
        theta=goal.theta or 0.0, timed=goal.theta is not None, omega_most=goal.omega_most, time_most=goal.time_most,
        gap=gap / 2, stages=np.repeat(np.arange(len(partition.per_stage)), partition.per_stage),
    )  # fmt: skip
    if solved is None or not math.isfinite(solved[1].value):
        return best
    choice = ServeChoice.of(partition.costs, solved[0], goal.table)
    return choice if goal.allows(choice) and goal.value(choice) < goal.value(best) else best


def _fits_mixed(costs: PipelineCosts, runs: LayerRuns) -> bool:
    """Say whether some mixture of bits fits these devices."""
    return ServingProgram(costs, runs).solved(timed=False, gap=1.0 - 1e-9) is not None


def _missing(
    model: Transformer, cluster: Sequence[ServingRow], load: ServingLoad, every: Sequence[PipelineCosts], bits: int
) -> str:
    """Say how many MB each device lacks, at the least bits, with the layers shared out in proportion to the room.

    Of all orders the one that lacks least in total.
    """
    each_bytes = layer_bytes(model, load, bits)

    def lacking(costs: PipelineCosts) -> Floats:
        room = np.maximum(costs.room_bytes, 0.0)
        shares = room / room.sum() if room.sum() else np.full(room.size, 1 / room.size)
        return np.maximum(0.0, shares * model.layers * each_bytes - costs.room_bytes)

    fullest = max(len(costs.rows) for costs in every)
    nearest = min((costs for costs in every if len(costs.rows) == fullest), key=lambda costs: lacking(costs).sum())
    parts = [
        f"{cluster[row].device.name} (stage {stage}) lacks {math.ceil(missing / 1e6)} MB"
        for stage, (row, missing) in enumerate(zip(nearest.rows, lacking(nearest), strict=True))
    ]
    return (
        f"nothing fits: {model.layers} layers take {each_bytes / 1e6:,.0f} MB each at {bits} bits, of it "
        f"{(each_bytes - model.matrix_parameters * bits / 8) / 1e6:,.0f} MB beside the matrices; {', '.join(parts)}. "
        "Add a device, lower --batch or --new, or offer fewer bits."
    )
