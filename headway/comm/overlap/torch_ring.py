"""Matmuls with their collective: `ag_matmul` gathers rows first, `matmul_rs` scatters the sum of rows after.

Use them in place of an all-gather and a matmul, or of a matmul and a reduce-scatter, on any backend. Both take part in
autograd, and the backward of either is a ring of the other kind. Rows may be spread unevenly.

    ag_matmul, 3 ranks, rank 0:    compute  |x0 w|x2 w|x1 w|        own shard first
                                   link     |x2 ->|x1 ->|           while one is multiplied the next travels

    matmul_rs, 3 ranks, rank 0:    compute  |for 2|for 1|for 0|     own rows last
                                   link           |for 2|for 1|     partial sums travel while the next is computed

A ring of 2W chunks cuts each shard in two: the first half is multiplied while the second one travels. Results differ
from the plain forms in the order of the sums of `matmul_rs` alone; the gather form multiplies the same rows.

Source: Chang et al., "FLUX", 2024, sections 3 and 4 (order of tiles: own shard first, own destination last).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from headway.core.errors import InputError
from headway.cost.collectives import OVERLAPS, PLAIN, RING, SYMM_MEM, read_form
from headway.runtime.lane import GATHERED, SCATTERED

DTYPES = sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str)
"""Types by number, for ranks that compare theirs."""

TILE_ROWS = 16
"""Rows of a tile: a multiple of the 2 to 16 that BLAS libraries take at a time (MKL on AVX2: 4)."""

Forms = tuple[str, str]
"""Names of the forms of forward and backward."""

Gradients = tuple[torch.Tensor | None, ...]
"""Those of both matrices, of a bias, and None of what has none."""

BROKEN = -1
"""Rows that a rank announces whose own matrices do not fit."""


def ag_matmul(
    x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup | None = None, *, form: str = RING,
    backward: str | None = None, rows: Sequence[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the rows of all ranks' x, in rank order, times w: [sum of m, n] of x [m, k] and w [k, n].

    m and n may differ between ranks. `form` and `backward` (the same by default) are names of `OVERLAPS`. `rows` are
    the m of all ranks, where they are known: otherwise ranks exchange and compare them first. One rank multiplies, and
    does nothing else. Raises `InputError` for shapes that do not fit each other or the group, and for an unknown form.
    """
    forms, group = (read_form(form), read_form(backward or form)), _group(group)
    rows = _agreed("ag_matmul", x, w, group, rows)
    _check_form(x, forms, rows)
    if len(rows) == 1:
        return x @ w
    product: torch.Tensor = _Gather.apply(x, w, group, rows, forms)  # type: ignore[no-untyped-call]  # torch's has no types
    return product


def matmul_rs(
    a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup | None = None, *, form: str = RING,
    backward: str | None = None, rows: Sequence[int] | None = None, bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return this rank's rows of the sum over ranks of a @ b: its chunk of `torch.chunk`, of a [m, k] and b [k, n].

    k may differ between ranks; a rank that `torch.chunk` leaves without rows gets [0, n]. `rows` are those that each
    rank gets, where all know them. `bias` [n], the same on all ranks, is added to the sum once; its gradient is over
    the rows of all ranks. Else as `ag_matmul`.
    """
    forms, group = (read_form(form), read_form(backward or form)), _group(group)
    rows = _agreed("matmul_rs", a, b, group, rows)
    _check_form(a, forms, rows)
    if len(rows) == 1:
        return a @ b if bias is None else a @ b + bias
    rows_sum: torch.Tensor = _Scatter.apply(a, b, group, rows, forms, bias)  # type: ignore[no-untyped-call]  # torch's has no types
    return rows_sum


def chunk_rows(m: int, ranks: int) -> list[int]:
    """Return how many of m rows `torch.chunk` gives to each rank.

    >>> chunk_rows(10, 4)
    [3, 3, 3, 1]
    """
    size = -(-m // ranks)
    return [max(min(size, m - rank * size), 0) for rank in range(ranks)]


class _Gather(torch.autograd.Function):
    """Autograd of `ag_matmul`: the gradient of x is scattered, that of w is a matmul of what was gathered."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, rows: tuple[int, ...], forms: Forms
    ) -> torch.Tensor:
        product, x_all = gathered(x, w, group, rows, forms[0])
        ctx.save_for_backward(x_all if ctx.needs_input_grad[1] else None, w)
        ctx.group, ctx.rows, ctx.form = group, rows, forms[1]
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        x_all, w = ctx.saved_tensors
        of_w: list[torch.Tensor] = []

        def weights() -> None:
            """Compute the gradient of w while rows of the other one travel."""
            if x_all is not None:
                of_w.append(x_all.t() @ grad)

        of_x: torch.Tensor | None
        if ctx.needs_input_grad[0]:
            of_x = scattered(grad, w.t(), ctx.group, ctx.rows, ctx.form, meanwhile=weights)
        else:
            of_x = None
            weights()
        return of_x, of_w.pop() if of_w else None, None, None, None


