"""Which bytes of which files to read for the boxes that are wanted, and where each goes: resharding while loading.

Use it to load a checkpoint into any layout. Wanted boxes are intersected
with the stored ones; each meeting becomes transfers, boxes whose elements
lie close together in a file; transfers close to each other become one read.
With `group` > 1, as many readers want the same boxes: every byte is read by
one of them, each takes an even, contiguous share, and they exchange what they
read (ByteCheckpoint's loading without redundancy). Offsets of files are
bytes, those of boxes elements of the whole tensor.

>>> stored = Piece("w", "float32", (4, 2), (0, 0), (4, 2), "rank-0/a", 0, 1024, 640, 32, 0)
>>> plan = plan_reads([Shard("w", (4, 2), "float32", Box((1, 0), (2, 2)))], {"w": [stored]})
>>> [(read.file, read.start, read.stop) for read in plan.reads], plan.read_bytes
([('rank-0/a', 648, 664)], 16)

Which rows of a dimension a rank holds: torch's chunking, plain and strided, as runs of indices.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import NamedTuple

from headway.core.errors import InputError
from headway.core.units import KIB, MIB
from headway.storage.boxes import Box, BoxIndex, Shape, flat_to_boxes, whole
from headway.storage.manifest import Piece

READ_BYTES = 4 * MIB
"""Reads are no longer: they are spread over threads, and what one has read is still in cache when it is hashed."""

GAP_BYTES = 64 * KIB
"""Unwanted bytes that are read through rather than skipped: what another read would cost in time."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a tensor that somebody wants."""

    fqn: str
    """Name of the tensor."""

    shape: Shape
    """[d] Shape of the whole tensor."""

    dtype: str
    """Name of the element type in torch, without the module."""

    box: Box
    """The part that is wanted."""


class ShardTransfer(NamedTuple):
    """Elements that go from one stored piece to one wanted shard."""

    want: int
    """Index of the shard."""

    piece: Piece
    """Where they are stored."""

    box: Box
    """Which elements, in the whole tensor."""

    itemsize: int
    """Bytes per element."""

    strides: Shape
    """[d] Bytes from an element to the next one along each dimension, in the file."""

    start: int
    """Where in the file the first element begins."""

    stop: int
    """Where in the file the last element ends."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements themselves."""
        return self.box.num_elements * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether they lie in the file without gaps, in their own row-major order."""
        return self.num_bytes == self.stop - self.start

    def part(self, box: Box) -> ShardTransfer:
        """Return the same for a part of the box."""
        return transfer(self.want, self.piece, box, self.itemsize, self.strides)


class Read(NamedTuple):
    """One range of bytes of one file, and what is in it."""

    file: str
    """Path inside the checkpoint."""

    start: int
    """First byte."""

    stop: int
    """One past the last."""

    transfers: tuple[ShardTransfer, ...]
    """What is taken out, in order of its place in the file."""

    reader: int = 0
    """Who of the group reads it."""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Everything to read for some wanted shards."""

    want: tuple[Shard, ...]
    """The shards, as asked for."""

    reads: tuple[Read, ...]
    """In order of reader, file and place; those of one reader do not overlap, but for tied tensors."""

    group: int = 1
    """How many readers share the work."""

    @property
    def read_bytes(self) -> int:
        """Bytes that all readers read together."""
        return sum(read.stop - read.start for read in self.reads)

    @property
    def wanted_bytes(self) -> int:
        """Bytes of the wanted elements, once."""
        return sum(transfer.num_bytes for read in self.reads for transfer in read.transfers)

    def of(self, reader: int) -> list[Read]:
        """Return what one reader reads."""
        return [read for read in self.reads if read.reader == reader]


