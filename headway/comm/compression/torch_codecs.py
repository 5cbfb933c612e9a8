"""The codecs by kind: `CODECS[kind](*arguments)` encodes a flat tensor into bytes and decodes it.

>>> codec = CODECS["topk"](0.5)
>>> codec.decode(codec.encode(torch.tensor([3.0, 0.5, -2.0, 1.0])), 4).tolist()
[3.0, 0.0, -2.0, 0.0]

Codecs that send a few numbers and say which: the largest, or random ones.

A packet holds the places (Elias-Fano, `torch_dense`), then the values. Shared random places are drawn alike on every
rank from a seed, so that the values are all that travels, and sums of values are values of the sum.

>>> x = torch.tensor([0.0, -5.0, 1.0, 4.0])
>>> places = topk_places(x, 2, exact=True)
>>> packet = packet_of(values_at(x, places, torch.float32), places, 4)
>>> spread(*parts(packet, 4, 2, torch.float32), torch.empty(4)).tolist()
[0.0, -5.0, 0.0, 4.0]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from headway.comm.compression import torch_dense as dense
from headway.comm.compression.torch_dense import as_bytes, as_values, pack_places, uniforms, unpack_places
from headway.core.tables import Named
from headway.cost.codecs import CodecName, place_bytes, read_codec

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
"""Types of values, by the word in a codec's name."""


class EncodeFn(Protocol):
    """Turns [n] float32 into uint8; a seed gives the same random choices again."""

    def __call__(self, x: torch.Tensor, codec: CodecName, seed: int) -> torch.Tensor:
        """Return the packet."""
        ...