class _Scatter(torch.autograd.Function):
    """Autograd of `matmul_rs`: the gradient of the sum is gathered, and both matmuls take it."""

    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup, rows: tuple[int, ...], forms: Forms,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(a, b)
        ctx.group, ctx.rows, ctx.form = group, rows, forms[1]
        rows_sum = scattered(a, b, group, rows, forms[0])
        return rows_sum if bias is None else rows_sum.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        a, b = ctx.saved_tensors
        of_a, grad_all = gathered(grad.contiguous(), b.t(), ctx.group, ctx.rows, ctx.form)
        of_b = a.t() @ grad_all if ctx.needs_input_grad[1] else None
        return of_a, of_b, None, None, None, grad_all.sum(0) if ctx.needs_input_grad[5] else None


def gathered(
    x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, rows: Sequence[int], form: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product of `ag_matmul`, and the gathered x, without autograd."""
    if form == SYMM_MEM:
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        x_all, products = fused(x, [w], 0, group.group_name, return_A=True)
        return products[0], x_all
    if form == PLAIN:
        x_all = all_gathered(x, group, rows)
        return x_all @ w, x_all
    x_all, ring = x.new_empty(sum(rows), x.shape[1]), _RingTransfers.of(group, rows, OVERLAPS[form])
    product = x.new_empty(sum(rows), w.shape[1])
    x_all[ring.shard(ring.rank)] = x
    arriving: list[Callable[[], None]] = [_at_once] * ring.chunks
    tiles = _Tiles(sum(rows))
    for step in range(ring.size):
        shard = (ring.rank - step) % ring.size  # the shard that is multiplied: own, that of the rank before, ..
        for chunk, span in enumerate(ring.parts[shard]):
            arriving[chunk]()
            if step + 1 < ring.size:  # pass it on, and let the same chunk of the shard behind it come
                behind = ring.parts[(shard - 1) % ring.size][chunk]
                arriving[chunk] = ring.exchange(x_all[span], x_all[behind])
            for ready in tiles.completed(span):
                torch.mm(x_all[ready], w, out=product[ready])
    ring.finish()
    return product, x_all


def scattered(
    a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup, rows: Sequence[int], form: str,
    *, meanwhile: Callable[[], None] = lambda: None,
) -> torch.Tensor:  # fmt: skip
    """Return this rank's rows of `matmul_rs` without autograd; `meanwhile` is called once, where transfers go on."""
    if form == SYMM_MEM:
        meanwhile()
        fused: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, group.group_name)
        return fused
    if form == PLAIN:
        rows_sum = sum_scattered(a @ b, group, rows)
        meanwhile()
        return rows_sum
    ring = _RingTransfers.of(group, rows, OVERLAPS[form])
    arriving: list[Callable[[], None]] = [_at_once] * ring.chunks
    partial: list[torch.Tensor | None] = [None] * ring.chunks
    sums: list[torch.Tensor] = []
    for step in range(ring.size):
        target = (ring.rank - 1 - step) % ring.size  # whose rows: the rank that is reached last first, own ones last
        for chunk, span in enumerate(ring.parts[target]):
            product = a[span] @ b
            arriving[chunk]()
            so_far = partial[chunk]
            if so_far is not None:
                product += so_far
            if step + 1 == ring.size:
                sums.append(product)
                continue
            # What comes next from the rank before are the rows that this one adds to at the next step.
            coming = product.new_empty(_length(ring.parts[(target - 1) % ring.size][chunk]), b.shape[1])
            arriving[chunk], partial[chunk] = ring.exchange(product, coming), coming
        if step == 0:
            meanwhile()
    ring.finish()
    return torch.cat(sums)


