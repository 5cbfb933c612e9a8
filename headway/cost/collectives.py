"""How long collectives take (alpha-beta closed forms), and the forms in which matmuls overlap them.

A message of n bytes takes alpha + n / rate on a link. Every algorithm here
is then `rounds(p) * alpha + volume(p) * n / rate` for p ranks, where n is the
full buffer: what one rank holds before an all-reduce, reduce-scatter or
all-to-all, and after an all-gather. (Thakur et al., "Optimization of
collective communication operations in MPICH", 2005; the pipelined double
tree is Sanders et al., 2009.) Links are used in both directions; nothing
else shares them.

>>> link = LinkSpec("example", bytes_per_s=1e9, latency_s=1e-5, source="doctest")
>>> round(collective_seconds("all_reduce", 1e6, num_ranks=4, link=link), 9)
0.00156

Matmuls beside a collective over their rows: which shapes there are, and in which forms both can overlap.

A shape is the matmul that one rank does, in all its rows:

    512x1024x4096      gather the rows of x: [512, 1024] @ [1024, 4096], each of W ranks brings 512 / W rows
    rs:512x4096x1024   scatter the rows of the sum: [512, 4096] @ [4096, 1024], each rank is left with 512 / W rows

The backward of either is the other: the gradient of the gathered x is a matmul of `MatmulShape.backward`.

Source: Chang et al., "FLUX: Fast Software-based Communication Overlap On GPUs Through Kernel Fusion" (2024); the ring
of chunks is the form of it that needs no kernel of its own.

>>> read_shape("rs:512x4096x1024").backward
MatmulShape(way='ag', m=512, k=1024, n=4096)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.cost.specs import LinkSpec


@dataclass(frozen=True, slots=True)
class Form:
    """One algorithm as a linear form in alpha and n / rate."""

    rounds: Callable[[int], float]
    """Number of ranks -> messages one after the other."""

    volume: Callable[[int], float]
    """Number of ranks -> buffers' worth of bytes that pass one link, one after the other."""


def _depth(p: int) -> int:
    """Return the height of a binary tree over p ranks."""
    return (p - 1).bit_length()


COLLECTIVES: dict[str, dict[str, Form]] = {
    "all_reduce": {
        "ring": Form(lambda p: 2 * (p - 1), lambda p: 2 * (p - 1) / p),
        "halving": Form(lambda p: 2 * _depth(p), lambda p: 2 * (p - 1) / p),
        "tree": Form(lambda p: 2 * _depth(p), lambda p: 2.0 * (p > 1)),
        "direct": Form(lambda p: float(_depth(p)), lambda p: float(_depth(p))),
    },
    "reduce_scatter": {
        "ring": Form(lambda p: p - 1, lambda p: (p - 1) / p),
        "halving": Form(lambda p: float(_depth(p)), lambda p: (p - 1) / p),
    },
    "all_gather": {
        "ring": Form(lambda p: p - 1, lambda p: (p - 1) / p),
        "doubling": Form(lambda p: float(_depth(p)), lambda p: (p - 1) / p),
    },
    "all_to_all": {"pairwise": Form(lambda p: p - 1, lambda p: (p - 1) / p)},
    "broadcast": {
        "tree": Form(lambda p: float(_depth(p)), lambda p: float(_depth(p))),
        "pipeline": Form(lambda p: p - 1, lambda p: 1.0 * (p > 1)),
    },
    "send": {"direct": Form(lambda p: 1.0, lambda p: 1.0)},
}
"""Collective -> algorithm -> form; the first algorithm of each is its default.

`halving`, `doubling` and `direct` (recursive doubling of whole buffers) are
exact for powers of two. `tree` and `pipeline` split the buffer so finely that
all links stay busy, and count one message per hop.
"""


def collective_form(kind: str, algorithm: str | None = None) -> Form:
    """Return the form of a collective; raises `UnknownNameError` with the nearest names."""
    table = pick(COLLECTIVES, kind, "collective")
    return pick(table, algorithm or next(iter(table)), f"algorithm of {kind}")


def collective_seconds(
    kind: str, num_bytes: float, *, num_ranks: int, link: LinkSpec, algorithm: str | None = None
) -> float:
    """Return the time of one collective over equal links; 0 for one rank.

    Raises `InputError` on negative sizes or fewer than one rank,
    `UnknownNameError` on names that the table does not list.
    """
    form = collective_form(kind, algorithm)
    _check(num_bytes, num_ranks)
    if num_ranks == 1:
        return 0.0
    return form.rounds(num_ranks) * link.latency_s + form.volume(num_ranks) * num_bytes / link.bytes_per_s


def _check(num_bytes: float, num_ranks: int) -> None:
    """Refuse sizes and rank counts that mean nothing."""
    if not (math.isfinite(num_bytes) and num_bytes >= 0):
        raise InputError(f"num_bytes is {num_bytes}; pass a finite size >= 0.")
    if num_ranks < 1:
        raise InputError(f"num_ranks is {num_ranks}; give at least 1.")


PLAIN, RING, SYMM_MEM = "plain", "ring:W", "symm_mem"

OVERLAPS: dict[str, int] = {PLAIN: 0, RING: 1, "ring:2W": 2, SYMM_MEM: 0}
"""Form -> chunks that the rows of each rank travel in; 0 = it is no ring. `symm_mem` is torch's own fused operator, for
CUDA devices that see each other's memory. The first is taken unless another wins."""

GATHER, SCATTER = "ag", "rs"


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """A matmul beside a collective, as one rank does it: [m, k] @ [k, n]."""

    way: str
    """`ag`: the rows of the left matrix are gathered; `rs`: the rows of the sum over ranks are scattered."""

    m: int
    """Rows over all ranks."""

    k: int
    """Columns of the left matrix."""

    n: int
    """Columns of the product."""

    def __str__(self) -> str:
        """Return what `read_shape` takes."""
        return ("" if self.way == GATHER else f"{self.way}:") + f"{self.m}x{self.k}x{self.n}"

    @property
    def backward(self) -> MatmulShape:
        """The matmul that gives the gradient of the left matrix: that of the product, times the right matrix's."""
        return MatmulShape(SCATTER if self.way == GATHER else GATHER, self.m, self.n, self.k)

    @property
    def travels(self) -> int:
        """Numbers that the collective brings together, or adds up."""
        return self.m * (self.k if self.way == GATHER else self.n)


def read_shape(text: str) -> MatmulShape:
    """Read 'MxKxN', 'ag:MxKxN' or 'rs:MxKxN'; raises `InputError` for anything else."""
    match = re.fullmatch(r"(?:(ag|rs):)?([1-9]\d{0,8})x([1-9]\d{0,8})x([1-9]\d{0,8})", text.strip())
    if match is None:
        raise InputError(
            f"the shape {text!r} is not MxKxN with whole numbers from 1; write 512x1024x4096 for rows that are "
            "gathered, rs:512x4096x1024 for rows that are scattered."
        )
    return MatmulShape(match[1] or GATHER, int(match[2]), int(match[3]), int(match[4]))


def read_form(name: str) -> str:
    """Return the name of a form; raises `UnknownNameError` with the nearest ones."""
    pick(OVERLAPS, name, "form of overlap")
    return name
