"""What a layer costs to serve: seconds by device, bits and batch, bytes with its keys and values, loss of precision.

Weights are stored in `bits`. Products of 8 bits run at a device's int8 rate
where it states one, all others at its 16-bit rate, weights expanded: that is
why unlike devices want unlike bits. By the roofline (`headway.cost.specs`),
for b sequences and P weights of the matrices in a layer of width h, with
EFFICIENCY 0.5 of the peak and MEMORY_RATE 0.7 of the bandwidth (attention, the
term with h, always in 16 bits):

                         operations, over 0.5 peak         bytes, over 0.7 bandwidth       seconds: the larger
    prefill of s tokens  2 P b s + 4 s h b s (16 bits)     P bits / 8 + 4 (h + h_kv) b s
    decode behind t      2 P b + 4 t h b (16 bits)         P bits / 8 + 4 h_kv b t
    head                 2 V h b (16 bits)                 2 V h

A measured table replaces the roofline: rows (device, bits, phase, batch,
tokens, seconds), to which LLM-PQ's regression is fitted with coefficients
>= 0: prefill on [b, s, b s, b s^2, 1], decode on [b (s + t), b, t, 1].

Source: *LLM-PQ* (arXiv 2403.01136), sections 3 and 4: memory, latency, indicator.

>>> model = Transformer(48, 7168, 56, sequence=2048, vocabulary=50272)
>>> round(layer_bytes(model, ServingLoad(512, 100, 32), 4) / 1e6)
870
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError, InputError
from headway.core.linear import minimise
from headway.core.tables import suggestion
from headway.cost.specs import DeviceSpec, LinkSpec
from headway.cost.transformer import Transformer

EFFICIENCY, MEMORY_RATE = 0.5, 0.7
"""Share of the peak that matrix products reach, and of the bandwidth that reading weights reaches."""

USABLE_FRACTION, RESERVED_BYTES = 0.95, 1930e6
"""LLM-PQ's: of a device's memory 0.95 less 1,930 MB is there for the model."""

BITS = (3, 4, 8, 16)
"""Bits of a weight that are offered; 16 are the unquantised ones."""

Floats = NDArray[np.float64]


MOST_TOKENS = 10_000_000
"""Of a prompt, of an answer, and most sequences of a batch."""


@dataclass(frozen=True, slots=True)
class ServingLoad:
    """One batch of requests, served together."""

    prompt: int
    """s: tokens of a prompt."""

    new: int
    """n: tokens generated for each; the prefill makes the first."""

    batch: int
    """B: sequences."""

    def __post_init__(self) -> None:
        """Raise `InputError` on a count below 1 or above `MOST_TOKENS`."""
        for name in ("prompt", "new", "batch"):
            if not 1 <= getattr(self, name) <= MOST_TOKENS:
                raise InputError(f"{name} is {getattr(self, name)}; give a whole number >= 1, at most {MOST_TOKENS:,}.")

    @property
    def past(self) -> int:
        """Tokens before the one that an average decode step makes: s + n / 2."""
        return self.prompt + self.new // 2

    def microbatches(self, prefill: int, decode: int) -> tuple[int, int]:
        """Return how many micro-batches of these sizes the batch makes; raises `InputError` where they do not divide.

        >>> ServingLoad(512, 100, 32).microbatches(4, 8)
        (8, 4)
        """
        for what, size in (("prefill", prefill), ("decode", decode)):
            if size < 1 or self.batch % size:
                sizes = ", ".join(str(d) for d in range(1, self.batch + 1) if self.batch % d == 0)
                raise InputError(
                    f"a batch of {self.batch} makes no {what} micro-batches of {size}. Choose one of {sizes}."
                )
        return self.batch // prefill, self.batch // decode


@dataclass(frozen=True, slots=True)
class ServingRow:
    """Equal devices of one host."""

    device: DeviceSpec
    """Any of them."""

    count: int
    """How many."""

    inside: LinkSpec
    """Link between them."""

    link: LinkSpec
    """Link of the host to the other rows."""

    def __post_init__(self) -> None:
        """Raise `InputError` on no device."""
        if self.count < 1:
            raise InputError(f"count of {self.device.name} is {self.count}; give a whole number >= 1.")

    @property
    def usable_bytes(self) -> float:
        """Memory of one device that the model may fill."""
        return USABLE_FRACTION * self.device.memory_bytes - RESERVED_BYTES


def link_between(sender: ServingRow, receiver: ServingRow) -> LinkSpec:
    """Return the link that a message takes: the inside one within a row, else the slower of both rows' links."""
    if sender is receiver:
        return sender.inside
    return min(sender.link, receiver.link, key=lambda link: link.bytes_per_s)