class DecodeFn(Protocol):
    """Turns a packet back into numbers."""

    def __call__(self, packet: torch.Tensor, codec: CodecName, out: torch.Tensor, seed: int) -> None:
        """Write them into `out` [n] float32."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Codec:
    """A codec with its arguments."""

    name: CodecName
    """What it is."""

    encoding: EncodeFn
    """How it encodes."""

    decoding: DecodeFn
    """How it decodes."""

    biased: bool
    """Whether the mean of what is decoded differs from what was encoded: then residuals are worth keeping."""

    draws: Iterator[int] = field(default_factory=itertools.count)
    """Seeds of calls that name none."""

    scratch: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    """What `add` decodes into: memory that is mapped anew at each call costs more than decoding."""

    def encode(self, x: torch.Tensor, seed: int | None = None) -> torch.Tensor:
        """Return the packet of `x` (flat, finite): uint8 of `headway.cost.codecs.wire_bytes`.

        Without `seed` each call draws anew, but for shared places, which then are those of seed 0.
        """
        given = (0 if self.name.kind == "shared-randomk" else next(self.draws)) if seed is None else seed
        return self.encoding(x.detach().reshape(-1).to(torch.float32), self.name, given)

    def fits(self, x: torch.Tensor) -> bool:
        """Say whether `x` (flat, finite) lies in the codec's range: a half precision number is 65,504 at most."""
        most = float(torch.finfo(torch.float16).max)
        return self.name.kind != "half" or not x.numel() or float(torch.linalg.vector_norm(x, float("inf"))) <= most

    def decode(self, packet: torch.Tensor, n: int, seed: int | None = None) -> torch.Tensor:
        """Return the [n] float32 of a packet; `seed` as given to `encode`, where places are shared."""
        out = torch.empty(n, device=packet.device)
        if n:
            self.decoding(packet, self.name, out, seed or 0)
        return out

    def add(self, target: torch.Tensor, packet: torch.Tensor, alpha: float, seed: int | None = None) -> None:
        """Add `alpha` times what a packet says to `target` [n] float32; a sparse kind touches its places alone."""
        if self.name.kind in PLACES:
            values, places = self._parts(packet, target.numel())
            target.index_add_(0, places, values, alpha=alpha)
        else:
            n, scratch = target.numel(), self.scratch.get(target.device)
            if scratch is None or scratch.numel() < n:
                scratch = self.scratch[target.device] = torch.empty(n, device=target.device)
            self.decoding(packet, self.name, scratch[:n], seed or 0)
            target.add_(scratch[:n], alpha=alpha)

    def put(self, target: torch.Tensor, packet: torch.Tensor) -> None:
        """Write what a packet says into `target` [n] float32."""
        self.decoding(packet, self.name, target, 0)

    def take(self, x: torch.Tensor, seed: int) -> torch.Tensor:
        """Return the packet of `x` [n] float32, and leave in `x` what the packet does not say."""
        if self.name.kind not in PLACES:
            packet = self.encode(x, seed)
            self.add(x, packet, -1.0, seed)
            return packet
        places = PLACES[self.name.kind](x, self.name, seed)
        values = values_at(x, places, DTYPES[self.name.type])
        x.index_add_(0, places, values.to(torch.float32), alpha=-1.0)
        return packet_of(values, places, x.numel())

    def _parts(self, packet: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return parts(packet, n, self.name.kept(n), DTYPES[self.name.type])


def codec_of(name: str) -> Codec:
    """Return the codec that a name says. Raises as `read_codec`."""
    return CODECS[read_codec(name).kind](*name.split(":")[1:])


def _made(kind: str, encoding: EncodeFn, decoding: DecodeFn, biased: bool) -> Callable[..., Codec]:
    """Return the function that makes a codec of a kind from the arguments of its name."""

    def make(*arguments: object) -> Codec:
        """Return the codec; raises `InputError` where an argument is invalid."""
        return Codec(read_codec(kind, *arguments), encoding, decoding, biased)

    return make


def _cast(dtype: torch.dtype) -> tuple[EncodeFn, DecodeFn]:
    return (
        lambda x, codec, seed: dense.cast_encode(x, dtype),
        lambda packet, codec, out, seed: dense.cast_decode(packet, dtype, out),
    )


def _dither(natural: bool) -> tuple[EncodeFn, DecodeFn]:
    return (
        lambda x, codec, seed: dense.dither_encode(x, codec.levels, codec.bits(), natural, seed),
        lambda packet, codec, out, seed: dense.dither_decode(packet, out, codec.levels, codec.bits(), natural),
    )


def _placing(x: torch.Tensor, codec: CodecName, seed: int) -> torch.Tensor:
    places = PLACES[codec.kind](x, codec, seed)
    return packet_of(values_at(x, places, DTYPES[codec.type]), places, x.numel())


def _placed(packet: torch.Tensor, codec: CodecName, out: torch.Tensor, seed: int) -> None:
    n = out.numel()
    spread(*parts(packet, n, codec.kept(n), DTYPES[codec.type]), out)


def _shared(x: torch.Tensor, codec: CodecName, seed: int) -> torch.Tensor:
    return dense.as_bytes(x[random_places(x.numel(), codec.kept(x.numel()), seed, x.device)])


def _unshared(packet: torch.Tensor, codec: CodecName, out: torch.Tensor, seed: int) -> None:
    places = random_places(out.numel(), codec.kept(out.numel()), seed, packet.device)
    spread(dense.as_values(packet, torch.float32), places, out)


PLACES: dict[str, EncodeFn] = {
    "topk": lambda x, codec, seed: topk_places(x, codec.kept(x.numel()), exact=codec.exact),
    "randomk": lambda x, codec, seed: random_places(x.numel(), codec.kept(x.numel()), seed, x.device),
}
"""Kinds that send places -> which ones."""

CODECS: dict[str, Callable[..., Codec]] = Named("codec", {
    "half": _made("half", *_cast(torch.float16), biased=False),
    "bfloat16": _made("bfloat16", *_cast(torch.bfloat16), biased=False),
    "sign": _made(
        "sign",
        lambda x, codec, seed: dense.sign_encode(x),
        lambda packet, codec, out, seed: dense.sign_decode(packet, out),
        biased=True,
    ),
    "topk": _made("topk", _placing, _placed, biased=True),
    "randomk": _made("randomk", _placing, _placed, biased=True),
    "shared-randomk": _made("shared-randomk", _shared, _unshared, biased=True),
    "dither": _made("dither", *_dither(natural=False), biased=False),
    "natural": _made("natural", *_dither(natural=True), biased=False),
    "int8": _made(
        "int8",
        lambda x, codec, seed: dense.int8_encode(x),
        lambda packet, codec, out, seed: dense.int8_decode(packet, out),
        biased=True,
    ),
})  # fmt: skip
"""Kind -> the function that makes a codec of its arguments. Adding one is adding a line here and in `ARGUMENTS`."""


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
