"""The shape of a transformer language model: how many parameters it has.

Defaults are a GPT: learned positions, biases, layer norm, a feed-forward
layer of four times the hidden size, input and output embeddings tied. The
switches make a Llama.

>>> Transformer(12, 768, 12, sequence=1024, vocabulary=50257).num_parameters
124439808
>>> Transformer(32, 4096, 32, sequence=4096, vocabulary=32000, ffn=11008, gated=True,
...             biases=False, positions=False, tied=False).num_parameters
6738415616

Model FLOPs of a transformer, and what share of the hardware they use.

A GPT does 72 L h^2 (1 + s/(6h) + V/(12 L h)) operations per trained token,
forward and backward: six per weight of every matrix, the output layer
included (6 V h), and 12 L s h for the two products of attention, which is
counted in full, not halved for the causal mask. With every layer recomputed
the hardware does the 96 L h^2 (1 + s/(6h) + V/(16 L h)) of Narayanan et al.
(arXiv 2104.04473, eq. 3).

Papers that take 3/4 of that equation for the model FLOPs count the output
layer as 4.5 V h (`OUTPUT_LAYER["megatron"]`), for example MegaScale (arXiv
2402.15627): 0.1 % less for a model of 175 G parameters, 6.8 % less for GPT-2.

>>> model = Transformer(96, 12288, 96, sequence=2048, vocabulary=64000)
>>> round(flops_per_token(model) / 1e12, 3)
1.077
>>> round(mfu(6144 / 8.57 * 2048 / 12288 * flops_per_token(model, "megatron"), 312e12), 3)
0.412
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.cost.specs import DeviceSpec


@dataclass(frozen=True, slots=True)
class Transformer:
    """A decoder-only transformer."""

    layers: int
    """L, number of layers."""

    hidden: int
    """h, hidden size."""

    heads: int
    """a, number of attention heads."""

    sequence: int
    """s, tokens per sequence."""

    vocabulary: int
    """V, vocabulary size (padded, if it is padded in the job)."""

    ffn: int = 0
    """Width of the feed-forward layer; 0 = 4 h."""

    kv_heads: int = 0
    """Heads of keys and values (grouped-query attention); 0 = as many as `heads`."""

    gated: bool = False
    """Whether the feed-forward layer has a third matrix (SwiGLU)."""

    biases: bool = True
    """Whether linear layers and norms have biases."""

    positions: bool = True
    """Whether positions are learned parameters."""

    tied: bool = True
    """Whether the output layer is the input embedding."""

    def __post_init__(self) -> None:
        """Check the sizes and fill in the defaults; raises `InputError`."""
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; give a whole number >= 1.")
        object.__setattr__(self, "ffn", self.ffn or 4 * self.hidden)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        if self.ffn < 1 or self.kv_heads < 1:
            raise InputError(f"ffn is {self.ffn}, kv_heads {self.kv_heads}; give 0 for the default or a number >= 1.")
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise InputError(
                f"hidden {self.hidden} / heads {self.heads} / kv_heads {self.kv_heads} do not divide. "
                "Make hidden a multiple of heads and heads a multiple of kv_heads."
            )

    @property
    def matrix_parameters(self) -> int:
        """Weights of the matrices of one layer: 12 h^2 in a GPT."""
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.hidden * self.kv_heads // self.heads
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: 12 h^2 + 13 h in a GPT."""
        norms = 2 * self.hidden * (2 if self.biases else 1)
        keys = self.hidden * self.kv_heads // self.heads
        biases = 2 * self.hidden + 2 * keys + (2 if self.gated else 1) * self.ffn + self.hidden
        return self.matrix_parameters + norms + (biases if self.biases else 0)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding and of positions."""
        return (self.vocabulary + (self.sequence if self.positions else 0)) * self.hidden

    @property
    def num_parameters(self) -> int:
        """All parameters."""
        final = self.hidden * (2 if self.biases else 1)
        output = 0 if self.tied else self.vocabulary * self.hidden
        return self.layers * self.layer_parameters + self.embedding_parameters + final + output


# Model FLOPs of a transformer, and what share of the hardware they use.

RECOMPUTE: tuple[str, ...] = ("none", "selective", "full")
"""What the backward pass computes again: nothing, the attention core (Korthikanti et al.), every layer."""


OUTPUT_LAYER: dict[str, float] = {"exact": 6.0, "megatron": 4.5}
"""Convention -> FLOPs per weight of the output layer: those it executes, or 3/4 of those in Megatron-LM's equation."""


def flops_per_token(model: Transformer, convention: str = "exact") -> float:
    """Return the model FLOPs of one trained token, forward and backward, nothing computed twice.

    `convention` is one of `OUTPUT_LAYER`; pass "megatron" to compare with
    published rows that count so. Raises `UnknownNameError`.
    """
    output_layer = pick(OUTPUT_LAYER, convention, "FLOP convention") * model.vocabulary * model.hidden
    return _layer_flops(model) + output_layer


def _layer_flops(model: Transformer) -> float:
    """Return the model FLOPs of one trained token in the layers, the output layer left out."""
    return 6.0 * model.layers * model.matrix_parameters + 12.0 * model.layers * model.sequence * model.hidden


def hardware_flops_per_token(model: Transformer, recompute: str = "none") -> float:
    """Return the FLOPs that the hardware executes per trained token; `recompute` is one of `RECOMPUTE`.

    `selective` runs the two products of the attention core once more, 4 L s h
    (arXiv 2205.05198 books three times that); `full` runs the forward pass of
    every layer once more, but not the output layer. Raises `UnknownNameError`.
    """
    again = {
        "none": 0.0,
        "selective": 4.0 * model.layers * model.sequence * model.hidden,
        "full": _layer_flops(model) / 3,
    }
    return flops_per_token(model) + pick(again, recompute, "recompute")


def mfu(flops_per_s: float, peak_flops_per_s: float | None) -> float | None:
    """Return model FLOPs done per second over the peak, 0..1, per device (HFU when given hardware FLOPs).

    None when there is no one peak: precisions are mixed, or the device is not
    listed. Raises `InputError` on negative or non-finite rates.
    """
    if not (math.isfinite(flops_per_s) and flops_per_s >= 0):
        raise InputError(f"flops_per_s is {flops_per_s}; pass a finite rate >= 0.")
    if peak_flops_per_s is None:
        return None
    if not (math.isfinite(peak_flops_per_s) and peak_flops_per_s > 0):
        raise InputError(f"the peak is {peak_flops_per_s} FLOP/s; pass a finite rate > 0, or None if unknown.")
    return flops_per_s / peak_flops_per_s


def job_mfu(
    model: Transformer,
    *,
    tokens_per_s: float,
    num_devices: int,
    device: DeviceSpec | None,
    dtype: str | None,
    convention: str = "exact",
) -> float | None:
    """Return the MFU of a job that trains `tokens_per_s` on `num_devices` equal devices.

    None when `dtype` is None (mixed precisions) or the device is not listed.
    `convention` as in `flops_per_token`. Raises `InputError` on fewer than one
    device or a bad rate, `UnknownNameError` on an unknown convention.
    """
    if num_devices < 1:
        raise InputError(f"num_devices is {num_devices}; give at least 1.")
    peak = None if device is None or dtype is None else device.peak(dtype)
    return mfu(tokens_per_s * flops_per_token(model, convention) / num_devices, peak)
