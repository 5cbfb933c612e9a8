"""Stages that form a graph: a partition of a model with branches, by GraphPipe's search.

Source: *GraphPipe: Improving Performance and Scalability of DNN Training with
Graph Pipeline Parallelism* (ASPLOS 2025). Branches that do not need each other
are different stages side by side, so that the pipeline is as deep as its longest
path: a step of m microbatches takes about (m + D - 1) T instead of (m + p - 1) T.

    bisection on T, the time of the slowest stage per microbatch; for one T
      the series-parallel tree is walked from the loss to the inputs:
        layer      joins the stage behind it while that takes T at most, else begins one
        series     its parts in turn
        branches   each on its own; the stage behind them takes in small ones whole and the end of one;
                   then their first stages share devices as far as T allows (first fit, longest first)
      partial plans are dropped where another needs fewer devices, is less deep and has more room

Memory of a stage: 4 x weights (with gradients and two moments of Adam) + in
flight x outputs, in flight by the rule of `StageGraph.in_flight`. The plans for
T and some larger T are simulated, and so is the plan of the same search on the
layers as a chain; the shortest step is the answer. Several devices may
run one stage (`replicate`): each takes a share of every microbatch, and they
sum their gradients once per step, 2 (r - 1) / r x weights per link.

>>> four = ((1e-3,) * 4, (2e-3,) * 4, (0.0,) * 4, (0.0,) * 4)
>>> diamond = LayerGraph(tuple("abcd"), *four, edges=((0, 1), (0, 2), (1, 3), (2, 3)))
>>> plan = plan_graph(diamond, GraphCluster(4), num_microbatches=4)
>>> plan.objective_s, plan.chain_objective_s, [stage.preds for stage in plan.stages]
(0.018, 0.021, [(), (0,), (0,), (1, 2)])
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from headway.core.errors import InputError
from headway.core.search import pareto, threshold
from headway.parallel.planning.layers import LayerGraph, Parallel, Series, Tree, decompose, layers_of
from headway.sim.pipeline.actions import StageGraph
from headway.sim.pipeline.lower import lower
from headway.sim.pipeline.orders import PipelineShape
from headway.sim.pipeline.simulate import costs_of, graph_1f1b, simulate

STATE_COPIES = 4
"""What a weight takes, in copies of itself: gradient and two moments of Adam beside it."""

TOLERANCE = 2e-3
"""The bisection ends this near to the least T, as a share of it."""

LOOSER = (1.0, 1.1, 1.25, 1.5, 2.0)
"""Shares of the least T whose plans are simulated: a larger T can have a less deep plan."""

MOST_PARTIAL = 8
"""Partial plans that are followed at once."""


@dataclass(frozen=True, slots=True)
class GraphCluster:
    """Devices that are all connected alike."""

    num_devices: int
    """N."""

    bytes_per_s: float = math.inf
    """Rate of a link."""

    memory_bytes: float = math.inf
    """Memory of a device."""

    overhead_s: float = 0.0
    """What one forward or backward of a stage takes beside its layers, for example to launch kernels."""

    replicate: bool = False
    """Whether several devices may run one stage: 2, 4, 8, ..."""

    def __post_init__(self) -> None:
        """Raise `InputError` on values out of range, and on replicas whose links are not known."""
        if self.num_devices < 1 or not self.overhead_s >= 0:
            raise InputError(f"{self.num_devices} devices, {self.overhead_s} s; give at least 1, and a time >= 0.")
        if not (self.bytes_per_s > 0 and self.memory_bytes > 0):
            raise InputError(f"{self.bytes_per_s} bytes/s, {self.memory_bytes} bytes of memory; give more than 0.")
        if self.replicate and math.isinf(self.bytes_per_s):
            raise InputError("replicas of a stage sum their gradients, and the link's rate is not known. Give it.")


@dataclass(frozen=True, slots=True)
class GraphStage:
    """A stage of a plan."""

    layers: tuple[str, ...]
    """Names of its layers, each behind those it needs."""

    devices: int
    """Devices that share it."""

    microbatch: int
    """Size of its microbatch, in microbatches of the profile."""

    preds: tuple[int, ...]
    """Numbers of the stages that feed it."""


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """Which stages, and what a step takes."""

    stages: tuple[GraphStage, ...]
    """In an order in which each is behind those that feed it."""

    objective_s: float
    """Simulated seconds of a step, under `graph_1f1b`."""

    chain_objective_s: float | None
    """The same of the best chain of stages; None where no chain fits the memory."""

    merged: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    """Pairs (layers, layers that the search put behind them): what the graph lacks to be series-parallel."""


class _Stage(NamedTuple):
    """A stage while it is made."""

    layers: tuple[int, ...]
    forward_s: float
    backward_s: float
    weight_bytes: float
    output_bytes: float
    replicas: int
    depth: int
    """Stages on the longest path from it to the loss."""


class _Partial(NamedTuple):
    """Stages of the layers seen so far. The layer before them may join `open`, and feeds it and what is `below`."""

    devices: int
    below: int
    """Depth of the deepest other stage that the layer before feeds; 0 = none."""
    open: _Stage | None
    closed: tuple  # type: ignore[type-arg]  # nested pairs of stages, flattened at the end

    @property
    def depth(self) -> int:
        return max(self.below, self.open.depth if self.open else 0)


@dataclass(frozen=True, slots=True, eq=False)
class _StageSearch:
    """The search for one size of microbatch and, in `partials`, one T."""

    graph: LayerGraph
    cluster: GraphCluster
    num_microbatches: int
    limit_s: float = math.inf
    apart: bool = False
    """Whether every branch has devices of its own: shorter steps where there are devices to spare."""
    memo: dict[tuple[int, int], list[_Partial]] = field(default_factory=dict)
    distinct: dict[int, list[int]] = field(default_factory=dict)

    @property
    def overhead_s(self) -> float:
        """Return what forward and backward of a stage take beside its layers."""
        return 2 * self.cluster.overhead_s

    def seconds(self, stage: _Stage) -> float:
        """Return the time of a stage per microbatch, its share of the sum of gradients included."""
        return sum(self.times(stage)) if stage.replicas > 1 else self.overhead_s + stage.forward_s + stage.backward_s

    def times(self, stage: _Stage) -> tuple[float, float]:
        """Return seconds of forward and backward per microbatch."""
        r, overhead = stage.replicas, self.cluster.overhead_s
        sync = 2 * (r - 1) / r * stage.weight_bytes / self.cluster.bytes_per_s / self.num_microbatches if r > 1 else 0.0
        return stage.forward_s / r + overhead, stage.backward_s / r + overhead + sync

    def fits(self, stage: _Stage) -> bool:
        """Say whether a stage takes T at most and fits the memory."""
        in_flight = min(stage.depth, self.num_microbatches)
        memory = STATE_COPIES * stage.weight_bytes + in_flight * stage.output_bytes / stage.replicas
        return self.seconds(stage) <= self.limit_s and memory <= self.cluster.memory_bytes

    def partials(self, tree: Tree, behind: Iterable[_Partial]) -> list[_Partial]:
        """Return the partial plans with a part of the tree before those behind it."""
        plans = list(behind)
        if isinstance(tree, Series):
            for branch in reversed(tree.parts):
                plans = self.partials(branch, plans)
            return plans
        if isinstance(tree, int):
            return self._best([new for plan in plans for new in self._layer(tree, plan)])
        return self._best([new for plan in plans for new in self._branches(tree, plan)])

    def _layer(self, layer: int, plan: _Partial) -> Iterator[_Partial]:
        """Add a layer to the open stage where it fits: a stage that ends earlier than it must never helps."""
        graph = self.graph
        alone = _Stage(
            (layer,), graph.forward_s[layer], graph.backward_s[layer], graph.parameter_bytes[layer],
            graph.output_bytes[layer], replicas=1, depth=plan.depth + 1,
        )  # fmt: skip
        if plan.open is not None:
            joined = _together(alone, plan.open, max(plan.open.depth, plan.below + 1))
            if self.fits(joined):
                yield _Partial(plan.devices, 0, joined, plan.closed)
                return
        replicas, spare = 1, self.cluster.num_devices - plan.devices
        while replicas <= (spare if self.cluster.replicate else min(spare, 1)):
            stage = alone._replace(replicas=replicas)
            if self.fits(stage):
                yield _Partial(plan.devices + replicas, 0, stage, (plan.closed, plan.open))
            replicas *= 2

    def _branches(self, tree: Parallel, plan: _Partial) -> Iterator[_Partial]:
        """Add branches: the stage behind them takes in none, those that fit whole, or the end of one of them."""
        behind = plan.open
        yield from self._beside(tree.parts, _Partial(plan.devices, 0, None, (plan.closed, behind)), plan.depth)
        if behind is None or self.apart:
            return
        inside, apart = plan, []
        for branch in sorted(tree.parts, key=lambda branch: sum(map(self._layer_s, layers_of(branch)))):
            new = next((new for new in self.partials(branch, [inside]) if new.devices == plan.devices), None)
            apart += [] if new else [branch]
            inside = new or inside
        if inside.open is not None and not apart:
            yield inside
        elif inside.open is not None and inside is not plan:
            # What is apart leads to that stage, so nothing before may join it any more.
            inner = _Partial(inside.devices, 0, None, (inside.closed, inside.open))
            yield from self._beside(apart, inner, max(inside.open.depth, plan.below))
        for k in self.different(tree):
            for new in self.partials(tree.parts[k], [plan]):
                if new.devices > plan.devices:
                    apart = [*tree.parts[:k], *tree.parts[k + 1 :]]
                    yield from self._beside(apart, new, max(behind.depth, plan.below + 1))

    def different(self, tree: Parallel) -> list[int]:
        """Return the branches that differ in their costs: of equal ones the first."""
        if id(tree) not in self.distinct:
            self.distinct[id(tree)] = list(
                {self._signature(branch): k for k, branch in reversed([*enumerate(tree.parts)])}.values()
            )
        return self.distinct[id(tree)]

    def _signature(self, tree: Tree) -> tuple[object, ...]:
        graph = self.graph
        if isinstance(tree, int):
            columns = graph.forward_s, graph.backward_s, graph.parameter_bytes, graph.output_bytes
            return tuple(column[tree] for column in columns)
        return (type(tree), *map(self._signature, tree.parts))

    def _beside(self, branches: Iterable[Tree], plan: _Partial, depth: int) -> Iterator[_Partial]:
        """Add branches that each begin with a stage of their own before stages of this depth; `plan` has the others."""
        # (devices, first stages of branches, depth of first stages that are closed, the closed ones)
        rows = [(plan.devices, (plan.open,) if plan.open else (), plan.below, plan.closed)]
        for branch in branches:
            key = id(branch), depth
            if key not in self.memo:
                self.memo[key] = self.partials(branch, [_Partial(0, depth, None, ())])
            rows = [
                (devices + new.devices, (*heads, new.open), max(below, new.below), (closed, new.closed))
                for devices, heads, below, closed in rows
                for new in self.memo[key]
                if new.open and devices + new.devices <= self.cluster.num_devices + len(heads)
            ]
            rows = sorted(rows, key=lambda row: (row[0], row[2], max(head.depth for head in row[1])))[:MOST_PARTIAL]
        for devices, heads, below, closed in rows:
            shared = list(heads) if self.apart else self._shared(heads)
            roomy = max(range(len(shared)), key=lambda k: self._room(shared[k]))
            others = shared[:roomy] + shared[roomy + 1 :]
            devices -= sum(head.replicas for head in heads) - sum(stage.replicas for stage in shared)
            if devices <= self.cluster.num_devices:
                below = max([below, *(stage.depth for stage in others)])
                yield _Partial(devices, below, shared[roomy], (closed, *others))

    def _shared(self, heads: Iterable[_Stage]) -> list[_Stage]:
        """Put the first stages of branches together as far as they fit: first fit, the longest first."""
        stages: list[_Stage] = []
        for head in sorted(heads, key=self.seconds, reverse=True):
            for k, stage in enumerate(stages):
                both = _together(stage, head, max(stage.depth, head.depth))
                if stage.replicas == head.replicas == 1 and self.fits(both):
                    stages[k] = both
                    break
            else:
                stages.append(head)
        return stages

    def _best(self, plans: list[_Partial]) -> list[_Partial]:
        """Return the plans that no other beats in devices, depth and room; of many, a few evenly."""
        if len(plans) > 1:
            points = {(plan.devices, plan.depth, -self._room(plan.open)): plan for plan in reversed(plans)}
            plans = list(points.values())
            plans = sorted((plans[k] for k in pareto(list(points))), key=lambda plan: plan.devices)
        if len(plans) > MOST_PARTIAL:
            plans = [plans[k * (len(plans) - 1) // (MOST_PARTIAL - 1)] for k in range(MOST_PARTIAL)]
        return plans

    def _room(self, stage: _Stage | None) -> float:
        """Return the seconds of layers that may still join a stage."""
        return (self.limit_s - self.seconds(stage)) * stage.replicas if stage else 0.0

    def _layer_s(self, layer: int) -> float:
        return self.graph.forward_s[layer] + self.graph.backward_s[layer]

    def at(self, limit_s: float, tree: Tree) -> list[_Stage] | None:
        """Return the stages of the least deep plan under T; None where none fits the devices."""
        plans = replace(self, limit_s=limit_s, memo={}).partials(tree, [_Partial(0, 0, None, ())])
        best = min(plans, key=lambda plan: (plan.depth, plan.devices), default=None)
        return None if best is None else list(_flat((best.closed, best.open)))

    def plans(self, tree: Tree) -> Iterator[list[_Stage]]:
        """Yield the plans of the least T and of some larger ones; none where none fits the memory."""
        times = [self._layer_s(layer) for layer in layers_of(tree)]
        overhead_s, share = self.overhead_s, sum(times) / self.cluster.num_devices
        low = overhead_s + (share if self.cluster.replicate else max(share, *times))
        # Filled one after the other, stages of a chain that may take a share and one layer more are few enough.
        bounds = [low * (1 + 1e-9), overhead_s + (share + max(times)) * (1 + 1e-9)]
        bounds.append(max(bounds[1], overhead_s + sum(times) * (1 + 1e-9)))
        shortest_s = None
        for low, high in itertools.pairwise(bounds):
            if shortest_s is None:
                shortest_s = threshold(
                    lambda limit_s: self.at(limit_s, tree) is not None, low, high, tolerance=low * TOLERANCE + 1e-15
                )
        keys = set()
        for share, apart in itertools.product(LOOSER if shortest_s is not None else (), (False, True)):
            plan = replace(self, apart=apart).at((shortest_s or 0.0) * share, tree)
            key = frozenset((stage.layers, stage.replicas) for stage in plan or ())
            if plan is not None and key not in keys:
                keys.add(key)
                yield plan


def plan_graph(graph: LayerGraph, cluster: GraphCluster, num_microbatches: int | None = None) -> GraphPlan:
    """Return the partition with the shortest simulated step of so many microbatches, one per device if not given.

    The costs of the graph are those of one microbatch. A microbatch is 2, 4, 8, .. of them where that wins: the
    overhead of a stage is paid less often, the pipeline takes longer to fill. Raises `InputError` for layers without
    a common last one, and where no partition fits.
    """
    m, n = cluster.num_devices if num_microbatches is None else num_microbatches, len(graph.names)
    if m < 1:
        raise InputError(f"a step has {m} microbatches; give at least 1.")
    last = sorted(set(range(n)) - {source for source, _ in graph.edges})
    if len(last) > 1:
        names = ", ".join(graph.names[layer] for layer in last)
        raise InputError(f"layers {names} are all last; the loss needs one. Join them in one more layer.")
    decomposition = decompose(graph)
    chain = Series(layers_of(decomposition.tree))
    plans: dict[bool, list[tuple[float, int, list[_Stage], StageGraph, int]]] = {True: [], False: []}
    size = 1
    while m % size == 0 and (size == 1 or cluster.overhead_s):
        scaled = replace(
            graph,
            forward_s=tuple(size * s for s in graph.forward_s), backward_s=tuple(size * s for s in graph.backward_s),
            output_bytes=tuple(size * b for b in graph.output_bytes),
        )  # fmt: skip
        clusters = {cluster, replace(cluster, replicate=False)}
        searches = [_StageSearch(scaled, variant, m // size) for variant in clusters]
        for search, (is_chain, tree) in itertools.product(searches, ((True, chain), (False, decomposition.tree))):
            for stages in search.plans(tree):
                ordered, preds = _in_order(graph, chain.parts, stages, is_chain)
                step_s = _step_s(search, ordered, preds)
                plans[is_chain].append((step_s, sum(stage.replicas for stage in ordered), ordered, preds, size))
        size *= 2
    if not plans[True] and not plans[False]:
        raise InputError(
            f"no partition over {cluster.num_devices} devices fits {cluster.memory_bytes:g} bytes of memory. "
            "Give more devices, or smaller microbatches."
        )
    chain_s = min((plan[0] for plan in plans[True]), default=None)
    # Of equal plans the one on fewer devices; a graph before a chain.
    best_s, _, best, preds, size = min([*plans[False], *plans[True]], key=lambda plan: plan[:2])
    return GraphPlan(
        tuple(
            GraphStage(tuple(graph.names[layer] for layer in stage.layers), stage.replicas, size, sources)
            for stage, sources in zip(best, preds.preds, strict=True)
        ),
        best_s,
        chain_s,
        tuple((_names(graph, before), _names(graph, behind)) for before, behind in decomposition.merged),
    )


def _names(graph: LayerGraph, layers: Iterable[int]) -> tuple[str, ...]:
    return tuple(graph.names[layer] for layer in layers)


def _together(first: _Stage, second: _Stage, depth: int) -> _Stage:
    """Return two stages as one, on the replicas of the second."""
    return _Stage(
        first.layers + second.layers, first.forward_s + second.forward_s, first.backward_s + second.backward_s,
        first.weight_bytes + second.weight_bytes, first.output_bytes + second.output_bytes, second.replicas, depth,
    )  # fmt: skip


def _flat(closed: object) -> Iterator[_Stage]:
    """Yield the stages in nested tuples."""
    waiting = [closed]
    while waiting:
        stage = waiting.pop()
        if isinstance(stage, _Stage):
            yield stage
        elif isinstance(stage, tuple):
            waiting += stage


def _in_order(
    graph: LayerGraph, layers: Iterable[Tree], stages: list[_Stage], is_chain: bool
) -> tuple[list[_Stage], StageGraph]:
    """Return the stages, each behind those that feed it, and which feed which: all of a chain the next one."""
    rank = {layer: k for k, layer in enumerate(layers)}
    stages = [stage._replace(layers=tuple(sorted(stage.layers, key=rank.__getitem__))) for stage in stages]
    if is_chain:
        return sorted(stages, key=lambda stage: -stage.depth), StageGraph.chain(len(stages))
    of = {layer: k for k, stage in enumerate(stages) for layer in stage.layers}
    fed: list[set[int]] = [set() for _ in stages]
    for source, target in graph.edges:
        fed[of[target]] |= {of[source]} - {of[target]}
    depths = StageGraph(tuple(map(tuple, fed))).in_flight()
    order = sorted(range(len(stages)), key=lambda k: (-depths[k], rank[stages[k].layers[0]]))
    numbers = {k: number for number, k in enumerate(order)}
    preds = tuple(tuple(sorted(numbers[source] for source in fed[k])) for k in order)
    return [stages[k] for k in order], StageGraph(preds)


def _step_s(search: _StageSearch, stages: list[_Stage], graph: StageGraph) -> float:
    """Return the simulated seconds of a step: messages carry what layers of the one stage make for the other."""
    times = np.array([search.times(stage) for stage in stages]).T
    forward, backward = np.rint(times * 1e9).astype(np.int64).tolist()
    of = {layer: k for k, stage in enumerate(stages) for layer in stage.layers}
    sent = np.zeros((len(stages), len(stages)))
    chain = graph == StageGraph.chain(len(stages))
    for layer in of:
        takers = {of[target] for source, target in search.graph.edges if source == layer} - {of[layer]}
        # In a chain a value passes through every stage up to the last that takes it.
        for taker in range(of[layer] + 1, max(takers) + 1) if chain and takers else takers:
            sent[taker - 1 if chain else of[layer], taker] += search.graph.output_bytes[layer]
    between = np.rint((sent + sent.T) / search.cluster.bytes_per_s * 1e9).astype(np.int64)
    shape = PipelineShape.of_graph(
        graph, search.num_microbatches, forward, backward, [0] * len(stages), comm_ns=int(between.max())
    )
    costs = replace(costs_of(shape), between_ns=between)
    return simulate(lower(graph_1f1b(shape), graph), costs).makespan_ns / 1e9