def plan_reads(
    want: Sequence[Shard], have: Mapping[str, Sequence[Piece]], *, group: int = 1, gap_bytes: int = GAP_BYTES
) -> ReadPlan:
    """Return what to read for `want` from the pieces `have`: name of a tensor -> where its boxes are stored.

    `gap_bytes` is larger where a read costs more (an object store). Raises `InputError` when a tensor is not stored,
    has another shape or type, or when its pieces do not hold all that is wanted.
    """
    if group < 1:
        raise InputError(f"group is {group}; at least one has to read. Pass the number of ranks that want the same.")
    transfers: list[ShardTransfer] = []
    indices: dict[str, BoxIndex] = {}
    for number, shard in enumerate(want):
        pieces = have.get(shard.fqn, ())
        check_alike(shard, pieces)
        if shard.fqn not in indices:
            indices[shard.fqn] = BoxIndex([Box(piece.offsets, piece.lengths) for piece in pieces])
        found = indices[shard.fqn].overlapping(shard.box)
        if sum(box.num_elements for _, box in found) < shard.box.num_elements:
            raise InputError(
                f"'{shard.fqn}' is wanted at {shard.box}, but its {len(pieces)} stored pieces hold only part of that. "
                "Check the checkpoint: headway ckpt verify"
            )
        for index, box in found:
            piece = pieces[index]
            itemsize = piece.payload_bytes // math.prod(piece.lengths)
            transfers.append(transfer(number, piece, box, itemsize, strides_of(piece.lengths, itemsize)))
    transfers.sort(key=_place)
    reads: list[Read] = []
    for reader, share in enumerate(_shares(transfers, group)):
        close = [part for wide in share for part in _close_parts(wide, gap_bytes)]
        reads += _joined(sorted(close, key=_place), reader, gap_bytes)
    return ReadPlan(tuple(want), tuple(reads), group)


def transfer(want: int, piece: Piece, box: Box, itemsize: int, strides: Shape) -> ShardTransfer:
    """Return the transfer of `box`, with its place in the file."""
    steps = zip(box.offsets, piece.offsets, strides, strict=True)
    start = piece.payload_offset + sum((mine - theirs) * stride for mine, theirs, stride in steps)
    return ShardTransfer(want, piece, box, itemsize, strides, start, start + span_bytes(box.lengths, strides, itemsize))


def _place(transfer: ShardTransfer) -> tuple[str, int]:
    return transfer.piece.file, transfer.start


def check_alike(shard: Shard, pieces: Sequence[Piece]) -> None:
    """Raise `InputError` unless a tensor is stored with the shape and the type in which it is wanted."""
    if not pieces:
        raise InputError(f"'{shard.fqn}' is not in the checkpoint. Name a tensor that is: headway ckpt show")
    stored = pieces[0]
    if (stored.shape, stored.dtype) != (shard.shape, shard.dtype):
        raise InputError(
            f"'{shard.fqn}' is stored as {stored.dtype} {list(stored.shape)}, but wanted as {shard.dtype} "
            f"{list(shard.shape)}. Build the model as it was saved, or convert first: headway ckpt export"
        )


def strides_of(lengths: Sequence[int], itemsize: int) -> Shape:
    """Return the strides, in bytes, of a row-major array.

    >>> strides_of((3, 4, 5), 2)
    (40, 10, 2)
    """
    strides = [itemsize]
    for length in lengths[:0:-1]:
        strides.append(strides[-1] * length)
    return tuple(strides[::-1]) if lengths else ()


