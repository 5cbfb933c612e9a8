"""Gradient codecs by name: the bytes of a packet, and the seconds that encoding and decoding took where measured.

A codec's name is its kind and arguments, separated by colons:

    half, bfloat16              2 bytes per number
    sign                        1 bit per number and one scale
    topk:F[:f32|bf16|f16][:exact]  the largest fraction F of numbers (or a count above 1) with their places
    randomk:F[:TYPE]            a random fraction F, with its places
    shared-randomk:F            the same random fraction on all ranks: values only
    dither:S, natural:S         S levels above zero, rounded at random without bias; `natural` has powers of two
    int8                        whole numbers -127..127, a scale for every 256

Places are stored in Elias-Fano form: of k places below n the low l = floor(log2(n / k)) bits as they are, the rest
in unary, about 2 + l bits each.

>>> wire_bytes("topk:0.001:bf16", 1_000_000), wire_bytes("sign", 1_000_000)
(3495, 125004)
>>> read_codec("topc:0.1")
Traceback (most recent call last):
headway.core.errors.UnknownNameError: unknown codec 'topc'. Did you mean 'topk'? Choose one of: bfloat16, dither, \
half, int8, natural, randomk, shared-randomk, sign, topk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.core.errors import InputError
from headway.core.tables import pick

VALUE_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
"""Types of the values that a sparse codec sends -> bytes."""

MIN_BYTES = 65_536
"""Tensors below this many bytes are fused and sent as they are, unless a plan says otherwise (BytePS: 65,536)."""

SCALE_BYTES = 4
"""A float32 scale."""

INT8_BLOCK = 256
"""Numbers that share a scale of the int8 codec (`headway.runtime.quantize.BLOCK`)."""

MOST_LEVELS = 127
"""Levels of a dithering codec: 7 bits and the sign make a byte."""

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "half": (),
    "bfloat16": (),
    "sign": (),
    "topk": ("amount", "type", "exact"),
    "randomk": ("amount", "type"),
    "shared-randomk": ("amount",),
    "dither": ("levels",),
    "natural": ("levels",),
    "int8": (),
}
"""Kind -> what its arguments are; all but the first one may be left out."""


@dataclass(frozen=True, slots=True)
class CodecName:
    """A codec's name, taken apart. Build it with `read_codec`."""

    kind: str
    """Entry of `ARGUMENTS`."""

    amount: float = 0.0
    """Sparse kinds: fraction in (0, 1], or a count above 1."""

    type: str = "f32"
    """Sparse kinds with places: entry of `VALUE_BYTES`."""

    exact: bool = False
    """topk: sort everything, and take no sample to find a threshold."""

    levels: int = 0
    """Dithering kinds: levels above zero."""

    def kept(self, n: int) -> int:
        """Return how many of `n` numbers a sparse kind sends. Raises `InputError` for a count above `n`."""
        if self.amount > 1:
            if n and self.amount > n:
                raise InputError(
                    f"{self.kind} shall keep {int(self.amount)} of {n} numbers; k must be at most n. Pass a fraction."
                )
            return min(int(self.amount), n)
        return min(n, max(1, int(self.amount * n + 0.5)))

    def bits(self) -> int:
        """Return the bits of a number of a dithering kind: its level and its sign."""
        return self.levels.bit_length() + 1


