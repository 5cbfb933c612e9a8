"""Matmuls beside a collective over their rows: which shapes there are, and in which forms both can overlap.

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

import re
from dataclasses import dataclass

from headway.core.errors import InputError
from headway.core.tables import pick

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
