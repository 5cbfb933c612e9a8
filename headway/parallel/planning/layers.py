"""A model as layers with measured costs, and the cuts at which it may be split into stages.

>>> graph = LayerGraph.chain(forward_s=[1.0, 2.0], backward_s=[2.0, 4.0], output_bytes=[8.0, 4.0],
...                          parameter_bytes=[100.0, 50.0])
>>> graph.cuts().inside.tolist()
[[True, False], [True, True]]

The series-parallel tree of a layer graph: which layers follow each other, which form branches beside each other.

Each layer is an edge of a network from one source to one sink, each edge of
the graph an empty edge of it. Two edges in a row become one (series), two with
the same ends become one (parallel), until one edge is left, which has the tree
(Valdes, Tarjan and Lawler, *The Recognition of Series Parallel Digraphs*, 1982):

    a -> b -> d        source -a-> . ==b==> . -d-> sink        Series(a, Parallel(b, c), d)
      `> c -^                        ==c==>

A graph that is no such tree gets stuck. It is merged to the nearest: of an edge
x -> y without another way from x to y, all that led to y now leads to x and all
that left x now leaves y. That only adds an order between layers, and the edge that
orders the fewest pairs of layers anew is taken; what was added is part of the
answer. (Where a and b both lead to both c and d, merging adds nothing.)

>>> from headway.parallel.planning.layers import LayerGraph
>>> costs = ((1.0,) * 4,) * 4
>>> decompose(LayerGraph(tuple("abcd"), *costs, edges=((0, 1), (0, 2), (1, 3), (2, 3)))).tree
Series(parts=(0, Parallel(parts=(1, 2)), 3))
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import CycleError, FormatError, InputError
from headway.core.files.safe_files import read_text
from headway.core.tables import pick
from headway.sim.graph.dag import Dag

LAYER = re.compile(
    r"(?P<key>\S+) -- (?P<name>.*) -- forward_compute_time=(?P<forward>[^,]+), "
    r"backward_compute_time=(?P<backward>[^,]+), "
    r"activation_size=(?P<output>[^,]+), parameter_size=(?P<parameters>[^,]+)"
)
"""A line of PipeDream's profile: key, description, times in ms, sizes in bytes."""

