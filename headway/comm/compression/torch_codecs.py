"""The codecs by kind: `CODECS[kind](*arguments)` encodes a flat tensor into bytes and decodes it.

>>> codec = CODECS["topk"](0.5)
>>> codec.decode(codec.encode(torch.tensor([3.0, 0.5, -2.0, 1.0])), 4).tolist()
[3.0, 0.0, -2.0, 0.0]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from headway.comm.compression import torch_dense as dense
from headway.comm.compression import torch_sparse as sparse
from headway.core.tables import Named
from headway.cost.codecs import CodecName, read_codec

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
        values = sparse.values_at(x, places, DTYPES[self.name.type])
        x.index_add_(0, places, values.to(torch.float32), alpha=-1.0)
        return sparse.packet_of(values, places, x.numel())

    def _parts(self, packet: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return sparse.parts(packet, n, self.name.kept(n), DTYPES[self.name.type])


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
    return sparse.packet_of(sparse.values_at(x, places, DTYPES[codec.type]), places, x.numel())


def _placed(packet: torch.Tensor, codec: CodecName, out: torch.Tensor, seed: int) -> None:
    n = out.numel()
    sparse.spread(*sparse.parts(packet, n, codec.kept(n), DTYPES[codec.type]), out)


def _shared(x: torch.Tensor, codec: CodecName, seed: int) -> torch.Tensor:
    return dense.as_bytes(x[sparse.random_places(x.numel(), codec.kept(x.numel()), seed, x.device)])


def _unshared(packet: torch.Tensor, codec: CodecName, out: torch.Tensor, seed: int) -> None:
    places = sparse.random_places(out.numel(), codec.kept(out.numel()), seed, packet.device)
    sparse.spread(dense.as_values(packet, torch.float32), places, out)


PLACES: dict[str, EncodeFn] = {
    "topk": lambda x, codec, seed: sparse.topk_places(x, codec.kept(x.numel()), exact=codec.exact),
    "randomk": lambda x, codec, seed: sparse.random_places(x.numel(), codec.kept(x.numel()), seed, x.device),
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
