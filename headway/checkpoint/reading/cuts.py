"""Which rows of a dimension a rank holds: torch's chunking, plain and strided, as runs of indices.

A dimension that a mesh axis cuts is dealt out as `torch.chunk` does: `ceil(n
/ ranks)` to each, less or nothing to the last. A strided cut (FSDP2 over
tensor parallelism) first cuts into `split_factor` parts, deals out each of
them and joins what a rank got, so that its rows are several runs. Cuts of
one dimension by several axes apply one after the other. A run is (start,
stop) in the whole tensor.

>>> deal([(0, 9)], 4, 3)
[(9, 9)]
>>> deal([(0, 9)], 4, 0, split_factor=2)
[(0, 2), (5, 6)]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product

from headway.storage.stored.boxes import Box

Run = tuple[int, int]
"""First index and one past the last."""


def deal(runs: Sequence[Run], num_ranks: int, index: int, *, split_factor: int = 1) -> list[Run]:
    """Return the part of the joined `runs` that place `index` of `num_ranks` gets.

    An empty part is one empty run, at the place where it would begin. Neighbouring runs are joined.
    """
    size = sum(stop - start for start, stop in runs)
    parts = [_chunk(0, size, split_factor, part) for part in range(split_factor)]
    mine = [_chunk(start, stop, num_ranks, index) for start, stop in parts]
    taken = [piece for start, stop in mine if start < stop for piece in _take(runs, start, stop)]
    return _joined(taken) if taken else [(runs[-1][1],) * 2]


def boxes_of(runs_by_dim: Sequence[Sequence[Run]]) -> list[tuple[Box, Box]]:
    """Return the boxes of a shard that holds the product of runs: (place in the local tensor, place in the whole)."""
    located = [
        list(zip(runs, accumulate((stop - start for start, stop in runs), initial=0), strict=False))
        for runs in runs_by_dim
    ]
    boxes = []
    for combination in product(*located):
        lengths = tuple(stop - start for (start, stop), _ in combination)
        local = Box(tuple(place for _, place in combination), lengths)
        boxes.append((local, Box(tuple(start for (start, _), _ in combination), lengths)))
    return boxes


def _chunk(start: int, stop: int, count: int, index: int) -> Run:
    """Return the part `index` of an interval that is cut as `torch.chunk` cuts."""
    size = -(-(stop - start) // count)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


def _take(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """Return the places `start` to `stop` of the joined runs."""
    taken, place = [], 0
    for first, last in runs:
        low, high = max(start - place, 0), min(stop - place, last - first)
        if low < high:
            taken.append((first + low, first + high))
        place += last - first
    return taken


def _joined(runs: list[Run]) -> list[Run]:
    """Merge runs that touch."""
    joined = runs[:1]
    for start, stop in runs[1:]:
        if start == joined[-1][1]:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
