"""Model FLOPs of a transformer, and what share of the hardware they use.

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

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.cost.specs import DeviceSpec
from headway.cost.transformer import Transformer

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