def read_codec(name: str, *arguments: object) -> CodecName:
    """Return the codec that `name` ('topk:0.01'), or a kind and its `arguments`, says.

    Raises `UnknownNameError` with the nearest kind, `InputError` with the rule that an argument breaks.
    """
    if not isinstance(name, str):
        raise InputError(f"a codec is {name!r}; write a name such as 'topk:0.01'.")
    kind, *words = [*name.split(":"), *(str(argument) for argument in arguments)]
    fields = pick(ARGUMENTS, kind, "codec")
    found: dict[str, Any] = {}
    for number, word in enumerate(words):
        if number == 0 and fields and fields[0] == "amount":
            found["amount"] = _amount(name, word)
        elif number == 0 and fields and fields[0] == "levels":
            if not (word.isdecimal() and 1 <= int(word) <= MOST_LEVELS):
                raise InputError(f"{name}: {word!r} is not a number of levels; write a whole one, 1..{MOST_LEVELS}.")
            found["levels"] = int(word)
        elif "type" in fields and word in VALUE_BYTES and "type" not in found:
            found["type"] = word
        elif "exact" in fields and word == "exact" and "exact" not in found:
            found["exact"] = True
        else:
            words_of = {"type": "|".join(VALUE_BYTES), "amount": "FRACTION", "levels": "LEVELS"}
            form = ":".join([kind, *(words_of.get(one, one) for one in fields)])
            raise InputError(f"{name}: {word!r} is not an argument of {kind}. Write it as {form}.")
    if fields and not words:
        raise InputError(f"{name}: {kind} needs its {fields[0]}. Write for example {EXAMPLES[kind]}.")
    return CodecName(kind, **found)


EXAMPLES = {
    "topk": "topk:0.01", "randomk": "randomk:0.01", "shared-randomk": "shared-randomk:0.01", "dither": "dither:4",
    "natural": "natural:4",
}  # fmt: skip
"""Kind with arguments -> a name to show."""


def _amount(name: str, word: str) -> float:
    try:
        amount = float(word)
    except ValueError:
        amount = math.nan
    if not (0 < amount <= 1 or (1 < amount < math.inf and amount.is_integer())):
        raise InputError(
            f"{name}: k is {word!r}; write a fraction in (0, 1], or a count of numbers above 1, for example 0.01."
        )
    return amount