MOST_CUTS = 20_000
"""More cuts than this make the search too long: the graph has too many parallel branches."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """The cuts of a graph, small ones first: each is the set of layers before it, closed under predecessors."""

    inside: NDArray[np.bool_]
    """[cuts, layers] Whether the layer is before the cut; the last cut has all layers."""

    precedes: NDArray[np.bool_]
    """[cuts, cuts] Whether the row's layers are a proper part of the column's."""

    crossing_bytes: Floats
    """[cuts] Outputs of layers before the cut that layers behind it take."""

    published_bytes: Floats
    """[cuts] The same as PipeDream's code counts it (`LayerGraph.cuts`); never less."""


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """Layers with their costs, and which layer feeds which."""

    names: tuple[str, ...]
    """[layers] Name of each layer."""

    forward_s: tuple[float, ...]
    """[layers] Forward of one minibatch."""

    backward_s: tuple[float, ...]
    """[layers] Its backward."""

    output_bytes: tuple[float, ...]
    """[layers] Output of one minibatch."""

    parameter_bytes: tuple[float, ...]
    """[layers] Weights."""

    edges: tuple[tuple[int, int], ...]
    """(layer, layer that takes its output)."""

    def __post_init__(self) -> None:
        """Raise `InputError` naming the layer whose cost is no number >= 0, and on a cycle."""
        for what in ("forward_s", "backward_s", "output_bytes", "parameter_bytes"):
            values = getattr(self, what)
            if len(values) != len(self.names):
                raise InputError(f"{what} has {len(values)} entries for {len(self.names)} layers; give one per layer.")
            for name, value in zip(self.names, values, strict=True):
                if not (math.isfinite(value) and value >= 0):
                    raise InputError(f"{what} of layer {name} is {value}; measure it again: a number >= 0 is needed.")
        if not self.names:
            raise InputError("the profile has no layer; give at least one.")
        sources, targets = [a for a, _ in self.edges], [b for _, b in self.edges]
        try:
            Dag.from_edges(len(self.names), sources, targets)
        except CycleError as cause:
            circle = " -> ".join(self.names[layer] for layer in cause.operations)
            raise CycleError(f"layers {circle} feed each other. Remove one of these edges.", cause.operations) from None
        loose = sorted(set(range(len(self.names))) - {*sources, *targets}) if len(self.names) > 1 else []
        if loose:
            raise InputError(f"layer {self.names[loose[0]]} has no edge. Add the missing edge, or remove the layer.")

    @classmethod
    def chain(
        cls,
        *,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        output_bytes: Sequence[float],
        parameter_bytes: Sequence[float],
    ) -> LayerGraph:
        """Return layers that each feed the next one."""
        n = len(forward_s)
        edges = tuple((layer, layer + 1) for layer in range(n - 1))
        names = tuple(map(str, range(n)))
        return cls(names, tuple(forward_s), tuple(backward_s), tuple(output_bytes), tuple(parameter_bytes), edges)

    @classmethod
    def from_pipedream(cls, path: str | Path) -> LayerGraph:
        """Read a profile of PipeDream's profiler.

        A size is a number of bytes or a list in brackets, which is summed. Layers named Input are left out (they
        stay with the first stage), and so are outputs of `__getitem__` that no layer takes. Raises `FormatError`
        naming the line.
        """
        rows: dict[str, tuple[str, tuple[float, ...]]] = {}
        pairs = []
        for number, line in enumerate(read_text(path, "a profile").splitlines(), 1):
            match = LAYER.fullmatch(line.strip())
            ends = line.split(" -- ")
            if match:
                rows[match["key"]] = _layer(match, f"{path}, line {number}")
            elif len(ends) == 2 and line.startswith("\t"):
                pairs.append((ends[0].strip(), ends[1].strip()))
            elif line.strip():
                raise FormatError(
                    f"{path}, line {number} is neither a layer nor an edge: {line.strip()[:80]!r}. Remove it."
                )
        for pair in pairs:
            if unknown := set(pair) - set(rows):
                raise FormatError(f"{path}: an edge names {unknown.pop()}, which is no layer. Add its line.")
        taken = {source for source, _ in pairs}
        fed = {target for _, target in pairs}
        dropped = {key for key, row in rows.items() if row[0].startswith("Input") and key not in fed}
        dropped |= {key for key, row in rows.items() if row[0].startswith("__getitem__") and key not in taken}
        index = {key: i for i, key in enumerate(key for key in rows if key not in dropped)}
        edges = tuple((index[a], index[b]) for a, b in pairs if a in index and b in index)
        names = tuple(f"{key} {rows[key][0]}" for key in index)
        forward, backward, outputs, parameters = (tuple(rows[key][1][column] for key in index) for column in range(4))
        return cls(names, forward, backward, outputs, parameters, edges)

    def split_by_inputs(self, name: str) -> LayerGraph:
        """Return the graph with a dense layer on concatenated inputs as one product per input, and their sum.

        W [x0, x1, ..] = W0 x0 + W1 x1 + ..: each product has the share of its input's bytes in the layer's time and
        weights, and an output as large as the layer's; the sum keeps the layer's name and takes no time. So each
        product can be in the stage of its branch. Gradients are equal but for the order of the sum. Raises `InputError`
        for an unknown name, and a layer that takes fewer than two inputs, or inputs without bytes.
        """
        layer = self.names.index(pick(dict(zip(self.names, self.names, strict=True)), name, "layer"))
        sources = [source for source, target in self.edges if target == layer]
        sizes = [self.output_bytes[source] for source in sources]
        if len(sources) < 2 or not sum(sizes):
            raise InputError(
                f"layer {name} takes {len(sources)} inputs of {sum(sizes):g} bytes; only a dense layer on at least "
                "two, concatenated, can be split. Name another layer, or give output_bytes."
            )
        shares = [size / sum(sizes) for size in sizes]

        def column(values: Sequence[float], behind: float, factors: Sequence[float]) -> tuple[float, ...]:
            return (*values[:layer], *(values[layer] * factor for factor in factors), behind, *values[layer + 1 :])

        # The products stand before the sum: layers from it on move back by their number.
        moved = [k if k < layer else k + len(sources) for k in range(len(self.names))]
        edges = [(moved[a], moved[b]) for a, b in self.edges if b != layer]
        edges += [(moved[source], layer + k) for k, source in enumerate(sources)]
        edges += [(layer + k, moved[layer]) for k in range(len(sources))]
        return LayerGraph(
            (*self.names[:layer], *(f"{name} of {self.names[source]}" for source in sources), *self.names[layer:]),
            column(self.forward_s, 0.0, shares), column(self.backward_s, 0.0, shares),
            column(self.output_bytes, self.output_bytes[layer], [1.0] * len(sources)),
            column(self.parameter_bytes, 0.0, shares), tuple(sorted(edges)),
        )  # fmt: skip

    def cuts(self) -> Cuts:
        """Return every cut that grows from the first layer by one layer and what it needs at a time.

        Raises `InputError` where there are more than `MOST_CUTS`.
        """
        n = len(self.names)
        before, after = ancestors(n, self.edges), [[] for _ in range(n)]  # type: list[int], list[list[int]]
        for source, target in self.edges:
            after[source].append(target)
        first = next(layer for layer in range(n) if before[layer] == 1 << layer)
        # A cut is a whole number: bit i says that layer i is before it.
        seen, border = {before[first]}, [before[first]]
        while border:
            cut = border.pop()
            for layer in range(n):
                for target in after[layer] if cut >> layer & 1 else ():
                    larger = cut | before[target]
                    if larger not in seen:
                        seen.add(larger)
                        border.append(larger)
            if len(seen) > MOST_CUTS:
                raise InputError(f"the graph has more than {MOST_CUTS} cuts. Merge layers of its parallel branches.")
        ordered = sorted(seen, key=lambda cut: (cut.bit_count(), cut))
        inside = np.array([[cut >> layer & 1 for layer in range(n)] for cut in ordered], np.bool_)
        outside = (~inside).astype(np.float32)
        # A layer set is part of another where nothing of it lies outside the other: a count of 0.
        part = inside.astype(np.float32) @ outside.T == 0
        np.fill_diagonal(part, False)
        leaves, inner = np.zeros_like(inside), np.zeros_like(inside)
        # counted[a, q]: q is before a, and some layer that takes q's output is not. The published code counts the
        # outputs of a cut's last layers a and of all such q, although the other branch of the cut may have used them.
        counted = np.eye(n, dtype=np.bool_)
        for source, target in self.edges:
            leaves[:, source] |= inside[:, source] & ~inside[:, target]
            inner[:, source] |= inside[:, source] & inside[:, target]
            counted[:, source] |= [bool(of >> source & 1 and not of >> target & 1) for of in before]
        published = ((inside & ~inner).astype(np.float32) @ counted.astype(np.float32)) > 0
        sizes = np.asarray(self.output_bytes)
        return Cuts(inside, part, leaves @ sizes, published @ sizes)