def span_bytes(lengths: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the bytes from the first to the end of the last element of a box in an array of such strides."""
    return sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True)) + itemsize


def _shares(transfers: list[ShardTransfer], group: int) -> list[list[ShardTransfer]]:
    """Cut transfers, in order, into `group` runs of even bytes; one that lies across a cut is cut itself."""
    if group == 1:
        return [transfers]
    total_bytes, done = sum(transfer.num_bytes for transfer in transfers), 0
    shares: list[list[ShardTransfer]] = [[] for _ in range(group)]
    for transfer in transfers:
        num_elements, taken = transfer.box.num_elements, 0
        while taken < num_elements:
            reader = min(done * group // total_bytes, group - 1)
            room = -(-(total_bytes * (reader + 1) // group - done) // transfer.itemsize)
            stop = num_elements if reader == group - 1 else min(num_elements, taken + max(room, 1))
            parts = flat_to_boxes(transfer.box.lengths, taken, stop)
            shares[reader] += [transfer.part(part.shifted(transfer.box.offsets)) for part in parts]
            done += (stop - taken) * transfer.itemsize
            taken = stop
    return shares


def _close_parts(wide: ShardTransfer, gap_bytes: int) -> Iterator[ShardTransfer]:
    """Cut a transfer into parts of at most `READ_BYTES`, with no long gap between their elements in the file."""
    if wide.stop - wide.start <= READ_BYTES and wide.is_contiguous:
        yield wide
    else:
        yield from (wide.part(box) for box in _cut(wide.box, wide.strides, wide.itemsize, gap_bytes))


def _cut(box: Box, strides: Shape, itemsize: int, gap_bytes: int) -> Iterator[Box]:
    """Cut a box along its outermost dimension of more than one element, and its rows again where they are long."""
    dim = next((dim for dim, length in enumerate(box.lengths) if length > 1), None)
    if dim is None:
        yield box
        return
    row = span_bytes(box.lengths[dim + 1 :], strides[dim + 1 :], itemsize)
    # Outer gaps are at least as long as inner ones: where this one is read through, so are all within.
    rows = 1 if strides[dim] - row > gap_bytes or row > READ_BYTES else (READ_BYTES - row) // strides[dim] + 1
    for first in range(0, box.lengths[dim], rows):
        count = min(rows, box.lengths[dim] - first)
        part = Box(
            (*box.offsets[:dim], box.offsets[dim] + first, *box.offsets[dim + 1 :]),
            (*box.lengths[:dim], count, *box.lengths[dim + 1 :]),
        )
        if rows > 1:
            yield part
        else:
            yield from _cut(part, strides, itemsize, gap_bytes)


def _joined(parts: Sequence[ShardTransfer], reader: int, gap_bytes: int) -> Iterator[Read]:
    """Join parts that follow each other closely in one file, up to `READ_BYTES`."""
    members: list[ShardTransfer] = []
    file, start, stop = "", 0, 0
    for part in parts:
        near = part.piece.file == file and part.start - stop <= gap_bytes
        if members and not (near and max(stop, part.stop) - start <= READ_BYTES):
            yield Read(file, start, stop, tuple(members), reader)
            members = []
        if not members:
            file, start, stop = part.piece.file, part.start, part.stop
        members.append(part)
        stop = max(stop, part.stop)
    if members:
        yield Read(file, start, stop, tuple(members), reader)


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
    return _joined_runs(taken) if taken else [(runs[-1][1],) * 2]


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


def _joined_runs(runs: list[Run]) -> list[Run]:
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
    for tensor, holder, start, stop in _cut_runs(large, num_holders, chunk_bytes):
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


def _cut_runs(
    large: Sequence[ReplicatedTensor], num_holders: int, chunk_bytes: int
) -> list[tuple[ReplicatedTensor, int, int, int]]:
    """Lay tensors end to end and cut evenly: (tensor, holder, first element, one past the last)."""
    total_bytes, begin, parts = sum(tensor.num_bytes for tensor in large), 0, []
    holder = 0
    for tensor in large:
        end, edges, owners = begin + tensor.num_bytes, [0], [holder]
        while holder + 1 < num_holders and (ideal := total_bytes * (holder + 1) // num_holders) <= end:
            holder += 1
            edge = _place_in_run(tensor, ideal - begin, chunk_bytes)
            edges.append(edge if (edge - edges[-1]) * tensor.itemsize >= chunk_bytes else edges[-1])
            owners.append(holder)
        edges.append(math.prod(tensor.shape))
        parts += [(tensor, owner, *ends) for owner, ends in zip(owners, pairwise(edges), strict=True)]
        begin = end
    return [(tensor, owner, start, stop) for tensor, owner, start, stop in parts if start < stop]


def _place_in_run(tensor: ReplicatedTensor, ideal_bytes: int, chunk_bytes: int) -> int:
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
