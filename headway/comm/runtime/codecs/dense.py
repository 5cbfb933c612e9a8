"""Codecs that send every number in fewer bits. A packet is uint8; n = 0 gives an empty one.

>>> packet = sign_encode(torch.tensor([1.0, -3.0, 2.0]))
>>> out = torch.empty(3)
>>> sign_decode(packet, out); out.tolist()  # the mean of the absolute values, with the signs
[2.0, -2.0, 2.0]
"""

from __future__ import annotations

import torch

from headway.comm.runtime.codecs.bits import by_byte, negative, pack, unpack
from headway.core.rng import derived_seed
from headway.cost.codecs import INT8_BLOCK, SCALE_BYTES
from headway.runtime import quantize

STRETCH = 32_768
"""Numbers that one pass after the other goes over before the next ones: intermediate results stay in the cache, and
their memory comes from the heap. Whole tensors of them are mapped anew at each call, whose page faults take ten times
as long as the arithmetic. A multiple of 8 and of `INT8_BLOCK`."""

SIGNS: dict[torch.device, torch.Tensor] = {}
"""Device -> [256, 8] float32: the signs that the bits of each byte stand for (a set bit is negative)."""


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as uint8."""
    return values.contiguous().view(-1).view(torch.uint8)


def as_values(packet: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a part of a packet: copied where it does not begin at a multiple of their size."""
    size = torch.empty(0, dtype=dtype).element_size()
    return (packet.clone() if packet.storage_offset() % size else packet).view(dtype)


def uniforms(device: torch.device, seed: int) -> torch.Generator:
    """Return a generator that no script uses."""
    return torch.Generator(device).manual_seed(derived_seed(seed, "codec") % 2**63)


def stretches(x: torch.Tensor, step: int = STRETCH) -> list[torch.Tensor]:
    """Return views of `step` numbers each, the last one shorter."""
    return [x[first : first + step] for first in range(0, x.numel(), step)]


