"""Tensors in 8 or 4 bits: blocks of numbers that share one scale, rounded to nearest or at random.

Use it to send gradients or activations in fewer bytes, or to compute with
less precise weights. A tensor is cut, in memory order, into blocks; each block
is divided by its scale, so that its largest number becomes the largest one of
the format, and rounded to the grid of the format:

    int8   the whole numbers -127..127              (one per byte)
    int4   the whole numbers -7..7                  (two per byte, the first in the low half)
    fp8    e4m3: 1 sign, 4 exponent, 3 mantissa bits, largest 448, as OCP's OFP8 defines it

With `seed`, a number between two grid points takes the upper one with the
probability that makes the mean exact (stochastic rounding): its variance is
f * (1 - f) * q^2 at the fraction f of a step q, q^2 / 6 on average.

>>> small = encode(torch.tensor([0.0, -127.0, 63.6]), "int8")
>>> decode(small).tolist(), small.num_bytes
([0.0, -127.0, 64.0], 7)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from headway.core.errors import InputError
from headway.core.rng import derived_seed
from headway.core.tables import pick

BLOCK = 256
"""Numbers that share a scale by default: 4 bytes of scale are 1.6 % of 256 bytes."""

LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Smallest scale: below it a float32 loses digits, and its quotients would leave the grid."""


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A grid of numbers that a code of a few bits can name."""

    largest: float
    """Largest number of the grid; it holds -largest too."""

    bits: int
    """Bits of a code: 8 or 4."""

    step: Callable[[torch.Tensor], torch.Tensor]
    """[n] float32 numbers -> [n] distance of the two grid points round each."""

    pack: Callable[[torch.Tensor], torch.Tensor]
    """[n] float32 numbers of the grid -> [ceil(n * bits / 8)] uint8 codes."""

    unpack: Callable[[torch.Tensor], torch.Tensor]
    """[ceil(n * bits / 8)] uint8 codes -> float32 numbers of the grid, n or one more."""


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """An encoded tensor: what `decode` needs, and nothing else has to be sent."""

    codes: torch.Tensor
    """[ceil(n * bits / 8)] uint8 Codes of all numbers, in memory order."""

    scales: torch.Tensor
    """[ceil(n / block)] float32 Factor of each block."""

    shape: torch.Size
    """Shape of the tensor; n is its number of elements."""

    dtype: torch.dtype
    """What it was, and `decode` returns."""

    number_format: str
    """Entry of `FORMATS`."""

    block: int
    """Numbers that share a scale; the last block may be shorter."""

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.numel() + 4 * self.scales.numel()


def is_finite(values: torch.Tensor) -> bool:
    """Say whether no number is NaN or infinite: a finite sum has none, and costs a quarter of asking each number."""
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def encode(
    values: torch.Tensor, number_format: str = "int8", *, block: int = BLOCK, seed: int | None = None
) -> Quantised:
    """Return `values` (any shape, floating point) in blocks of `block` numbers of a format.

    Rounds to nearest (ties to even), or with `seed` at random without bias:
    equal seeds give equal codes, so derive one for each tensor and step with
    `headway.core.rng.derived_seed`. Raises `InputError` on NaN, on infinity,
    beyond float32 too, on whole numbers, and on `block` < 1; `UnknownNameError`
    on an unknown format.
    """
    grid = pick(FORMATS, number_format, "number format")
    if block < 1:
        raise InputError(f"block is {block}; it must be >= 1.")
    if not values.is_floating_point():
        raise InputError(f"the tensor's dtype is {values.dtype}; only floating point can be encoded.")
    flat = values.detach().reshape(-1).to(torch.float32)
    if not is_finite(flat):
        at = int(torch.isfinite(flat).logical_not().nonzero()[0])
        raise InputError(f"element {at} is {float(flat[at])}; only finite numbers can be encoded. Skip this step.")
    # The last block is filled up with zeros:  n = 5, block = 2  ->  [a b][c d][e 0], scales [3].
    blocks = pad(flat, (0, -flat.numel() % block)).view(-1, block)
    scales = (blocks.abs().amax(1) / grid.largest).clamp_min(LEAST_SCALE)
    scaled = (blocks / scales[:, None]).view(-1)[: flat.numel()]
    step = grid.step(scaled)
    # x = (k + f) * step with 0 <= f < 1:  floor(k + f + u) is k + 1 with probability f for u uniform in [0, 1).
    whole = torch.round(scaled / step) if seed is None else torch.floor(scaled / step + _uniform(scaled, seed))
    rounded = (whole * step).clamp(-grid.largest, grid.largest)
    return Quantised(grid.pack(rounded), scales, values.shape, values.dtype, number_format, block)


def decode(small: Quantised) -> torch.Tensor:
    """Return the tensor, within half a step of what was encoded (a whole one where it was rounded at random)."""
    grid = FORMATS[small.number_format]
    count = small.shape.numel()
    numbers = pad(grid.unpack(small.codes)[:count], (0, -count % small.block)).view(-1, small.block)
    # The product of the largest code and a scale that was rounded up may pass the largest number of the dtype.
    most = min(torch.finfo(small.dtype).max, torch.finfo(torch.float32).max)
    values = (numbers * small.scales[:, None]).view(-1)[:count].clamp(-most, most)
    return values.to(small.dtype).view(small.shape)


def _uniform(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Return uniform numbers in [0, 1), of no generator that the script uses."""
    generator = torch.Generator(like.device).manual_seed(derived_seed(seed, "quantise") % 2**63)
    return torch.rand(like.shape, generator=generator, device=like.device)


