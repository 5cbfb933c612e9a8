"""Boxes: rectangular parts of a tensor, where they meet, and whether they make up the whole.

Use it wherever a tensor lies in parts: what a rank holds, what a file holds,
what a reader wants. A box is `offsets` and `lengths`, one of each per
dimension, in elements of the whole tensor. A flat shard, an interval of the
row-major elements as ZeRO holds it, is at most 2 d - 1 boxes for d
dimensions (the decomposition that ByteCheckpoint uses for irregular shards).

>>> [str(box) for box in flat_to_boxes((4, 3), 2, 10)]
['[0:1, 2:3]', '[1:3, 0:3]', '[3:4, 0:1]']
>>> str(cover_fault((4, 3), flat_to_boxes((4, 3), 2, 12)))
'elements [0:1, 0:2] are in no box'
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from headway.core.errors import FormatError, InputError

FREE_LOOKS, LOOKS_PER_BOX = 2_000_000, 100
"""How often a box is looked at before boxes are taken for ones that cut each other without end."""

Shape = tuple[int, ...]
"""[d] Lengths of a tensor's dimensions."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor; one of a 0-dim tensor has no offsets and one element."""

    offsets: Shape
    """[d] First element in each dimension."""

    lengths: Shape
    """[d] Elements in each dimension."""

    @property
    def num_elements(self) -> int:
        """Elements in the box."""
        return math.prod(self.lengths)

    @property
    def stops(self) -> Shape:
        """[d] One past the last element in each dimension."""
        return tuple(start + length for start, length in zip(self.offsets, self.lengths, strict=True))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the index that takes this box out of an array that holds `outer`."""
        starts = [mine - theirs for mine, theirs in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + length) for start, length in zip(starts, self.lengths, strict=True))

    def shifted(self, origin: Sequence[int]) -> Box:
        """Return the same box in a tensor in which this one's whole begins at `origin`."""
        return Box(tuple(mine + more for mine, more in zip(self.offsets, origin, strict=True)), self.lengths)

    def __str__(self) -> str:
        """Write the box as Python would index it."""
        return f"[{', '.join(f'{a}:{b}' for a, b in zip(self.offsets, self.stops, strict=True))}]"


def whole(shape: Sequence[int]) -> Box:
    """Return the box that is all of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def flat_to_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the boxes, in row-major order, of elements `start` to `stop` of the flattened tensor.

    At most 2 d - 1 of them (one for a 0-dim tensor). Raises `InputError` for an interval outside the tensor.
    """
    shape, size = tuple(shape), math.prod(shape)
    if not 0 <= start <= stop <= size:
        raise InputError(
            f"elements {start}:{stop} are not an interval of a tensor of shape {shape} ({size} elements). "
            f"Give 0 <= start <= stop <= {size}."
        )
    return list(_interval((), shape, start, stop))