class _Tiles:
    """Which tiles of rows are complete: a tile is multiplied when the last of its rows has arrived.

    A matrix product goes over its rows in blocks, and those of a last, shorter block are summed in another order. So
    only cuts at x_all tiles leave every bit as it is without cuts (a single row alone is summed in a third order):

        rows      |...own shard...|...shard before...|      tiles are [0, 16), [16, 32), ..
        tiles     |  |  |  |  |  |  |  |  |  |  |  |
        computed  |now           |with the shard before|
    """

    def __init__(self, rows: int) -> None:
        cuts = [*range(0, rows - TILE_ROWS + 1, TILE_ROWS), rows] if rows >= TILE_ROWS else [0, rows]
        self._tiles = list(itertools.pairwise(cuts))  # the last one has the rows that fill no tile as well
        self._missing = [end - begin for begin, end in self._tiles]

    def completed(self, arrived: slice) -> list[slice]:
        """Return the rows of the tiles that these rows complete, neighbours together."""
        spans: list[slice] = []
        for tile, (begin, end) in enumerate(self._tiles):
            count = min(end, arrived.stop) - max(begin, arrived.start)
            if count <= 0:
                continue
            self._missing[tile] -= count
            if not self._missing[tile]:
                first = spans.pop().start if spans and spans[-1].stop == begin else begin
                spans.append(slice(first, end))
        return spans


