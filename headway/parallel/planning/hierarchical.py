"""PipeDream's partitioner: stages and replicas of each stage, for levels of links from fast to slow.

Source: *PipeDream* (SOSP 2019), with the terms of its published code. Legend,
in the paper's letters: i, j, k are cuts of the layer graph, m devices of the
level at hand, B the bandwidth of its links, w the weights' bytes of a stage.

    T(i, j, m) = (T_inner(i, j) + 4 (m - 1) w / (B m)) / m             one stage on m replicas
    A(i, j, m) = min( T(i, j, m),  min over k, m' of max( A(i, k, m - m'), T(k, j, m'),
                                                          2 out(k) / (B m'), 2 out(j) / (B m') ) )

A is the time of the slowest stage or transfer per minibatch in steady state.
A level's A with all its devices is the next level's T_inner; the innermost
one is the sum of the layers' times. On the base row the all-reduce is divided
by the size of the inner level, as in the published code.

>>> graph = LayerGraph.chain(forward_s=[1.0] * 4, backward_s=[2.0] * 4, output_bytes=[0.0] * 4,
...                          parameter_bytes=[1e9] * 4)
>>> plan = search(graph, Topology((2,), (1e9,)))
>>> plan.objective_s, [(stage.num_layers, stage.replicas) for stage in plan.stages]
(6.0, [(2, 1), (2, 1)])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.parallel.planning.layers import Cuts, Floats, LayerGraph

CROSSING: dict[str, Callable[[Cuts], Floats]] = {
    "published": lambda cuts: cuts.published_bytes,
    "exact": lambda cuts: cuts.crossing_bytes,
    "none": lambda cuts: np.zeros_like(cuts.crossing_bytes),
}
"""What a transfer between stages carries: as the published code counts it, what must cross, or nothing."""

COMBINE: dict[str, Callable[[Floats, Floats], Floats]] = {"sum": np.add, "overlap": np.maximum}
"""How a stage's computation and its all-reduce add up: in turn (the published code), or overlapped (the paper)."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Devices in levels: the first level's links are the fastest."""

    sizes: tuple[int, ...]
    """[levels] Parts of the level below (devices, for the first) that one part of this level has."""

    bytes_per_s: tuple[float, ...]
    """[levels] Bandwidth of the links of each level."""

    memory_bytes: float = math.inf
    """Memory of a device, under the coarse rule of the published code."""

    def __post_init__(self) -> None:
        """Raise `InputError` on no level, a size below 1 or a bandwidth that is no number above 0."""
        if not self.sizes or len(self.sizes) != len(self.bytes_per_s):
            raise InputError(
                f"{len(self.sizes)} sizes and {len(self.bytes_per_s)} bandwidths of levels; give one of each per level."
            )
        for size, rate in zip(self.sizes, self.bytes_per_s, strict=True):
            if size < 1 or not (math.isfinite(rate) and rate > 0):
                raise InputError(f"a level has size {size} and {rate} bytes/s; give a size >= 1 and a rate above 0.")


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage of a partition."""

    layers: tuple[str, ...]
    """Names of its layers."""

    replicas: int
    """Devices that run it, each with its own minibatches."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """Where each layer runs."""

    objective_s: float
    """Seconds per minibatch in steady state."""

    stages: tuple[PlannedStage, ...]
    """In the order of the layers; one stage on all devices is data parallelism."""

    data_parallel_s: float
    """The same figure of data parallelism on all devices."""


@dataclass(frozen=True, slots=True, eq=False)
class _Level:
    """The recurrence at one level. Time tables are [end cut, start], start i meaning behind cut i - 1."""

    stage: Floats
    """[n, n + 1] Time of the layers between, on one part of this level; infinite where the cuts are not in order."""

    weights: Floats
    """[n, n + 1] Bytes of weights between."""

    stored: Floats
    """[n, n + 1] Bytes of weights and outputs between."""

    cuts: Cuts
    """The cuts."""

    size: int
    """m: parts of this level."""

    inner_size: int
    """Size of the level below."""

    rate: float
    """B: bytes per second."""

    memory_bytes: float
    """Memory of a device."""

    combine: Callable[[Floats, Floats], Floats]
    """How computation and all-reduce add up."""

    crossing_bytes: Floats
    """[n] What a transfer at each cut carries."""

    def whole(self, m: int) -> Floats:
        """Return [n, n + 1] the time of one stage on m parts."""
        sync = 4 * (m - 1) * self.weights / (self.rate * m) / self.inner_size
        time = self.combine(self.stage, sync) / m
        return np.where(self.in_flight(m, m) * self.stored <= self.memory_bytes, time, np.inf)

    def in_flight(self, m: int, replicas: int) -> int:
        """Return the minibatches that the last stage on m parts holds: the published rule, at least 1."""
        return max(1, math.ceil((self.size - m) / replicas))

    def last(self, k: NDArray[np.int64], j: int, m: int, replicas: int) -> Floats:
        """Return [k] the time of a last stage from the cuts k to j on some of m parts, its transfers included."""
        sync = 4 * (replicas - 1) * self.weights[j, k + 1] / (self.rate * replicas)
        time = self.combine(self.stage[j, k + 1], sync) / replicas
        out = self.crossing_bytes
        sent = out[j] if j + 1 < out.size else 0.0
        time = np.maximum(time, 2 * np.maximum(out[k], sent) / (self.rate * replicas))
        stored = self.in_flight(m, replicas) * self.stored[j, k + 1]
        return np.where(stored <= self.memory_bytes, time, np.inf)

    def solve(self, only_first: bool) -> list[Floats]:
        """Return A for 1..size parts, each [n, starts]; with `only_first` only the start 0 is filled beyond one part.

        For one end j all starts i and all cuts k are one block: the rows of A at the cuts k before j (columns are
        starts) against the time of the last stage k..j, the larger of both, and the least over k. Where a start
        is not before the cut, A is infinite already.

                    starts i ->                     last stage
            k   [ A(i, k, m - m') ....... ]  max  [ T(k, j, m') ]   --min over k-->  A(i, j, m)
        """
        n = self.stage.shape[0]
        best = [self.whole(m) for m in range(1, self.size + 1)]
        before = [np.flatnonzero(self.cuts.precedes[:, j]) for j in range(n)]
        for m in range(2, self.size + 1):
            for j in range(1, n):
                starts, row = (1 if only_first else j + 1), best[m - 1][j]
                for replicas in range(1, m):
                    block = best[m - replicas - 1][before[j], :starts]
                    np.maximum(block, self.last(before[j], j, m, replicas)[:, None], out=block)
                    np.minimum(row[:starts], block.min(axis=0, initial=np.inf), out=row[:starts])
        return best

    def stages(self, best: list[Floats], start: int, j: int, m: int) -> list[tuple[int, int, int]]:
        """Return (start, end cut, replicas) of the stages behind a value of A; a whole stage wins a tie."""
        value = best[m - 1][j, start]
        if value == self.whole(m)[j, start]:
            return [(start, j, m)]
        k = np.flatnonzero(self.cuts.precedes[:, j])
        for replicas in range(m - 1, 0, -1):
            times = np.maximum(best[m - replicas - 1][k, start], self.last(k, j, m, replicas))
            if (times == value).any():
                cut = int(k[np.argmax(times == value)])
                return [*self.stages(best, start, cut, m - replicas), (cut + 1, j, replicas)]
        raise AssertionError("a value of the recurrence without a choice behind it")


def search(
    graph: LayerGraph, topology: Topology, *, allreduce: str = "sum", transfers: str = "published"
) -> PartitionPlan:
    """Return the partition with the least time per minibatch in steady state; exact for the recurrence above.

    `allreduce` is one of `COMBINE`, `transfers` one of `CROSSING`. Raises `InputError` where no partition fits
    the memory.
    """
    cuts = graph.cuts()
    between = _between(cuts)
    time = between(np.add(graph.forward_s, graph.backward_s), np.inf)
    weights, outputs = between(np.asarray(graph.parameter_bytes), 0.0), between(np.asarray(graph.output_bytes), 0.0)
    level = _Level(
        stage=time, weights=weights, stored=weights + outputs, cuts=cuts, size=1, inner_size=1, rate=1.0,
        memory_bytes=topology.memory_bytes, combine=pick(COMBINE, allreduce, "allreduce"),
        crossing_bytes=pick(CROSSING, transfers, "transfers")(cuts),
    )  # fmt: skip
    levels, tables, replicated = [], [], time[-1, 0]
    for number, (size, rate) in enumerate(zip(topology.sizes, topology.bytes_per_s, strict=True)):
        level = replace(level, size=size, rate=rate)
        levels.append(level)
        replicated = replace(level, stage=np.full_like(time, replicated), memory_bytes=math.inf).whole(size)[-1, 0]
        tables.append(level.solve(only_first=number + 1 == len(topology.sizes)))
        level = replace(level, stage=tables[-1][-1], inner_size=size)
    objective = float(tables[-1][-1][-1, 0])
    if not math.isfinite(objective):
        raise InputError(
            f"no partition over {math.prod(topology.sizes)} devices fits {topology.memory_bytes:g} bytes of memory. "
            "Give more devices, or smaller minibatches."
        )
    found = [(0, cuts.inside.shape[0] - 1, 1)]
    for level, best in zip(reversed(levels), reversed(tables), strict=True):
        found = [
            (start, end, outer * replicas)
            for first, last, outer in found
            for start, end, replicas in level.stages(best, first, last, level.size)
        ]
    nothing = np.zeros(len(graph.names), np.bool_)
    stages = tuple(
        PlannedStage(
            tuple(
                graph.names[layer]
                for layer in np.flatnonzero(cuts.inside[end] & ~(cuts.inside[start - 1] if start else nothing))
            ),
            replicas,
        )
        for start, end, replicas in found
    )
    return PartitionPlan(objective, stages, float(replicated))


def _between(cuts: Cuts) -> Callable[[Floats, float], Floats]:
    """Return the function that sums a cost between two cuts: [end cut, start]; its second argument is for no order."""
    n = cuts.inside.shape[0]
    in_order = np.column_stack([np.ones(n, np.bool_), cuts.precedes.T])

    def sums(cost: Floats, otherwise: float) -> Floats:
        total = cuts.inside @ cost
        return np.where(in_order, total[:, None] - np.concatenate([[0.0], total])[None, :], otherwise)

    return sums
