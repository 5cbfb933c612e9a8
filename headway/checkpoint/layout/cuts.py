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

Who writes what of tensors that several ranks hold alike: even shares, large chunks, nobody is asked.

Use it for whatever R ranks hold as equal copies: plain tensors under data
parallelism, the replicated axes of a mesh. Every holder computes the same
answer from names, shapes and item sizes alone, so a save needs no
collective. Large tensors are laid end to end in order of name and cut into R
even lengths, so a holder writes a few long ranges of rows and not a strip of
every tensor; small ones go whole, largest first, to whoever has least. A
chunk is at least 4 MiB, or a 32nd of an even share where that is less.

Whole-tensor rules (DCP's, ByteCheckpoint's) are bound by the largest tensor:
max / mean 4.2 (largest first) to 4.8 (DCP's order) for Llama-3-8B over 64
ranks (`headway bench checkpoint_balance`); this one gives 1.01, and never
more than 1 + 1/16 plus an element where shares are of 2 MiB or more.

>>> held = [ReplicatedTensor("embed", (1000, 1024), 4), ReplicatedTensor("norm", (1024,), 4)]
>>> [[str(box) for box in owned(held, 2, holder).get("embed", [])] for holder in (0, 1)]
[['[0:500, 0:1024]'], ['[500:1000, 0:1024]']]
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

from headway.core.errors import InputError
from headway.core.units import KIB, MIB
from headway.storage.stored.boxes import Box, flat_to_boxes, whole

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


# Who writes what of tensors that several ranks hold alike: even shares, large chunks, nobody is asked.

CHUNK_BYTES = 4 * MIB
"""Chunks of a large state are no shorter: reads and writes stay long, records few."""

LEAST_CHUNK_BYTES = 64 * KIB
"""Chunks of a small state are no shorter either."""

CHUNKS_PER_SHARE = 32
"""A cut is off by half a chunk at most, so shares differ by a 32nd of themselves."""


@dataclass(frozen=True, slots=True)
class ReplicatedTensor:
    """A tensor, or a shard of one, of which several ranks hold equal copies."""

    fqn: str
    """Its name; no two tensors of one call share it."""

    shape: tuple[int, ...]
    """[d] Shape of what each of them holds."""

    itemsize: int
    """Bytes per element."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one copy."""
        return math.prod(self.shape) * self.itemsize


def owned(tensors: Sequence[ReplicatedTensor], num_holders: int, holder: int) -> dict[str, list[Box]]:
    """Return what place `holder` of `num_holders` writes: name -> boxes of the copy, in row-major order.

    Over all holders, the boxes of each tensor partition it; a tensor without elements is one box, of one holder.
    """
    if not 0 <= holder < num_holders:
        raise InputError(f"holder {holder} is outside 0..{num_holders - 1}. Pass the rank's place among the holders.")
    if num_holders == 1:
        return {tensor.fqn: [whole(tensor.shape)] for tensor in tensors}
    return shares(tensors, num_holders)[holder]


def shares(tensors: Sequence[ReplicatedTensor], num_holders: int) -> list[dict[str, list[Box]]]:
    """Return what each of the holders writes, as `owned` does for one."""
    chunk_bytes = least_chunk(sum(tensor.num_bytes for tensor in tensors), num_holders)
    ordered = sorted(tensors, key=lambda tensor: tensor.fqn)
    large = [tensor for tensor in ordered if tensor.num_bytes >= 2 * chunk_bytes]
    small = [tensor for tensor in ordered if tensor.num_bytes < 2 * chunk_bytes]
    result: list[dict[str, list[Box]]] = [{} for _ in range(num_holders)]
    load_bytes = [0] * num_holders
    for tensor, holder, start, stop in _cut(large, num_holders, chunk_bytes):
        result[holder][tensor.fqn] = flat_to_boxes(tensor.shape, start, stop)
        load_bytes[holder] += (stop - start) * tensor.itemsize
    queue = [(load, holder) for holder, load in enumerate(load_bytes)]
    heapq.heapify(queue)
    for tensor in sorted(small, key=lambda tensor: (-tensor.num_bytes, tensor.fqn)):
        load, holder = queue[0]
        result[holder][tensor.fqn] = [whole(tensor.shape)]
        heapq.heapreplace(queue, (load + tensor.num_bytes, holder))
    return result


def least_chunk(total_bytes: int, num_holders: int) -> int:
    """Return the length below which a tensor of such a state is not cut: bytes."""
    return max(LEAST_CHUNK_BYTES, min(CHUNK_BYTES, total_bytes // (num_holders * CHUNKS_PER_SHARE)))


def _cut(
    large: Sequence[ReplicatedTensor], num_holders: int, chunk_bytes: int
) -> list[tuple[ReplicatedTensor, int, int, int]]:
    """Lay tensors end to end and cut evenly: (tensor, holder, first element, one past the last)."""
    total_bytes, begin, parts = sum(tensor.num_bytes for tensor in large), 0, []
    holder = 0
    for tensor in large:
        end, edges, owners = begin + tensor.num_bytes, [0], [holder]
        while holder + 1 < num_holders and (ideal := total_bytes * (holder + 1) // num_holders) <= end:
            holder += 1
            edge = _place(tensor, ideal - begin, chunk_bytes)
            edges.append(edge if (edge - edges[-1]) * tensor.itemsize >= chunk_bytes else edges[-1])
            owners.append(holder)
        edges.append(math.prod(tensor.shape))
        parts += [(tensor, owner, *ends) for owner, ends in zip(owners, pairwise(edges), strict=True)]
        begin = end
    return [(tensor, owner, start, stop) for tensor, owner, start, stop in parts if start < stop]


def _place(tensor: ReplicatedTensor, ideal_bytes: int, chunk_bytes: int) -> int:
    """Return the element nearest to an ideal cut at which a tensor may be cut.

    That is at an end of it, or a chunk or more away from both, and at the start of a row, or of as large a part
    of a row as half a chunk holds.
    """
    size_bytes = tensor.num_bytes
    inner = [math.prod(tensor.shape[dim + 1 :]) for dim in range(len(tensor.shape))]
    unit = next(size for size in inner if size * tensor.itemsize <= chunk_bytes // 2)
    if min(ideal_bytes, size_bytes - ideal_bytes) < chunk_bytes:
        near = min((0, chunk_bytes, size_bytes - chunk_bytes, size_bytes), key=lambda at: abs(at - ideal_bytes))
        if near in (0, size_bytes):
            return near // tensor.itemsize
        # The shorter side is rounded up: it is the one that must not fall below a chunk.
        rows = -(-chunk_bytes // (unit * tensor.itemsize)) * unit
        return rows if near == chunk_bytes else size_bytes // tensor.itemsize - rows
    return round(ideal_bytes / (unit * tensor.itemsize)) * unit