def _unit_step(scaled: torch.Tensor) -> torch.Tensor:
    """Return the distance of whole numbers: 1."""
    return torch.ones_like(scaled)


def _e4m3_step(scaled: torch.Tensor) -> torch.Tensor:
    """Return the distance of e4m3 numbers: 2^(e - 3) in [2^e, 2^(e + 1)), with e >= -6 (below lie the subnormals)."""
    # frexp gives |x| = m * 2^k with 1/2 <= m < 1, so e = k - 1.
    exponent = torch.frexp(scaled).exponent - 1
    return torch.ldexp(torch.ones_like(scaled), exponent.clamp_min(-6) - 3)


def _pack_bytes(rounded: torch.Tensor) -> torch.Tensor:
    return rounded.to(torch.int8).view(torch.uint8)


def _unpack_bytes(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.int8).to(torch.float32)


def _pack_halves(rounded: torch.Tensor) -> torch.Tensor:
    """Return two numbers of -7..7 in each byte, as two's complements of 4 bits."""
    pairs = pad(rounded, (0, rounded.numel() % 2)).to(torch.int8).view(-1, 2)
    return ((pairs[:, 0] & 15) | (pairs[:, 1] << 4)).view(torch.uint8)


def _unpack_halves(codes: torch.Tensor) -> torch.Tensor:
    """Return both numbers of each byte; shifting an int8 to the right repeats its sign bit."""
    pairs = codes.view(torch.int8)
    return torch.stack([(pairs << 4) >> 4, pairs >> 4], 1).view(-1).to(torch.float32)


def _pack_e4m3(rounded: torch.Tensor) -> torch.Tensor:
    return rounded.to(torch.float8_e4m3fn).view(torch.uint8)


def _unpack_e4m3(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


FORMATS: dict[str, NumberFormat] = {
    "int8": NumberFormat(127.0, 8, _unit_step, _pack_bytes, _unpack_bytes),
    "int4": NumberFormat(7.0, 4, _unit_step, _pack_halves, _unpack_halves),
    "fp8": NumberFormat(448.0, 8, _e4m3_step, _pack_e4m3, _unpack_e4m3),
}
"""The formats that tensors are encoded in. Adding one is adding a line here."""