class LayerSeconds(Protocol):
    """How long a part of the model takes. `roofline` and `measured` return such functions."""

    def __call__(self, device: DeviceSpec, bits: int, phase: str, batch: int, tokens: int) -> float:
        """Return seconds of one layer: "prefill" of `tokens` each, "decode" behind `tokens`; or of the "head"."""
        ...


def roofline(model: Transformer) -> LayerSeconds:
    """Return the roofline of a model's layers (module docstring); it raises `InputError` without a 16-bit rate."""
    h, kv, matrix = model.hidden, _kv_width(model), model.matrix_parameters
    output = model.vocabulary * h

    def seconds(device: DeviceSpec, bits: int, phase: str, batch: int, tokens: int) -> float:
        half, rate = EFFICIENCY * half_peak(device), MEMORY_RATE * device.memory_bytes_per_s
        if phase == "head":
            return max(2 * output * batch / half, 2 * output / rate)
        peak = max(half, EFFICIENCY * device.flops_per_s.get("int8", 0.0)) if bits == 8 else half
        rows = batch * tokens if phase == "prefill" else batch
        stream_bytes = 4 * (h + kv) * rows if phase == "prefill" else 4 * kv * batch * tokens
        products_s = (2 * matrix / peak + 4 * tokens * h / half) * rows
        return max(products_s, (matrix * bits / 8 + stream_bytes) / rate)

    return seconds


def half_peak(device: DeviceSpec) -> float:
    """Return the rate of products in 16 bits; raises `InputError` where the device has none."""
    for dtype in ("fp16", "bf16"):
        if dtype in device.flops_per_s:
            return device.flops_per_s[dtype]
    rates = ", ".join(device.flops_per_s)
    raise InputError(f"{device.name} has no rate in fp16 or bf16, only {rates}. Leave it out of the cluster.")


MEASURED = {"device": str, "bits": int, "phase": str, "batch": int, "tokens": int, "seconds": float}
"""Key of a measured row -> its type."""

PHASES = ("prefill", "decode", "head")
"""What is measured: a layer in both phases, and the output layer."""


def measured(rows: Sequence[Mapping[str, object]], where: str = "the table") -> LayerSeconds:
    """Return the latencies of a measured table: one regression for each device, bits and phase (module docstring).

    The sum of absolute errors is smallest (a linear program), each row's as a share of its seconds. Raises
    `FormatError` naming the row; the function returned raises `InputError` for what no row was measured on.
    """
    groups: dict[tuple[str, int, str], list[tuple[float, float, float]]] = {}
    for number, row in enumerate(rows):
        device, bits, phase, batch, tokens, seconds = _measured_row(row, f"{where}, row {number}")
        groups.setdefault((device, bits, phase), []).append((batch, tokens, seconds))
    fitted = {key: _fitted(key[2], points) for key, points in groups.items()}

    def seconds_of(device: DeviceSpec, bits: int, phase: str, batch: int, tokens: int) -> float:
        key = (device.name, 16 if phase == "head" else bits, phase)
        if key not in fitted and phase == "head":
            return 0.0
        if key not in fitted:
            have = ", ".join(f"{name} at {width} bits" for name, width, what in fitted if what == phase) or "none"
            raise InputError(
                f"{where} has no {phase} of {device.name} at {bits} bits, only {have}. Measure it, or leave {bits} out "
                "of the bits."
            )
        return float(_features(phase, batch, tokens) @ fitted[key])

    return seconds_of