def ancestors(n: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return for each layer the set of layers it needs, itself among them, as bits of a whole number."""
    preds: list[list[int]] = [[] for _ in range(n)]
    for source, target in edges:
        preds[target].append(source)
    order = Dag.from_edges(n, [a for a, _ in edges], [b for _, b in edges]).compiled.order
    before = [0] * n
    for layer in order.tolist():
        before[layer] = 1 << layer
        for source in preds[layer]:
            before[layer] |= before[source]
    return before


def _layer(match: re.Match[str], where: str) -> tuple[str, tuple[float, ...]]:
    """Return the name of a line, its seconds and its bytes."""
    try:
        sizes = [sum(map(float, match[key].strip("[] ").split(";"))) for key in ("output", "parameters")]
        return match["name"], (float(match["forward"]) / 1e3, float(match["backward"]) / 1e3, *sizes)
    except ValueError as cause:
        raise FormatError(
            f"{where}: layer {match['key']} has a cost that is no number: {cause}. Measure it."
        ) from cause


SOURCE, SINK = -1, -2
"""Ends of the network; layer i leads from vertex 2i to 2i + 1."""


@dataclass(frozen=True, slots=True)
class Series:
    """Parts that each need the one before."""

    parts: tuple[Tree, ...]
    """In their order."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """Branches: parts between the same two vertices, none of which needs another."""

    parts: tuple[Tree, ...]
    """By their first layers."""


Tree = int | Series | Parallel
"""A layer, or a part of several."""


@dataclass(frozen=True, slots=True)
class Decomposition:
    """The tree of a graph, and what had to be added for it to have one."""

    tree: Tree
    """Every layer once."""

    merged: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Pairs (layers, layers that only the tree has behind them); () for a series-parallel graph."""


def layers_of(tree: Tree) -> tuple[int, ...]:
    """Return the layers of a tree, each behind those it needs, branch after branch."""
    if isinstance(tree, int):
        return (tree,)
    return tuple(layer for branch in tree.parts for layer in layers_of(branch))


def decompose(graph: LayerGraph) -> Decomposition:
    """Return the series-parallel tree of a graph, merged to the nearest where it has none."""
    n = len(graph.names)
    network = _Reduction(ancestors(n, [(b, a) for a, b in graph.edges]))
    targets, sources = {b for _, b in graph.edges}, {a for a, _ in graph.edges}
    for layer in range(n):
        network.add(2 * layer, 2 * layer + 1, layer)
        if layer not in targets:
            network.add(SOURCE, 2 * layer, None)
        if layer not in sources:
            network.add(2 * layer + 1, SINK, None)
    for a, b in graph.edges:
        network.add(2 * a + 1, 2 * b, None)
    merged: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    network.reduce()
    while len(network.parts) > 1:
        merged += network.merge()
        network.reduce()
    tree = network.parts[SOURCE, SINK]
    assert tree is not None
    return Decomposition(tree, tuple(merged))


class _Reduction:
    """A network under reduction: at most one edge between two vertices."""

    def __init__(self, follows: list[int]) -> None:
        self.follows = follows
        self.parts: dict[tuple[int, int], Tree | None] = {}
        self.after: dict[int, set[int]] = {}
        self.before: dict[int, set[int]] = {}

    def add(self, a: int, b: int, tree: Tree | None) -> None:
        """Add an edge; with one that is there already it becomes a branch. An empty branch orders nothing."""
        if (a, b) in self.parts:
            tree = _joined(Parallel, self.parts[a, b], tree)
        self.parts[a, b] = tree
        self.after.setdefault(a, set()).add(b)
        self.before.setdefault(b, set()).add(a)

    def remove(self, a: int, b: int) -> Tree | None:
        """Remove an edge and return its part."""
        self.after[a].discard(b)
        self.before[b].discard(a)
        return self.parts.pop((a, b))

    def reduce(self) -> None:
        """Make one edge of two in a row until there are no more."""
        waiting = list(self.after)
        while waiting:
            x = waiting.pop()
            if x == SOURCE or len(self.after.get(x, ())) != 1 or len(self.before.get(x, ())) != 1:
                continue
            (a,), (b,) = self.before[x], self.after[x]
            first, second = self.remove(a, x), self.remove(x, b)
            self.add(a, b, _joined(Series, first, second))
            waiting += [a, b]

    def merge(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Merge the ends of one edge, and return the layers (before, behind) that this orders anew."""
        order = self._topological()
        rank = {x: k for k, x in enumerate(order)}
        # before[x], behind[x]: bits of the layers that lead to x, that follow it.
        before, behind = dict.fromkeys(order, 0), dict.fromkeys(order, 0)
        for x in order:
            for a in self.before.get(x, ()):
                before[x] |= before[a] | _bits(self.parts[a, x])
        for x in reversed(order):
            for b in self.after.get(x, ()):
                behind[x] |= behind[b] | _bits(self.parts[x, b])
        # The last vertex that leads to y, and the first behind x: no third one is between them.
        edges = {(max(self.before[y], key=rank.__getitem__), y) for y in order if len(self.before.get(y, ())) > 1}
        edges |= {(x, min(self.after[x], key=rank.__getitem__)) for x in order if len(self.after.get(x, ())) > 1}
        choices = []
        for x, y in edges:
            inner = _bits(self.parts[x, y])
            first, second = before[y] & ~before[x] & ~inner, behind[x] & ~behind[y] & ~inner
            pairs = [*self._anew(first, second | inner), *self._anew(inner, second)]
            choices.append((sum(after.bit_count() for _, after in pairs), rank[x], rank[y], x, y, first, second, inner))
        *_, x, y, first, second, inner = min(choices)
        for a in self.before[y] - {x}:
            self.add(a, x, self.remove(a, y))
        for b in self.after[x] - {y}:
            self.add(y, b, self.remove(x, b))
        groups = (self._anew(first, second | inner), self._anew(inner, second))
        return [
            (tuple(layer for layer, _ in group), _layers(functools.reduce(int.__or__, (after for _, after in group))))
            for group in groups
            if group
        ]

    def _anew(self, first: int, second: int) -> list[tuple[int, int]]:
        """Return each layer of the first that the second need not follow yet, and those of them that are new to it."""
        pairs = ((layer, second & ~self.follows[layer]) for layer in _layers(first))
        return [(layer, after) for layer, after in pairs if after]

    def _topological(self) -> list[int]:
        """Return the vertices that have edges, each behind those that lead to it."""
        needs = {x: len(sources) for x, sources in self.before.items() if sources}
        order, ready = [], [SOURCE]
        while ready:
            x = ready.pop()
            order.append(x)
            for b in sorted(self.after.get(x, ())):
                needs[b] -= 1
                if not needs[b]:
                    ready.append(b)
        return order


def _joined(form: type[Series] | type[Parallel], first: Tree | None, second: Tree | None) -> Tree | None:
    """Return two parts as one; a part of the same kind is taken in."""
    parts: list[Tree] = []
    for tree in (first, second):
        if isinstance(tree, form):
            parts += tree.parts
        elif tree is not None:
            parts.append(tree)
    if form is Parallel:
        parts.sort(key=layers_of)
    return form(tuple(parts)) if len(parts) > 1 else parts[0] if parts else None


def _bits(tree: Tree | None) -> int:
    """Return the layers of a part as bits."""
    return 0 if tree is None else sum(1 << layer for layer in layers_of(tree))


def _layers(bits: int) -> tuple[int, ...]:
    """Return the layers that bits stand for."""
    return tuple(layer for layer in range(bits.bit_length()) if bits >> layer & 1)
