"""Codecs that send a few numbers and say which: the largest, or random ones.

A packet holds the places (Elias-Fano, `torch_dense`), then the values. Shared random places are drawn alike on every
rank from a seed, so that the values are all that travels, and sums of values are values of the sum.

>>> x = torch.tensor([0.0, -5.0, 1.0, 4.0])
>>> places = topk_places(x, 2, exact=True)
>>> packet = packet_of(values_at(x, places, torch.float32), places, 4)
>>> spread(*parts(packet, 4, 2, torch.float32), torch.empty(4)).tolist()
[0.0, -5.0, 0.0, 4.0]
"""

from __future__ import annotations

import math

import numpy as np
import torch

from headway.comm.compression.torch_dense import as_bytes, as_values, pack_places, uniforms, unpack_places
from headway.cost.codecs import place_bytes

LEAST_SAMPLE = 1024
"""Numbers that a threshold is estimated from, at least."""

SAMPLED_FRACTION = 64
"""One number of so many is in the sample of a large tensor."""

LEAST = float(np.finfo(np.float32).smallest_subnormal)
"""The smallest number above zero."""

SPARE = 4
"""Standard deviations of a sampled count by which more numbers are let through than are kept."""


def topk_places(x: torch.Tensor, k: int, *, exact: bool = False) -> torch.Tensor:
    """Return the rising places of the `k` largest absolute values of `x` [n].

    A threshold from a sample lets some more than `k` through, the largest of which are kept: nearly always exactly what
    sorting gives. Where it lets too few through, everything is sorted.
    """
    n = x.numel()
    sampled = max(LEAST_SAMPLE, n // SAMPLED_FRACTION)
    if exact or sampled * 2 > n or k * 2 > n:
        return _sorted_places(x, k)
    # A stride that has no factor in common with the usual widths of matrices: it meets all of their columns.
    sample = x[:: next(stride for stride in range(n // sampled, n) if math.gcd(stride, 2 * 3 * 5 * 7) == 1)].abs()
    expected = k / n * sample.numel()
    rank = min(sample.numel(), int(expected + SPARE * (expected**0.5 + 1)))
    threshold = float(sample.kthvalue(sample.numel() - rank + 1).values)
    # Without a threshold only zeros are kept out; of a gradient of few numbers that are not zero, any zeros fill up.
    through = _beyond(x, threshold or LEAST)
    if through.numel() < k:
        if threshold:
            return _sorted_places(x, k)
        return torch.cat([through, (x == 0).nonzero().view(-1)[: k - through.numel()]]).sort().values
    # Selecting by the k-th value leaves the places in order. Of those that equal it, the first ones fill up the rest.
    values = x.index_select(0, through).abs_()
    least = values.kthvalue(values.numel() - k + 1).values
    kept = values >= least
    over = int(kept.sum()) - k
    if over:
        kept[(values == least).nonzero().view(-1)[-over:]] = False
    return through[kept]


def _sorted_places(x: torch.Tensor, k: int) -> torch.Tensor:
    """Return the rising places of the `k` largest absolute values, exactly."""
    return x.abs().topk(k, sorted=False).indices.sort().values


def _beyond(x: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return the places of absolute values of `threshold` or more.

    On the CPU by numpy, whose comparison and search take a sixth and a quarter of the time of torch's.
    """
    if x.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(np.abs(x.numpy()) >= np.float32(threshold)))
    return (x.abs() >= threshold).nonzero().view(-1)


def random_places(n: int, k: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return `k` rising places: a random one of each of k stretches of equal length, so that none comes twice."""
    cuts = torch.arange(k + 1, device=device) * n // max(k, 1)
    low, width = cuts[:-1], cuts[1:] - cuts[:-1]
    draws = torch.rand(k, generator=uniforms(device, seed), device=device)
    return low + torch.minimum((draws * width).to(torch.int64), width - 1)


def values_at(x: torch.Tensor, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [k] numbers of `x` [n]; those beyond the range of `dtype` become its largest number."""
    most = torch.finfo(dtype).max
    return x.index_select(0, places).clamp_(-most, most).to(dtype)


def packet_of(values: torch.Tensor, places: torch.Tensor, n: int) -> torch.Tensor:
    """Return the packet of [k] values at their places below `n`."""
    return torch.cat([pack_places(places, n), as_bytes(values)])


def parts(packet: torch.Tensor, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [k] float32 values and [k] int64 places of a packet."""
    size = sum(place_bytes(n, k))
    return as_values(packet[size:], dtype).to(torch.float32), unpack_places(packet[:size], n, k)


def spread(values: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write `values` to their places in `out` [n], and 0 elsewhere; returns it."""
    out.zero_()[places] = values.to(out.dtype)
    return out
