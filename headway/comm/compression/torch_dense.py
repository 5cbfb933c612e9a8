"""Whole numbers of a few bits each, packed into bytes; and rising places in Elias-Fano form. Little endian.

Number i lies at bits [i * bits, (i + 1) * bits) of the whole, so n of them take ceil(n * bits / 8) bytes:

    bits = 3    byte 0: 22111000   byte 1: 5444333 2   ...    (digits name the number a bit belongs to)

Everything is a few passes of torch over whole tensors, on the device of the tensor.

>>> pack(torch.tensor([1, 0, 1, 1]), 1).tolist()
[13]
>>> unpack(pack(torch.arange(9), 5), 5, 9).tolist()
[0, 1, 2, 3, 4, 5, 6, 7, 8]

Codecs that send every number in fewer bits. A packet is uint8; n = 0 gives an empty one.

>>> packet = sign_encode(torch.tensor([1.0, -3.0, 2.0]))
>>> out = torch.empty(3)
>>> sign_decode(packet, out); out.tolist()  # the mean of the absolute values, with the signs
[2.0, -2.0, 2.0]
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import pad

from headway.core.rng import derived_seed
from headway.cost.codecs import INT8_BLOCK, SCALE_BYTES, low_bits, place_bytes
from headway.runtime import quantize

GATHER = 0x0102040810204080
"""Sum of 2^(56 - 7 i): byte i of a product with it lands on bit 56 + i, and no other pair of terms reaches bits 56..63
or the same bit below, so nothing is carried."""


def negative(x: torch.Tensor) -> torch.Tensor:
    """Return [ceil(n / 8)] uint8: a bit per number of `x` [n], set where it is below zero."""
    if x.device.type == "cpu":  # numpy compares and packs in a seventh of the time of torch's comparison alone
        return torch.from_numpy(np.packbits(x.numpy() < 0, bitorder="little"))
    return pack(x < 0, 1)


def pack(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return [n] whole numbers below 2^bits as [ceil(n * bits / 8)] uint8; `bits` is 1..8."""
    n = numbers.numel()
    if bits == 1 and numbers.device.type == "cpu":
        return torch.from_numpy(np.packbits(numbers.to(torch.bool).numpy(), bitorder="little"))
    grouped = pad(numbers, (0, -n % 8))
    if bits == 1:  # 0 or 1 in each of eight bytes: one product per group gathers them
        packed = (grouped.to(torch.uint8).view(torch.int64) * GATHER) >> 56
        return packed.to(torch.uint8)
    if bits in (2, 4, 8):  # neighbours side by side in bytes, until these are full
        packed, width = grouped.to(torch.uint8), bits
        while width < 8:
            packed, width = packed[::2] | packed[1::2] << width, 2 * width
        return packed[: -(-n * bits // 8)]
    shifts = torch.arange(0, 8 * bits, bits, device=numbers.device)
    words = (grouped.view(-1, 8).to(torch.int64) << shifts).sum(1)
    # Eight numbers of b bits are the lowest b bytes of their word.
    return words.view(torch.uint8).view(-1, 8)[:, :bits].reshape(-1)[: -(-n * bits // 8)].contiguous()


def unpack(packed: torch.Tensor, bits: int, n: int) -> torch.Tensor:
    """Return the [n] int64 numbers that `pack` packed."""
    if bits == 8:
        return packed[:n].to(torch.int64)
    if bits == 1 and packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=n, bitorder="little")).to(torch.int64)
    groups = -(-n // 8)
    rows = pad(packed, (0, groups * bits - packed.numel())).view(groups, bits)
    words = pad(rows, (0, 8 - bits)).contiguous().view(torch.int64)
    shifts = torch.arange(0, 8 * bits, bits, device=packed.device)
    return ((words >> shifts) & ((1 << bits) - 1)).view(-1)[:n]


def by_byte(table: torch.Tensor, bits: int) -> torch.Tensor:
    """Return [256, 8 / bits] what the numbers in each byte stand for: `table` [2^bits], for `bits` 1, 2, 4 or 8."""
    shifts = torch.arange(0, 8, bits, device=table.device)
    return table[(torch.arange(256, device=table.device)[:, None] >> shifts) & ((1 << bits) - 1)]


def pack_places(places: torch.Tensor, n: int) -> torch.Tensor:
    """Return [k] rising places below `n` as uint8: all low bits, then the rest in unary (Elias, 1974; Fano, 1971).

    Place i with the upper part h sets bit i + h of the bitmap, so upper parts rise with the bits that follow.
    """
    k = places.numel()
    if not k:
        return torch.empty(0, dtype=torch.uint8, device=places.device)
    low = low_bits(n, k)
    low_size, high_size = place_bytes(n, k)
    bitmap = torch.zeros(high_size * 8, dtype=torch.uint8, device=places.device)
    bitmap[(places >> low) + torch.arange(k, device=places.device)] = 1
    return torch.cat([_pack_low(places & ((1 << low) - 1), low)[:low_size], pack(bitmap, 1)])


def unpack_places(packed: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Return the [k] int64 places that `pack_places` packed."""
    if not k:
        return torch.empty(0, dtype=torch.int64, device=packed.device)
    low = low_bits(n, k)
    low_size, high_size = place_bytes(n, k)
    high = _set_bits(packed[low_size : low_size + high_size])[:k] - torch.arange(k, device=packed.device)
    return (high << low) | _unpack_low(packed[:low_size], low, k)


def _set_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return the places of the bits that are set."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(np.unpackbits(packed.numpy(), bitorder="little")))
    return unpack(packed, 1, packed.numel() * 8).nonzero().view(-1)


def _pack_low(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return numbers of any size: whole bytes of each first, plane by plane, then the bits that are left over."""
    planes = [((numbers >> shift) & 255).to(torch.uint8) for shift in range(0, bits - 7, 8)]
    rest = bits % 8
    if rest:
        planes.append(pack(numbers >> (bits - rest), rest))
    return torch.cat(planes) if planes else torch.empty(0, dtype=torch.uint8, device=numbers.device)


def _unpack_low(packed: torch.Tensor, bits: int, k: int) -> torch.Tensor:
    numbers = torch.zeros(k, dtype=torch.int64, device=packed.device)
    for plane in range(bits // 8):
        numbers |= packed[plane * k : (plane + 1) * k].to(torch.int64) << (8 * plane)
    rest = bits % 8
    if rest:
        numbers |= unpack(packed[bits // 8 * k :], rest, k) << (bits - rest)
    return numbers


# Codecs that send every number in fewer bits. A packet is uint8; n = 0 gives an empty one.

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
