"""Two operations on one axis of a weight: repeat outputs, and divide an input among its copies.

>>> repeat(torch.tensor([1.0, 3.0]), 0, np.array([0, 1, 0, 1, -1]), "mean").tolist()
[1.0, 3.0, 1.0, 3.0, 2.0]
>>> divide(torch.tensor([1.0, 3.0]), 0, np.array([0, 1, 0]), None).tolist()
[0.5, 3.0, 0.5]
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def repeat(weight: torch.Tensor, dim: int, source: NDArray[np.int64], rest: str) -> torch.Tensor:
    """Return `weight` with element `source[i]` at `i` of an axis; at -1 their mean (`rest="mean"`) or zero."""
    index = torch.from_numpy(source).to(weight.device)
    out = weight.index_select(dim, index.clamp(min=0))
    free = (index < 0).nonzero().flatten()
    if free.numel():
        shape = [free.numel() if axis == dim else size for axis, size in enumerate(weight.shape)]
        value = weight.mean(dim, keepdim=True) if rest == "mean" else weight.new_zeros(())
        out.index_copy_(dim, free, value.expand(shape).contiguous())
    return out


def divide(
    weight: torch.Tensor, dim: int, source: NDArray[np.int64], drawn: torch.Tensor | None, *, reads_rest: bool = False
) -> torch.Tensor:
    """Return `weight` with the weights of one input's copies adding up to that input's weight.

    The copies `c` of input `j` have `R_c + (W_j - sum R) / n_j`: the projection of the random `drawn`, of the result's
    shape, on what keeps the sum, so that copies differ and training tells them apart. Without `drawn` they are all
    `W_j / n_j`, which stay equal for ever. An input that has no source (-1) reads zeros, so its weight is free and is
    that of `drawn`; where it reads something (`reads_rest`) it must be zero. An input with one copy has its weight bit
    for bit.
    """
    known = torch.from_numpy(np.flatnonzero(source >= 0)).to(weight.device)
    index = torch.from_numpy(source[source >= 0]).to(weight.device)
    along = [-1 if axis == dim else 1 for axis in range(weight.ndim)]
    count = torch.bincount(index, minlength=weight.shape[dim]).to(weight.dtype)
    shape = [len(source) if axis == dim else size for axis, size in enumerate(weight.shape)]
    if drawn is None:
        drawn, reads_rest = weight.new_zeros(shape), True
    own = drawn.index_select(dim, known)
    sums = torch.zeros_like(weight).index_add_(dim, index, own)
    shifted = own + ((weight - sums) / count.view(along)).index_select(dim, index)
    single = (count == 1)[index].view(along)
    values = torch.where(single, weight.index_select(dim, index), shifted)
    out = torch.zeros_like(drawn) if reads_rest else drawn.clone()
    return out.index_copy_(dim, known, values)
