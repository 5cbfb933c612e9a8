"""Choose how an input pipeline runs: order of its operators, cache, workers, what to offload and what to fuse.

The cost model and the passes are cedar's (VLDB 2025). A profile holds one
in-process run (seconds and bytes per operator and example) and, per operator
and variant, the throughput of the pipeline with only that operator moved
there. An operator costs in proportion to the bytes that reach it, so its
place decides its cost. Passes, in this order: cheapest legal order, cache,
local workers, then slices of neighbours that run together elsewhere. Costs
are seconds per example and core, sizes bytes per example.

>>> ops = (Op(2, "read", source=True), Op(1, "jitter"), Op(0, "crop"))
>>> profile = PipelineProfile(in_bytes={2: 0, 1: 400, 0: 400}, out_bytes={2: 400, 1: 400, 0: 100},
...                   seconds={2: 0.01, 1: 0.06, 0: 0.03}, examples_per_s=10)
>>> best = plan(ops, profile)
>>> best.order, round(best.baseline_s, 6), round(best.cost_s, 6)
((2, 0, 1), 0.1, 0.055)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from headway.core.errors import CycleError, InputError

SUBMIT_BYTES = 2_000_000
"""Bytes in and out that one submission to an offloaded slice should move (published)."""
MAX_SUBMIT = 500
"""Examples per submission at most (published)."""
SERIALISED_BYTES_PER_S = 1e8
"""What one process hands over to another per second (published)."""
LEAST_FRACTION = 0.05
"""A slice with less than this fraction of the pipeline's time stays where it is (published)."""
MAX_MOVABLE = 16
"""Operators that may move, at most: the search looks at every set of them."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operator of a pipeline, as its author declares it."""

    id: int
    name: str
    depends_on: tuple[int, ...] = ()
    """Ids of operators that must come earlier."""
    fixed: bool = False
    """Whether it keeps its position."""
    random: bool = False
    source: bool = False
    fusable: bool = True
    """Whether it may run in one slice with its neighbours elsewhere; conversions to tensors may not."""


