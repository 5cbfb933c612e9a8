"""Codecs that send a few numbers and say which: the largest, or random ones.

A packet holds the places (Elias-Fano, `bits`), then the values. Shared random places are drawn alike on every rank
from a seed, so that the values are all that travels, and sums of values are values of the sum.

>>> packet = topk_encode(torch.tensor([0.0, -5.0, 1.0, 4.0]), 2, torch.float32, exact=True)
>>> sparse_decode(packet, 4, 2, torch.float32).tolist()
[0.0, -5.0, 0.0, 4.0]
"""

from __future__ import annotations

import math

import numpy as np
import torch

from headway.comm.runtime.codecs.bits import pack_places, unpack_places
from headway.comm.runtime.codecs.dense import as_bytes, as_values, uniform
from headway.cost.codecs import place_bytes

LEAST_SAMPLE = 1024
"""Numbers that a threshold is estimated from, at least."""

SAMPLED_FRACTION = 64
"""One number of so many is in the sample of a large tensor."""

SPARE = 4
"""Standard deviations of a sampled count by which more numbers are let through than are kept."""


def topk_places(x: torch.Tensor, k: int, *, exact: bool = False) -> torch.Tensor:
    """Return the rising places of the `k` largest absolute values of `x` [n].

    A threshold from a sample lets some more than `k` through, the largest of which are kept: nearly always exactly what
    sorting gives. Where it lets too few through, everything is sorted.
    """
    n, size = x.numel(), x.abs()
    sampled = max(LEAST_SAMPLE, n // SAMPLED_FRACTION)
    if exact or sampled * 2 > n or k * 2 > n:
        return size.topk(k, sorted=False).indices.sort().values
    # A stride that has no factor in common with the usual widths of matrices: it meets all of their columns.
    sample = size[:: next(stride for stride in range(n // sampled, n) if math.gcd(stride, 2 * 3 * 5 * 7) == 1)]
    expected = k / n * sample.numel()
    rank = min(sample.numel(), int(expected + SPARE * (expected**0.5 + 1)))
    threshold = sample.kthvalue(sample.numel() - rank + 1).values
    through = _where((size >= threshold) & (size > 0) if float(threshold) == 0 else size >= threshold)
    if through.numel() < k and float(threshold) == 0:  # a gradient of few numbers that are not zero: any zeros do
        return torch.cat([through, _where(size == 0)[: k - through.numel()]]).sort().values
    if through.numel() < k:
        return size.topk(k, sorted=False).indices.sort().values
    # Selecting by the k-th value leaves the places in order. Of those that equal it, the first ones fill up the rest.
    values = size.index_select(0, through)
    least = values.kthvalue(values.numel() - k + 1).values
    above, equal = values > least, (values == least).nonzero().view(-1)
    above[equal[: k - int(above.sum())]] = True
    return through[above]


def _where(mask: torch.Tensor) -> torch.Tensor:
    """Return the places that are set; on the CPU by numpy, which takes a quarter of the time of `nonzero`."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().view(-1)


def random_places(n: int, k: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return `k` rising places: a random one of each of k stretches of equal length, so that none comes twice."""
    cuts = torch.arange(k + 1, device=device) * n // max(k, 1)
    low, width = cuts[:-1], cuts[1:] - cuts[:-1]
    draws = uniform(torch.empty(k, device=device), seed)
    return low + torch.minimum((draws * width).to(torch.int64), width - 1)


def packet_of(x: torch.Tensor, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the packet of `x` [n] at `places`; values beyond the range of `dtype` become its largest number."""
    most = torch.finfo(dtype).max
    return torch.cat([pack_places(places, x.numel()), as_bytes(x.index_select(0, places).clamp(-most, most).to(dtype))])


def topk_encode(x: torch.Tensor, k: int, dtype: torch.dtype, *, exact: bool) -> torch.Tensor:
    """Return the packet of the `k` largest absolute values."""
    return packet_of(x, topk_places(x, k, exact=exact), dtype)


def sparse_decode(packet: torch.Tensor, n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [n] float32: the values at their places, 0 elsewhere."""
    return spread(*parts(packet, n, k, dtype), n)


def parts(packet: torch.Tensor, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [k] float32 values and [k] int64 places of a packet."""
    size = sum(place_bytes(n, k))
    return as_values(packet[size:], dtype).to(torch.float32), unpack_places(packet[:size], n, k)


def spread(values: torch.Tensor, places: torch.Tensor, n: int) -> torch.Tensor:
    """Return [n] float32 with `values` at `places` and 0 elsewhere."""
    dense = torch.zeros(n, device=values.device)
    dense[places] = values.to(torch.float32)
    return dense
