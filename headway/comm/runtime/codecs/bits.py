"""Whole numbers of a few bits each, packed into bytes; and rising places in Elias-Fano form. Little endian.

Number i lies at bits [i * bits, (i + 1) * bits) of the whole, so n of them take ceil(n * bits / 8) bytes:

    bits = 3    byte 0: 22111000   byte 1: 5444333 2   ...    (digits name the number a bit belongs to)

Everything is a few passes of torch over whole tensors, on the device of the tensor.

>>> pack(torch.tensor([1, 0, 1, 1]), 1).tolist()
[13]
>>> unpack(pack(torch.arange(9), 5), 5, 9).tolist()
[0, 1, 2, 3, 4, 5, 6, 7, 8]
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import pad

from headway.cost.codecs import low_bits, place_bytes

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
