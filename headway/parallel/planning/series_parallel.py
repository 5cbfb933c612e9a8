"""The series-parallel tree of a layer graph: which layers follow each other, which form branches beside each other.

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
from dataclasses import dataclass

from headway.parallel.planning.layers import LayerGraph, ancestors

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
