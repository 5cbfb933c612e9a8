"""Codecs that send every number in fewer bits. A packet is uint8; n = 0 gives an empty one.

>>> packet = sign_encode(torch.tensor([1.0, -3.0, 2.0]))
>>> sign_decode(packet, 3).tolist()  # the mean of the absolute values, with the signs
[2.0, -2.0, 2.0]
"""

from __future__ import annotations

import torch

from headway.comm.runtime.codecs.bits import pack, unpack
from headway.core.rng import derived_seed
from headway.cost.codecs import INT8_BLOCK, SCALE_BYTES
from headway.runtime import quantize

SIGNS: dict[torch.device, torch.Tensor] = {}
"""Device -> [256, 8] float32: the signs that the bits of each byte stand for (a set bit is negative)."""


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as uint8."""
    return values.contiguous().view(-1).view(torch.uint8)


def as_values(packet: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a part of a packet: copied where it does not begin at a multiple of their size."""
    size = torch.empty(0, dtype=dtype).element_size()
    return (packet.clone() if packet.storage_offset() % size else packet).view(dtype)


def uniform(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Return uniform numbers in [0, 1), from no generator that a script uses."""
    generator = torch.Generator(like.device).manual_seed(derived_seed(seed, "codec") % 2**63)
    return torch.rand(like.shape, generator=generator, device=like.device)


def cast_encode(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `x` in a type of 2 bytes; what lies beyond its range becomes its largest number."""
    most = torch.finfo(dtype).max
    return as_bytes(x.clamp(-most, most).to(dtype))


def cast_decode(packet: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [n] float32."""
    return as_values(packet, dtype).to(torch.float32)


def sign_encode(x: torch.Tensor) -> torch.Tensor:
    """Return a bit per number, set where it is negative, and the mean absolute value (float32)."""
    if not x.numel():
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    scale = x.abs().mean().clamp(max=torch.finfo(torch.float32).max).view(1)  # a sum beyond float32 is infinite
    return torch.cat([pack(x < 0, 1), as_bytes(scale)])


def sign_decode(packet: torch.Tensor, n: int) -> torch.Tensor:
    """Return [n] float32: plus or minus the scale."""
    if not n:
        return torch.empty(0, device=packet.device)
    scale = as_values(packet[-SCALE_BYTES:], torch.float32)
    table = SIGNS.get(packet.device)
    if table is None:
        bits = torch.arange(256, device=packet.device)[:, None] >> torch.arange(8, device=packet.device)
        table = SIGNS[packet.device] = 1.0 - 2.0 * (bits & 1)
    return (table * scale).index_select(0, packet[:-SCALE_BYTES].to(torch.int32)).view(-1)[:n]


def dither_encode(x: torch.Tensor, levels: int, bits: int, natural: bool, seed: int) -> torch.Tensor:
    """Return level and sign of each number, packed, and the largest absolute value (float32), without bias.

    Linear levels are j / levels for j = 0..levels; natural ones are 0 and 2^(j - levels) for j = 1..levels. A number
    between two of them takes the upper one with the probability that makes its mean exact.
    """
    if not x.numel():
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    scale = x.abs().amax().to(torch.float32)
    share = x.abs().to(torch.float32) / scale.clamp_min(torch.finfo(torch.float32).tiny)
    draws = uniform(share, seed)
    if natural:
        # share in [2^(e - 1), 2^e) lies between level e - 1 + levels and the next; below 2^(1 - levels) lies level 0.
        below = (torch.frexp(share).exponent - 1 + levels).clamp(0, levels)
        low = torch.where(below > 0, torch.ldexp(torch.ones_like(share), below - levels), 0.0)
        step = torch.where(below > 0, low, 2.0 ** (1 - levels))
        level = below + (draws * step < share - low)
    else:
        level = torch.floor(share * levels + draws)
    level = level.clamp(0, levels).to(torch.int64)
    return torch.cat([pack(level << 1 | (x < 0), bits), as_bytes(scale.view(1))])


def dither_decode(packet: torch.Tensor, n: int, levels: int, bits: int, natural: bool) -> torch.Tensor:
    """Return [n] float32."""
    if not n:
        return torch.empty(0, device=packet.device)
    scale = as_values(packet[-SCALE_BYTES:], torch.float32)
    grid = torch.arange(levels + 1, dtype=torch.float32, device=packet.device)
    grid = torch.where(grid > 0, torch.exp2(grid - levels), 0.0) if natural else grid / levels
    # Entry of the table: code = level * 2 + sign; codes that no level has stay 0.
    table = torch.zeros(1 << bits, device=packet.device)
    table[: 2 * grid.numel()] = torch.stack([grid, -grid], 1).view(-1)
    return (table * scale).index_select(0, unpack(packet[:-SCALE_BYTES], bits, n))


def int8_encode(x: torch.Tensor) -> torch.Tensor:
    """Return the codes of blocks of 256 numbers, then their scales (float32)."""
    if not x.numel():
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    small = quantize.encode(x, "int8", block=INT8_BLOCK)
    return torch.cat([small.codes, as_bytes(small.scales)])


def int8_decode(packet: torch.Tensor, n: int) -> torch.Tensor:
    """Return [n] float32."""
    if not n:
        return torch.empty(0, device=packet.device)
    scales = as_values(packet[n:], torch.float32)
    small = quantize.Quantised(packet[:n], scales, torch.Size([n]), torch.float32, "int8", INT8_BLOCK)
    return quantize.decode(small)