def _measured_row(row: Mapping[str, object], where: str) -> tuple[str, int, str, float, float, float]:
    """Return the values of one row; raises `FormatError`."""
    for key, needed in MEASURED.items():
        value = row.get(key) if isinstance(row, Mapping) else None
        fits = isinstance(value, (int, float) if needed is float else needed) and not isinstance(value, bool)
        if not fits or (isinstance(value, (int, float)) and not 0 < value < math.inf):
            raise FormatError(f"{where}: {key} is {value!r}; write {'a text' if needed is str else 'a number > 0'}.")
    phase = str(row["phase"])
    if phase not in PHASES:
        raise FormatError(f"{where}: unknown phase {phase!r}. {suggestion(PHASES, phase)}")
    bits, batch, tokens, seconds = (float(str(row[key])) for key in ("bits", "batch", "tokens", "seconds"))
    return str(row["device"]), int(bits), phase, batch, tokens, seconds


def _features(phase: str, batch: float, tokens: float) -> Floats:
    """Return what a latency is linear in."""
    terms = {
        "prefill": (batch, tokens, batch * tokens, batch * tokens**2, 1.0),
        "decode": (batch * tokens, batch, tokens, 1.0),
        "head": (batch, 1.0),
    }
    return np.array(terms[phase], np.float64)


def _fitted(phase: str, points: Sequence[tuple[float, float, float]]) -> Floats:
    """Return coefficients >= 0 with the least sum of |A x - 1|, A the features of each point over its seconds.

    variables  x [c], e [n]     minimise sum e     with  A x - e <= 1  and  A x + e >= 1
    """
    table = np.array([_features(phase, batch, tokens) / seconds for batch, tokens, seconds in points])
    scale = np.where(table.max(0) > 0, table.max(0), 1.0)
    n, width = table.shape
    rows = np.block([[table / scale, -np.eye(n)], [table / scale, np.eye(n)]])
    low = np.concatenate([np.full(n, -np.inf), np.ones(n)])
    high = np.concatenate([np.ones(n), np.full(n, np.inf)])
    cost = np.concatenate([np.zeros(width), np.ones(n)])
    return minimise(cost, rows=rows, row_low=low, row_high=high).x[:width] / scale


def layer_bytes(model: Transformer, load: ServingLoad, bits: int) -> float:
    """Return the bytes of one layer: matrices in `bits`, the rest in 16, keys and values of the whole batch in 16."""
    matrix = model.matrix_parameters
    past = 2 * _kv_width(model) * load.batch * (load.prompt + load.new)
    return matrix * bits / 8 + 2 * (model.layer_parameters - matrix) + 2 * past


def ends_bytes(model: Transformer) -> tuple[float, float, float]:
    """Return the bytes of the embedding, of the last norm and the head, and of both on one device, in 16 bits."""
    embedding, output = 2.0 * model.embedding_parameters, 2.0 * model.vocabulary * model.hidden
    norm = 2.0 * model.hidden * (2 if model.biases else 1)
    return embedding, norm + output, embedding + norm + (0.0 if model.tied else output)


def temporary_bytes(model: Transformer, load: ServingLoad, prefill: int, decode: int) -> float:
    """Return the bytes that one layer's computation needs beside weights, keys and values: the larger of both phases.

    In 16 bits: the input, the widest product, and the scores of attention, b a s^2 in the prefill and b a (s + n) in
    the decode.
    """
    width = model.hidden + max(3 * model.hidden, model.ffn * (2 if model.gated else 1))
    s, past = load.prompt, load.prompt + load.new
    return 2.0 * max(prefill * s * (width + model.heads * s), decode * (width + model.heads * past))


def layer_omega(model: Transformer, bits: Sequence[int]) -> Floats:
    """Return the indicator [layers, bits] of freshly drawn weights: all layers alike; 16 bits lose nothing.

    omega = sum over matrices of D_w S^2 Var(X) / 4, with D_w weights, S = (max - min) / (2^bits - 1) the distance of
    two grid points (LLM-PQ, section 4.1, deterministic rounding). Weights are taken to have the variance 1 / inputs
    and 4 standard deviations to either side, inputs the variance 1: D_w S^2 / 4 = 16 outputs / (2^bits - 1)^2. Of a
    trained model its own numbers say more: `--sensitivity`.
    """
    outputs = 2 * model.hidden + 2 * _kv_width(model) + (2 if model.gated else 1) * model.ffn + model.hidden
    row = [0.0 if width >= 16 else 16.0 * outputs / (2**width - 1) ** 2 for width in bits]
    return np.tile(row, (model.layers, 1))


def _kv_width(model: Transformer) -> int:
    """Return the width of keys, and of values."""
    return model.hidden * model.kv_heads // model.heads