def cast_encode(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `x` in a type of 2 bytes; what lies beyond its range (see `Codec.fits`) becomes its largest number."""
    most = torch.finfo(dtype).max
    packet = torch.empty(2 * x.numel(), dtype=torch.uint8, device=x.device)
    for part, small in zip(stretches(x), stretches(packet.view(dtype)), strict=True):
        small.copy_(part.clamp(-most, most))
    return packet


def cast_decode(packet: torch.Tensor, dtype: torch.dtype, out: torch.Tensor) -> None:
    """Write [n] float32."""
    out.copy_(as_values(packet, dtype))


def sign_encode(x: torch.Tensor) -> torch.Tensor:
    """Return a bit per number, set where it is negative, and the mean absolute value (float32)."""
    if not x.numel():
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    scale = x.abs().mean().clamp(max=torch.finfo(torch.float32).max).view(1)  # a sum beyond float32 is infinite
    return torch.cat([negative(x), as_bytes(scale)])


def sign_decode(packet: torch.Tensor, out: torch.Tensor) -> None:
    """Write [n] float32: plus or minus the scale."""
    scale = as_values(packet[-SCALE_BYTES:], torch.float32)
    table = SIGNS.get(packet.device)
    if table is None:
        table = SIGNS[packet.device] = by_byte(torch.tensor([1.0, -1.0], device=packet.device), 1)
    _look_up(table * scale, packet[:-SCALE_BYTES], out)


def _look_up(table: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
    """Write what the bytes `codes` stand for by `table` [256, numbers in a byte]."""
    whole = out.numel() // table.shape[1]
    rows = out[: whole * table.shape[1]].view(whole, table.shape[1])
    torch.index_select(table, 0, codes[:whole].to(torch.int32), out=rows)
    if rows.numel() < out.numel():
        out[rows.numel() :] = table[int(codes[whole])][: out.numel() - rows.numel()]


def dither_encode(x: torch.Tensor, levels: int, bits: int, natural: bool, seed: int) -> torch.Tensor:
    """Return level and sign of each number, packed, and the largest absolute value (float32), without bias.

    Linear levels are j / levels for j = 0..levels; natural ones are 0 and 2^(j - levels) for j = 1..levels. A number
    between two of them takes the upper one with the probability that makes its mean exact.
    """
    if not x.numel():
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    least, most = x.aminmax()
    scale = torch.maximum(-least, most).to(torch.float32)
    draws = uniforms(x.device, seed)
    codes = [_dithered(part, scale, levels, bits, natural, draws) for part in stretches(x)]
    return torch.cat([*codes, as_bytes(scale.view(1))])


def _dithered(
    x: torch.Tensor, scale: torch.Tensor, levels: int, bits: int, natural: bool, generator: torch.Generator
) -> torch.Tensor:
    """Return level and sign of a stretch of numbers, packed."""
    share = x.abs().to(torch.float32).div_(scale.clamp_min(torch.finfo(torch.float32).tiny))
    draws = torch.rand(share.shape, generator=generator, device=share.device)
    if natural:
        # share in [2^(e - 1), 2^e) lies between level e - 1 + levels and the next; below 2^(1 - levels) lies level 0.
        below = (torch.frexp(share).exponent - 1 + levels).clamp(0, levels) * (share > 0)  # of 0 the exponent is 0
        low = torch.where(below > 0, torch.ldexp(torch.ones_like(share), below - levels), 0.0)
        step = torch.where(below > 0, low, 2.0 ** (1 - levels))
        level = below + (draws * step < share - low)
    else:
        level = draws.add_(share, alpha=levels)  # whole numbers below: what is cut off is the fraction
    level = level.clamp_(0, levels).to(torch.uint8)
    signs = (x.view(torch.int32) >> 31).to(torch.uint8) & 1  # a comparison takes ten times as long
    return pack((level << 1) | signs, bits)


def dither_decode(packet: torch.Tensor, out: torch.Tensor, levels: int, bits: int, natural: bool) -> None:
    """Write [n] float32."""
    scale = as_values(packet[-SCALE_BYTES:], torch.float32)
    grid = torch.arange(levels + 1, dtype=torch.float32, device=packet.device)
    grid = torch.where(grid > 0, torch.exp2(grid - levels), 0.0) if natural else grid / levels
    # Entry of the table: code = level * 2 + sign; codes that no level has stay 0.
    table = torch.zeros(1 << bits, device=packet.device)
    table[: 2 * grid.numel()] = torch.stack([grid, -grid], 1).view(-1)
    table *= scale
    codes = packet[:-SCALE_BYTES]
    if 8 % bits == 0:
        _look_up(by_byte(table, bits), codes, out)
        return
    # Eight numbers end with a byte.
    for part, numbers in zip(stretches(codes, STRETCH // 8 * bits), stretches(out), strict=True):
        torch.index_select(table, 0, unpack(part, bits, numbers.numel()), out=numbers)


def int8_encode(x: torch.Tensor) -> torch.Tensor:
    """Return the codes of blocks of 256 numbers, then their scales (float32)."""
    if not x.numel():
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    small = [quantize.encode(part, "int8", block=INT8_BLOCK) for part in stretches(x)]
    return torch.cat([*(part.codes for part in small), *(as_bytes(part.scales) for part in small)])


def int8_decode(packet: torch.Tensor, out: torch.Tensor) -> None:
    """Write [n] float32."""
    n = out.numel()
    scales = as_values(packet[n:], torch.float32)
    parts = zip(stretches(out), stretches(packet[:n]), stretches(scales, STRETCH // INT8_BLOCK), strict=True)
    for numbers, codes, own in parts:
        small = quantize.Quantised(codes, own, numbers.shape, torch.float32, "int8", INT8_BLOCK)
        numbers.copy_(quantize.decode(small))