@dataclass(slots=True)
class _RingTransfers:
    """Transfers to the next rank of a group and from the one before."""

    group: dist.ProcessGroup
    rank: int
    size: int
    parts: list[list[slice]]
    """[ranks][chunks] the rows of each chunk of each rank's shard."""
    chunks: int
    waits: list[Any]
    """Transfers that nobody has waited for: what they send must not be freed before."""

    @classmethod
    def of(cls, group: dist.ProcessGroup, rows: Sequence[int], chunks: int) -> _RingTransfers:
        begin, parts = 0, []
        for count in rows:
            cuts = [begin + count * chunk // chunks for chunk in range(chunks + 1)]
            parts.append([slice(*pair) for pair in itertools.pairwise(cuts)])
            begin += count
        return cls(group, dist.get_rank(group), len(rows), parts, chunks, [])

    def shard(self, rank: int) -> slice:
        """Return all rows of a rank."""
        return slice(self.parts[rank][0].start, self.parts[rank][-1].stop)

    def exchange(self, leaving: torch.Tensor, coming: torch.Tensor) -> Callable[[], None]:
        """Start to send one tensor and to receive another; returns what waits for the latter. Empty ones stay."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        ops = [dist.P2POp(dist.irecv, coming, group=self.group, group_peer=before)] if coming.numel() else []
        if leaving.numel():
            ops.append(dist.P2POp(dist.isend, leaving, group=self.group, group_peer=after))
        works = dist.batch_isend_irecv(ops) if ops else []
        # Gloo gives a handle for each of both, NCCL one for all.
        received, sent = (works[:1], works[1:]) if coming.numel() else ([], works)
        self.waits += [(work, leaving) for work in sent]

        def arrived() -> None:
            for work in received:
                work.wait()

        return arrived

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for work, _ in self.waits:
            work.wait()
        self.waits.clear()


def all_gathered(x: torch.Tensor, group: dist.ProcessGroup, rows: Sequence[int]) -> torch.Tensor:
    """Return the rows of all ranks in rank order, by torch's collective; uneven ones are padded while they travel."""
    largest = max(rows)
    x_all = x.new_empty(largest * len(rows), x.shape[1])
    if x.shape[0] < largest:
        x = torch.cat([x, x.new_zeros(largest - x.shape[0], x.shape[1])])
    GATHERED(x_all, x.contiguous(), group=group)
    if min(rows) == largest:
        return x_all
    return torch.cat([shard[:count] for shard, count in zip(torch.split(x_all, largest), rows, strict=True)])


def sum_scattered(product: torch.Tensor, group: dist.ProcessGroup, rows: Sequence[int]) -> torch.Tensor:
    """Return this rank's rows of the sum over ranks, by torch's collective; uneven ones are padded."""
    largest, count = max(rows), rows[dist.get_rank(group)]
    if min(rows) < largest:
        parts = torch.split(product, list(rows))
        padding = [shard.new_zeros(largest - len(shard), shard.shape[1]) for shard in parts]
        product = torch.cat([shard for pair in zip(parts, padding, strict=True) for shard in pair])
    rows_sum = product.new_empty(largest, product.shape[1])
    SCATTERED(rows_sum, product, group=group)
    return rows_sum[:count]


def has_symm_mem(device: torch.device) -> bool:
    """Say whether torch's fused operators run on this device."""
    return device.type == "cuda" and hasattr(torch.ops.symm_mem, "fused_all_gather_matmul")


def _at_once() -> None:
    """Wait for nothing: the own shard is here."""


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group; raises `InputError` without one, or where this rank is not in it."""
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError("there is no process group to gather over. Call init_process_group() first.")
    member: Any = dist.distributed_c10d._get_default_group() if group is None else group
    if not isinstance(member, dist.ProcessGroup) or dist.get_rank(member) < 0:
        raise InputError(
            f"group is {member!r}; pass a process group that rank {dist.get_rank()} is in, or None for all ranks."
        )
    return member


def _check_form(x: torch.Tensor, forms: Sequence[str], rows: Sequence[int]) -> None:
    if SYMM_MEM in forms and not (has_symm_mem(x.device) and min(rows) == max(rows)):
        raise InputError(
            f"symm_mem needs torch's fused operators on CUDA and equal rows; x is on {x.device}, rows {list(rows)}. "
            f"Pass form='{RING}'."
        )


def _agreed(
    name: str, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, rows: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the rows of each rank; raises `InputError` on all ranks where those of any do not fit."""
    ranks, gather = dist.get_world_size(group), name == "ag_matmul"
    wrong = _misfit(name, x, w)
    if rows is None and ranks > 1:
        # [rows, columns that all must have, type]: of x when rows are gathered, of the product when it is scattered.
        facts = [BROKEN, 0, 0] if wrong else [x.shape[0], x.shape[1] if gather else w.shape[1], DTYPES.index(x.dtype)]
        announced = torch.tensor(facts, device=x.device)
        everyone = announced.new_empty(ranks * len(facts))
        GATHERED(everyone, announced, group=group)
        table = everyone.view(ranks, -1).tolist()
        if wrong is None:
            wrong = _unlike(name, table, facts)
        rows = [row[0] for row in table] if gather else chunk_rows(x.shape[0], ranks)
    elif rows is None:
        rows = [x.shape[0]]
    expected = sum(rows) if not gather else rows[dist.get_rank(group)] if len(rows) == ranks else BROKEN
    if wrong is None and (len(rows) != ranks or x.shape[0] != expected or min(rows) < 0):
        wrong = f"{name}: rows is {list(rows)} for {ranks} ranks, this one has {x.shape[0]}; pass those of each."
    if wrong:
        raise InputError(wrong)
    return tuple(rows)


def _misfit(name: str, x: torch.Tensor, w: torch.Tensor) -> str | None:
    """Say why this rank's own matrices cannot be multiplied."""
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[0]:
        return (
            f"{name} got {list(x.shape)} and {list(w.shape)}; pass [m, k] and [k, n]. Flatten leading dimensions first."
        )
    if x.dtype != w.dtype or x.device != w.device:
        return f"{name} got {x.dtype} on {x.device} and {w.dtype} on {w.device}; give both one type on one device."
    return None


def _unlike(name: str, table: Sequence[Sequence[int]], facts: Sequence[int]) -> str | None:
    """Say which rank's matrices do not fit this one's."""
    columns = "columns of x" if name == "ag_matmul" else "columns of b"
    for rank, (rows, width, dtype) in enumerate(table):
        if rows == BROKEN:
            return f"{name}: the matrices of rank {rank} do not fit each other; correct them there."
        if (width, dtype) != (facts[1], facts[2]):
            return (
                f"{name}: rank {rank} has {width} {columns} of {DTYPES[dtype]}, this one {facts[1]} of "
                f"{DTYPES[facts[2]]}; all ranks of the group need the same."
            )
        if name == "matmul_rs" and rows != facts[0]:
            return (
                f"{name}: rank {rank} has {rows} rows of a, this one {facts[0]}; all ranks of the group need the same."
            )
    return None