def low_bits(n: int, k: int) -> int:
    """Return l, the bits of each of `k` places below `n` that Elias-Fano stores as they are: floor(log2(n / k))."""
    return max(0, (n // k).bit_length() - 1) if k else 0


def place_bytes(n: int, k: int) -> tuple[int, int]:
    """Return the bytes of the low bits and of the unary bitmap of `k` places below `n`."""
    if not k:
        return 0, 0
    low = low_bits(n, k)
    return -(-k * low // 8), -(-(k + ((n - 1) >> low)) // 8)


def wire_bytes(name: str | CodecName, n: int) -> int:
    """Return the bytes of a packet of `n` numbers, a function of `n` alone.

    Raises as `read_codec`, `InputError` for n < 0 and for a count above n.
    """
    codec = read_codec(name) if isinstance(name, str) else name
    if n < 0:
        raise InputError(f"n is {n}; a tensor has 0 numbers or more.")
    if n == 0:
        return 0
    if codec.kind in ("half", "bfloat16"):
        return 2 * n
    if codec.kind == "sign":
        return -(-n // 8) + SCALE_BYTES
    if codec.kind == "int8":
        return n + SCALE_BYTES * -(-n // INT8_BLOCK)
    if codec.kind in ("dither", "natural"):
        return -(-n * codec.bits() // 8) + SCALE_BYTES
    kept = codec.kept(n)
    values = kept * VALUE_BYTES[codec.type]
    return values if codec.kind == "shared-randomk" else values + sum(place_bytes(n, kept))


PARTITION_NUMBERS = 1_000_000
"""Numbers that are encoded, sent and decoded as one, at most (BytePS: 4,096,000 bytes)."""


@dataclass(frozen=True, slots=True)
class TensorRange:
    """A part of one tensor that travels in one partition."""

    tensor: int
    """Which tensor."""

    start: int
    """Its first number."""

    stop: int
    """One past its last number."""

    owner: int
    """Who adds it up."""


def partitions(counts: Sequence[int], owners: int) -> list[list[TensorRange]]:
    """Return partitions of tensors of so many numbers; each owner has an equal share of each tensor.

    What an owner has of a tensor depends on that tensor alone: residuals outlast the buckets that DDP lays out anew
    after its first step.

    >>> [(s.tensor, s.start, s.stop, s.owner) for s in partitions([6, 1], 2)[0]]
    [(0, 0, 3, 0), (0, 3, 6, 1), (1, 0, 1, 0)]
    """
    found: list[list[TensorRange]] = []
    filled = PARTITION_NUMBERS
    for tensor, n in enumerate(counts):
        for start in range(0, n, PARTITION_NUMBERS):
            stop = min(start + PARTITION_NUMBERS, n)
            if filled + stop - start > PARTITION_NUMBERS:
                found.append([])
                filled = 0
            filled += stop - start
            share = -(-(stop - start) // owners)
            for owner, low in enumerate(range(start, stop, share)):
                found[-1].append(TensorRange(tensor, low, min(low + share, stop), owner))
    return found


STAGES = ("push_s", "answer_s", "pull_s")
"""Columns of a measured row: what a stretch of `numel` numbers costs its sender (sum with what was left out before,
encoding, what is left out now), its owner (two packets summed, and encoded again), and each rank at the end."""


@dataclass(frozen=True, slots=True)
class CodecTimes:
    """What encoding and decoding took on this host, by size; between sizes linear in the logarithm of both."""

    rows: Mapping[str, tuple[tuple[int, float, float, float, float, float], ...]]
    """Codec -> (numbers, encode s, decode s, and what `STAGES` says), sizes rising."""

    collective_s: float = 0.0
    """What a rank's cores need per collective of a reduction beside its stages, in all threads: to queue it, to pass it
    through the backend's threads and to wake up, without its bytes."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> CodecTimes:
        """Read the object that `headway comm bench --json` prints. Raises `InputError` where a row is not one.

        Stages that a row does not hold are made of its encoding and decoding.
        """
        found: dict[str, list[tuple[int, float, float, float, float, float]]] = {}
        try:
            for row in content["rows"]:
                encode, decode = float(row["encode_s"]), float(row["decode_s"])
                made = (encode + decode, encode + 3 * decode, decode)
                push, answer, pull = (float(row.get(key, own)) for key, own in zip(STAGES, made, strict=True))
                times = int(row["numel"]), encode, decode, push, answer, pull
                if not all(0 < value < math.inf for value in times):
                    raise InputError(f"the measured row {row!r} is not positive. Measure again: headway comm bench.")
                found.setdefault(str(row["codec"]), []).append(times)
        except (KeyError, TypeError, ValueError) as cause:
            raise InputError(
                f"this is not a table of codecs ({cause!r}). Measure it: headway comm bench -o FILE."
            ) from cause
        return cls({name: tuple(sorted(rows)) for name, rows in found.items()}, float(content.get("collective_s", 0)))

    def seconds(self, name: str, n: float) -> tuple[float, float]:
        """Return what encoding and decoding `n` numbers takes. Raises `InputError` where `name` was not measured."""
        return self._at(name, 1, n), self._at(name, 2, n)

    def stages(self, name: str, n: float, ranks: int = 2) -> tuple[float, float, float]:
        """Return what a stretch of `n` numbers takes: sending, answering as one of `ranks`, and taking the answer.

        Raises as `seconds`.
        """
        push, answer, pull = (self._at(name, column, n) for column in (3, 4, 5))
        return push, answer + (ranks - 2) * self._at(name, 2, n), pull

    def _at(self, name: str, column: int, n: float) -> float:
        if name not in self.rows:
            listed = ", ".join(sorted(self.rows)) or "none"
            raise InputError(
                f"the codec {name} was not measured on this host (measured: {listed}). Measure it: "
                f"headway comm bench --codecs {name} -o RUN/codecs.json."
            )
        return _between([(row[0], row[column]) for row in self.rows[name]], n)


def _between(points: Sequence[tuple[int, float]], n: float) -> float:
    """Return the time at `n`: log-log linear between points, the smallest's below all, in proportion above all."""
    if n <= points[0][0]:
        return points[0][1] if n > 0 else 0.0
    if n >= points[-1][0]:
        return points[-1][1] * n / points[-1][0]
    at = next(index for index, point in enumerate(points) if point[0] >= n)
    (low, begin), (high, end) = points[at - 1], points[at]
    share = math.log(n / low) / math.log(high / low)
    return math.exp(math.log(begin) * (1 - share) + math.log(end) * share)