def _interval(lead: Shape, shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of an interval of `shape`, which is the part at index `lead` of a larger tensor."""
    if start == stop:
        return
    if len(shape) <= 1:
        ends = ((start,), (stop - start,)) if shape else ((), ())
        yield Box(lead + ends[0], (1,) * len(lead) + ends[1])
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        yield from _interval((*lead, first), shape[1:], start - first * row, stop - first * row)
        return
    body = first + (start % row > 0), last + (stop % row == 0)
    if start % row:
        yield from _interval((*lead, first), shape[1:], start % row, row)
    if body[0] < body[1]:
        rest = shape[1:]
        yield Box((*lead, body[0]) + (0,) * len(rest), (1,) * len(lead) + (body[1] - body[0], *rest))
    if stop % row:
        yield from _interval((*lead, last), shape[1:], 0, stop % row)


def intersection(a: Box, b: Box) -> Box | None:
    """Return what two boxes of one tensor share, or None where that is no element."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    lengths = tuple(min(ends) - start for start, *ends in zip(offsets, a.stops, b.stops, strict=True))
    return Box(offsets, lengths) if all(length > 0 for length in lengths) else None


class BoxIndex:
    """Boxes of one tensor, ordered so that those that meet a given one are found without looking at all.

    Sorted along the dimension in which the boxes differ most; a query costs a bisection and the boxes that
    overlap in that dimension.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        num_dims = len(boxes[0].offsets) if boxes else 0
        self._dim = max(range(num_dims), key=lambda dim: len({box.offsets[dim] for box in boxes}), default=0)
        spans = [(box.offsets[self._dim], box.stops[self._dim]) if num_dims else (0, 1) for box in boxes]
        self._order = sorted(range(len(boxes)), key=lambda index: (spans[index], index))
        self._boxes = [boxes[index] for index in self._order]
        self._starts = [spans[index][0] for index in self._order]
        # The furthest end so far never falls, so it can be bisected: before it, no box reaches the query.
        self._reach = list(accumulate((spans[index][1] for index in self._order), max))

    def overlapping(self, box: Box) -> list[tuple[int, Box]]:
        """Return (index of a box that meets `box`, what they share), in order of index."""
        start, stop = (box.offsets[self._dim], box.stops[self._dim]) if box.offsets else (0, 1)
        candidates = range(bisect_right(self._reach, start), bisect_left(self._starts, stop))
        shared = ((self._order[place], intersection(box, self._boxes[place])) for place in candidates)
        return sorted(((index, part) for index, part in shared if part is not None), key=lambda found: found[0])


@dataclass(frozen=True, slots=True)
class CoverageFault:
    """Why some boxes are not the whole tensor, each element once."""

    kind: Literal["gap", "overlap", "outside"]
    """In no box; in several; or a box that reaches outside the tensor."""

    box: Box
    """The first such elements in row-major order of the dimensions."""

    indices: tuple[int, ...] = ()
    """Which of the boxes: those that overlap, or the one outside."""

    def __str__(self) -> str:
        """Say it in a sentence."""
        if self.kind == "gap":
            return f"elements {self.box} are in no box"
        if self.kind == "outside":
            return f"box {self.indices[0]}, {self.box}, reaches outside the tensor"
        return f"elements {self.box} are in boxes {', '.join(map(str, self.indices))}"


def cover_fault(shape: Sequence[int], boxes: Sequence[Box]) -> CoverageFault | None:
    """Return the first fault of `boxes` as a partition of a tensor of `shape`, or None when they are one.

    Exact: a box outside, then in order of the dimensions an element that no box or more than one box holds. Boxes
    without elements are ignored. Time O(n log n) for rows or a grid of boxes. Raises `FormatError` for boxes that
    cross each other in so many ways that it would take a multiple of that: no program cuts a tensor so.
    """
    for index, box in enumerate(boxes):
        if not _is_inside(box, shape):
            return CoverageFault("outside", box, (index,))
    if not math.prod(shape):
        return None
    looks = [FREE_LOOKS + LOOKS_PER_BOX * len(boxes)]
    return _slab_fault((), tuple(shape), [(i, box) for i, box in enumerate(boxes) if box.num_elements], looks)


def _is_inside(box: Box, shape: Sequence[int]) -> bool:
    """Tell whether a box has the tensor's dimensions and lies inside it."""
    if len(box.offsets) != len(shape) or len(box.lengths) != len(shape):
        return False
    ends = zip(box.offsets, box.lengths, shape, strict=True)
    return all(start >= 0 and length >= 0 and start + length <= size for start, length, size in ends)


def _slab_fault(
    cuts: tuple[tuple[int, int], ...], shape: Shape, active: list[tuple[int, Box]], looks: list[int]
) -> CoverageFault | None:
    """Look for a fault in a slab: interval `cuts[i]` of each leading dimension, all of the others.

    Every box of `active` spans the cuts, so only the dimensions after them matter. `looks` is how many
    looks at a box in a slab are left.
    """
    dim = len(cuts)
    if len(active) == 1 and active[0][1].lengths[dim:] == shape[dim:]:
        return None
    if dim == len(shape) or not active:
        box = Box(
            tuple(a for a, _ in cuts) + (0,) * (len(shape) - dim), tuple(b - a for a, b in cuts) + tuple(shape[dim:])
        )
        return (
            CoverageFault("overlap", box, tuple(index for index, _ in active)) if active else CoverageFault("gap", box)
        )
    edges = sorted({0, shape[dim], *(box.offsets[dim] for _, box in active), *(box.stops[dim] for _, box in active)})
    waiting = sorted(active, key=lambda item: item[1].offsets[dim], reverse=True)
    inside: list[tuple[int, Box]] = []
    for start, stop in pairwise(edges):
        inside = [item for item in inside if item[1].stops[dim] > start]
        looks[0] -= len(inside) + 1
        if looks[0] < 0:
            raise FormatError(f"{len(active)} boxes cut each other in too many ways. Use another copy.")
        while waiting and waiting[-1][1].offsets[dim] <= start:
            inside.append(waiting.pop())
        fault = _slab_fault((*cuts, (start, stop)), shape, inside, looks)
        if fault is not None:
            return fault
    return None