@dataclass(frozen=True, slots=True)
class PipelineProfile:
    """What a run of the pipeline cost, per operator id and example."""

    in_bytes: Mapping[int, float]
    out_bytes: Mapping[int, float]
    seconds: Mapping[int, float]
    """Time in the operator; only the proportions count, the total is 1 / examples_per_s."""
    examples_per_s: float
    """Of the whole pipeline, in one process."""
    offloaded: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Variant -> operator -> examples/s of the pipeline with only that operator moved there."""
    read_s_per_byte: float = 0.0
    """Of the disk that a cache would be on."""

    @property
    def total_s(self) -> float:
        """Time in all operators of the profile, also in those that a plan does not look at."""
        return sum(self.seconds.values())

    def check(self, ops: Sequence[Op]) -> None:
        """Raise `InputError` naming the operator whose figures are missing or cannot be."""
        if not (math.isfinite(self.examples_per_s) and self.examples_per_s > 0):
            raise InputError(f"the throughput is {self.examples_per_s} examples/s; it must be above 0. Profile again.")
        for op in ops:
            for what, table in (
                ("input size", self.in_bytes), ("output size", self.out_bytes), ("latency", self.seconds)
            ):  # fmt: skip
                value = table.get(op.id)
                if value is None:
                    raise InputError(
                        f"the profile has no {what} of operator {op.id} ({op.name}). Profile it, or drop it."
                    )
                if not (math.isfinite(value) and value >= 0):
                    raise InputError(f"the {what} of operator {op.id} ({op.name}) is {value}; use a number >= 0.")
            if not op.source and self.in_bytes[op.id] == 0:
                raise InputError(
                    f"operator {op.id} ({op.name}) has an input of 0 bytes and is no source. Correct the profile, or "
                    "mark it `source = true`."
                )
        if not self.total_s:
            raise InputError("no operator of the profile takes any time. Profile more examples.")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a plan may use."""

    cores: int = 8
    """Of the host that trains (the published set-up has 8)."""
    slots: int = 32
    """Actors that run elsewhere, over all slices and local workers (published: 32); 0 = no other machines."""
    variant: str = "RAY"
    """Where slices may run. It must bring cores of its own: a pool of local processes shares those of the workers."""
    target_examples_per_s: float | None = None
    """What training consumes; None = as fast as it goes."""
    cache_bytes: int = 0
    """Free bytes for a cache on disk; 0 = none."""
    num_examples: int = 0
    """Examples of the dataset, which a cache must hold."""

    def __post_init__(self) -> None:
        """Raise `InputError` on sizes that cannot be."""
        for name, least in (("cores", 1), ("slots", 0), ("cache_bytes", 0), ("num_examples", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; it must be {least} or more.")
        if self.target_examples_per_s is not None and not self.target_examples_per_s > 0:
            raise InputError(f"the target is {self.target_examples_per_s} examples/s; it must be above 0, or None.")


@dataclass(frozen=True, slots=True)
class PipelineSlice:
    """Neighbouring operators that run together elsewhere."""

    ops: tuple[int, ...]
    variant: str
    cost_s: float
    """Seconds per example that stay, after offload and fusion."""
    submit_batch: int
    """Examples per submission."""
    actors: int
    """Actors per local worker."""


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """How a pipeline runs. `to_json` and `from_json` are inverse."""

    order: tuple[int, ...]
    cost_s: float
    """Of the order, per example and core, before cache, offload and fusion."""
    baseline_s: float
    """Of the order as written."""
    planned_s: float
    """With cache, offload and fusion."""
    num_orders: int
    """Legal orders that were compared."""
    cache_after: int | None = None
    """Operator whose output is cached."""
    cache_bytes: int = 0
    """What that cache holds."""
    workers: int = 1
    slices: tuple[PipelineSlice, ...] = ()
    reasons: tuple[str, ...] = ()
    """Why, in one line per decision."""

    def to_json(self) -> dict[str, object]:
        """Return what a JSON file holds."""
        return asdict(self)

    @classmethod
    def from_json(cls, text: str | Mapping[str, Any]) -> PipelinePlan:
        """Return the plan that `to_json` wrote (its mapping, or JSON text of it). Raises `InputError`."""
        try:
            row = dict(json.loads(text) if isinstance(text, str) else text)
            row["slices"] = tuple(
                PipelineSlice(**{**part, "ops": tuple(part["ops"])}) for part in row.get("slices", ())
            )
            return cls(**{**row, "order": tuple(row["order"]), "reasons": tuple(row.get("reasons", ()))})
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"this is no pipeline plan ({error!r}). Write one with `PipelinePlan.to_json()`."
            ) from error

    def explain(self) -> str:
        """Return the reasons, one per line."""
        return "\n".join(self.reasons)


def check_ops(ops: Sequence[Op]) -> None:
    """Raise `InputError` unless ids are unique, dependencies known, free of cycles, and the first is the one source."""
    by_id = {op.id: op for op in ops}
    for op in ops:
        if by_id[op.id] is not op:
            raise InputError(
                f"operators {by_id[op.id].name!r} and {op.name!r} both have the id {op.id}. Give each its own."
            )
        unknown = [other for other in op.depends_on if other not in by_id]
        if unknown:
            raise InputError(
                f"operator {op.id} ({op.name}) depends on {unknown[0]}, which is not there. Correct the id."
            )
    if not ops or [op.source for op in ops] != [True] + [False] * (len(ops) - 1):
        sources = [op.id for op in ops if op.source]
        raise InputError(f"the sources are {sources}; a pipeline begins with its one source. Mark the first operator.")
    movable = sum(not (op.fixed or op.source) for op in ops)
    if movable > MAX_MOVABLE:
        raise InputError(f"{movable} operators may move; the search takes {MAX_MOVABLE} at most. Fix some of them.")


def _next_ops(ops: Sequence[Op], placed: frozenset[int]) -> list[Op]:
    """Return what may stand behind the operators `placed`."""
    here = ops[len(placed)]
    choices = [here] if here.fixed or here.source else [op for op in ops if not (op.fixed or op.source)]
    return [op for op in choices if op.id not in placed and placed.issuperset(op.depends_on)]


def op_costs(profile: PipelineProfile, order: Sequence[int]) -> dict[int, float]:
    """Return operator -> seconds per example in `order`: its share of the profile, times the bytes that reach it."""
    costs, reaches = {}, profile.out_bytes[order[0]]
    for op in order:
        base = profile.seconds[op] / profile.total_s / profile.examples_per_s
        if op != order[0]:
            base *= reaches / profile.in_bytes[op]
            reaches *= profile.out_bytes[op] / profile.in_bytes[op]
        costs[op] = base
    return costs


def edge_bytes(profile: PipelineProfile, order: Sequence[int]) -> list[float]:
    """Return [len(order) + 1] bytes before each operator of `order`, and after the last."""
    sizes = [profile.in_bytes[order[0]], profile.out_bytes[order[0]]]
    for op in order[1:]:
        sizes.append(sizes[-1] * profile.out_bytes[op] / profile.in_bytes[op])
    return sizes


def cheapest_order(ops: Sequence[Op], profile: PipelineProfile) -> tuple[tuple[int, ...], int]:
    """Return the legal order of least cost, and how many orders are legal; as written wins ties.

    Exact: what reaches an operator depends on the set of those before it,
    not on their order, so the cheapest way to each set is enough (2^n sets).
    Raises `CycleError` when no order is legal.
    """
    written = tuple(op.id for op in ops)
    total = profile.total_s * profile.examples_per_s
    # Seconds per byte that reaches an operator; of the source, seconds.
    shares = {op: profile.seconds[op] / total / (profile.in_bytes[op] if op != written[0] else 1.0) for op in written}
    reached: dict[frozenset[int], tuple[float, tuple[int, ...], int]] = {frozenset(): (0.0, (), 1)}
    for _ in ops:
        longer: dict[frozenset[int], tuple[float, tuple[int, ...], int]] = {}
        for placed, (cost, order, count) in reached.items():
            before = edge_bytes(profile, order)[-1] if order else 1.0
            for op in _next_ops(ops, placed):
                more = cost + shares[op.id] * (1.0 if op.source else before)
                key = placed | {op.id}
                known = longer.get(key)
                better = known is None or more < known[0] * (1 - 1e-12)
                best = (more, (*order, op.id)) if better or known is None else known[:2]
                longer[key] = (*best, count + (known[2] if known else 0))
        reached = longer
    if not reached:
        raise CycleError(
            "no order is legal: dependencies go round in a circle, or against operators that are fixed. Drop one of: "
            + ", ".join(f"{op.id} after {', '.join(map(str, op.depends_on))}" for op in ops if op.depends_on)
        )
    _, order, count = reached[frozenset(written)]
    legal = all(set(op.depends_on) <= set(written[:place]) for place, op in enumerate(ops))
    tied = legal and sum(op_costs(profile, written).values()) <= sum(op_costs(profile, order).values()) * (1 + 1e-12)
    return (written if tied else order), count


def cache_place(
    ops: Sequence[Op], profile: PipelineProfile, order: Sequence[int], resources: Resources
) -> tuple[int | None, float]:
    """Return the operator whose cached output makes the pipeline cheapest (None: no cache does), and its cost.

    Nothing behind the first random operator is cached: it would be drawn once and for all.
    """
    costs, sizes = op_costs(profile, order), edge_bytes(profile, order)
    best: tuple[int | None, float] = None, sum(costs.values())
    by_id, done = {op.id: op for op in ops}, 0.0
    for place, op in enumerate(order):
        if by_id[op].random or not resources.num_examples:
            break
        done += costs[op]
        if resources.num_examples * sizes[place + 1] <= resources.cache_bytes:
            cached = sum(costs.values()) - done + sizes[place + 1] * profile.read_s_per_byte
            best = min(best, (op, cached), key=lambda found: found[1])
    return best


def local_workers(cost_s: float, out_bytes: float, resources: Resources, *, offloads: bool) -> int:
    """Return how many local processes run the pipeline: one when handing over its output would be the limit.

    >>> local_workers(0.001, 1_000_000, Resources(cores=8), offloads=True)
    1
    >>> local_workers(0.1, 1_000, Resources(cores=8, target_examples_per_s=20), offloads=True)
    3
    """
    rate = 1 / cost_s if cost_s > 0 else math.inf
    if rate > 100 and rate * out_bytes > SERIALISED_BYTES_PER_S * (0.95 if offloads else 0.8):
        return 1
    if resources.target_examples_per_s is None:
        return resources.cores
    return min(max(math.ceil(resources.target_examples_per_s / (rate * 0.8)), 1), resources.cores)


def offloaded_cost(profile: PipelineProfile, variant: str, op: int, cost_s: float) -> float:
    """Return what of an operator's cost stays when it is moved to `variant`: Amdahl's law, turned round.

    f is its fraction of the time and s the measured speed-up of the whole
    pipeline: 1/s = (1 - f) + f/x, and the operator costs 1/x of before.
    """
    fraction = profile.seconds[op] / profile.total_s
    speedup = profile.offloaded[variant][op] / profile.examples_per_s
    if not fraction or speedup <= 0:
        return 0.0 if not fraction else math.inf
    return cost_s * max(1 / speedup - (1 - fraction), 0.0) / fraction


def slices(
    ops: Sequence[Op], profile: PipelineProfile, order: Sequence[int], *, variant: str, after: int | None = None
) -> list[tuple[tuple[int, ...], float]]:
    """Return the slices of `order` to run elsewhere, each with the seconds that stay; those behind `after` only.

    Greedy, as published: of all contiguous slices the one that makes the
    pipeline cheapest, then the next that does not touch it, while it gains.
    """
    known = profile.offloaded.get(variant, {})
    by_id, costs = {op.id: op for op in ops}, op_costs(profile, order)
    sizes = edge_bytes(profile, order)
    away = {op: offloaded_cost(profile, variant, op, costs[op]) for op in order if op in known}
    begin = 0 if after is None else order.index(after) + 1
    can = [k >= begin and op in away and by_id[op].fusable for k, op in enumerate(order)]
    found = []
    for first, last in _benefiting(order, can, away, costs):
        inside = order[first:last]
        if sum(profile.seconds[op] for op in inside) / profile.total_s < LEAST_FRACTION:
            continue
        separate = sizes[first] + 2 * sum(sizes[first + 1 : last]) + sizes[last]
        together = sum(away[op] for op in inside) * (sizes[first] + sizes[last]) / separate
        gain = sum(costs[op] for op in inside) - together
        if gain > 0:
            found.append((gain, first, last, together))
    chosen: list[tuple[int, int, float]] = []
    for _, first, last, together in sorted(found, key=lambda one: -one[0]):
        if all(last <= begin or first >= end for begin, end, _ in chosen):
            chosen.append((first, last, together))
    return [(tuple(order[first:last]), together) for first, last, together in sorted(chosen)]


def _benefiting(
    order: Sequence[int], can: Sequence[bool], away: Mapping[int, float], costs: Mapping[int, float]
) -> Iterator[tuple[int, int]]:
    """Yield [first, last) of every slice inside a run of movable operators of which one gains alone."""
    first = 0
    while first < len(order):
        if not can[first]:
            first += 1
            continue
        end = first
        while end < len(order) and can[end]:
            end += 1
        if any(away[op] < costs[op] for op in order[first:end]):
            yield from ((a, b) for a in range(first, end) for b in range(a + 1, end + 1))
        first = end


def plan(ops: Sequence[Op], profile: PipelineProfile, resources: Resources | None = None) -> PipelinePlan:
    """Return the plan of least cost for `resources`. Raises `InputError` on a pipeline or profile that cannot be."""
    resources = resources or Resources()
    check_ops(ops)
    profile.check(ops)
    written = tuple(op.id for op in ops)
    order, num_orders = cheapest_order(ops, profile)
    costs, sizes = op_costs(profile, order), edge_bytes(profile, order)
    cost, baseline = sum(costs.values()), sum(op_costs(profile, written).values())
    cache, planned = cache_place(ops, profile, order, resources)
    offloads = bool(resources.slots and profile.offloaded.get(resources.variant))
    workers = local_workers(planned, sizes[-1], resources, offloads=offloads)
    moved = slices(ops, profile, order, variant=resources.variant, after=cache) if offloads else []
    parts = []
    for ids, stays in moved:
        first = order.index(ids[0])
        both = sizes[first] + sizes[first + len(ids)]
        submit = int(min(max(SUBMIT_BYTES // both, 1), MAX_SUBMIT)) if both else MAX_SUBMIT
        actors = math.ceil(resources.slots / (len(moved) * workers))
        parts.append(PipelineSlice(ids, resources.variant, stays, submit, actors))
        planned += stays - sum(costs[op] for op in ids)
    held = 0 if cache is None else math.ceil(resources.num_examples * sizes[order.index(cache) + 1])
    best = PipelinePlan(order, cost, baseline, planned, num_orders, cache, held, workers, tuple(parts))
    return replace(best, reasons=tuple(_reasons(best, ops, profile, resources)))


def _reasons(best: PipelinePlan, ops: Sequence[Op], profile: PipelineProfile, resources: Resources) -> Iterator[str]:
    """Yield one line per decision."""
    names = {op.id: op.name for op in ops}
    written = tuple(op.id for op in ops)
    before, after = op_costs(profile, written), op_costs(profile, best.order)
    yield (
        f"order: {' > '.join(names[op] for op in best.order)}: {1000 * best.cost_s:.4g} ms instead of "
        f"{1000 * best.baseline_s:.4g} ms per example and core, the least of {best.num_orders} legal orders"
    )
    for op in sorted(written, key=lambda op: after[op] - before[op]):
        if abs(after[op] - before[op]) > 0.01 * best.baseline_s:
            change = f"{1000 * before[op]:.4g} -> {1000 * after[op]:.4g} ms"
            yield f"  {names[op]}: {change}: {after[op] / before[op]:.3g} times the bytes reach it"
    if best.cache_after is None:
        why = (
            "not asked for"
            if not resources.num_examples
            else "no place before the first random operator gains and fits"
        )
        yield f"cache: none, {why}"
    else:
        yield f"cache: after {names[best.cache_after]}: nothing before it runs again after the first epoch"
    rate = 1 / best.cost_s
    size = edge_bytes(profile, best.order)[-1]
    limit = (
        "handing over its output would be the limit" if best.workers == 1 < resources.cores else "enough for the target"
    )
    limit = "all cores" if best.workers == resources.cores else limit
    yield f"workers: {best.workers} ({limit}: {rate:.4g} examples/s of {size:.4g} bytes per worker)"
    for part in best.slices:
        cost = 1000 * sum(after[op] for op in part.ops)
        yield (
            f"{part.variant}: {' + '.join(names[op] for op in part.ops)} together: {cost:.4g} -> "
            f"{1000 * part.cost_s:.4g} ms; {part.submit_batch} examples per submission, {part.actors} actors per worker"
        )
    if not best.slices:
        why = "no slice gains" if profile.offloaded.get(resources.variant) else f"none profiled on {resources.variant}"
        yield f"offload: none, {why if resources.slots else 'there are no other machines'}"
