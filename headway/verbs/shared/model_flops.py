"""What share of the hardware a job's model uses: `--model layers=96,hidden=12288,...` and the rate of the run -> MFU.

The recorded run knows its steps per second and its device; the shape of the
model, and the sequences of one step, come from the caller.

>>> spec = ModelSpec.parse("layers=96,hidden=12288,heads=96,sequence=2048,vocabulary=64000,batch=6144,dtype=bf16")
>>> spec.model.num_parameters // 10**9, spec.batch, spec.dtype
(174, 6144.0, 'bf16')
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headway.core.errors import InputError, UnknownNameError
from headway.core.tables import pick
from headway.cost.specs import shipped
from headway.cost.transformer import RECOMPUTE, Transformer, flops_per_token, hardware_flops_per_token, mfu
from headway.trace.recording.run_facts import RunFacts

FORMULA = "6 L M + 12 L s h + 6 V h per token, forward and backward, nothing computed twice"
"""L layers of M matrix weights, sequence s, hidden size h, vocabulary V; a GPT's 72 L h^2 (1 + s/6h + V/12Lh)."""

SIZES = ("layers", "hidden", "heads", "sequence", "vocabulary", "ffn", "kv_heads")
"""Whole numbers of `Transformer`; the first five are needed."""

SWITCHES = ("gated", "tied", "biases", "positions")
"""Yes or no."""

KEYS = (*SIZES, *SWITCHES, "batch", "devices", "device", "dtype", "peak", "recompute")
"""Every key of `--model`."""

TRUTH = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model and how it is trained, as `--model` names it."""

    model: Transformer
    """Its shape."""

    batch: float | None = None
    """Sequences of one optimizer step, all ranks together; None = from the run's loader."""

    devices: int | None = None
    """Devices; None = the ranks of the run."""

    device: str = ""
    """Name of the device; '' = as recorded."""

    dtype: str = ""
    """Precision of the matrix products; '' = not said, or mixed: then there is no one peak."""

    peak_flops_per_s: float | None = None
    """Peak of one device; None = from the table of devices."""

    recompute: str = "none"
    """What the backward pass computes again, one of `headway.cost.transformer.RECOMPUTE`."""

    @classmethod
    def parse(cls, text: str) -> ModelSpec:
        """Read 'layers=..,hidden=..,...'; raises `InputError` on a key or value that cannot be, and a missing size."""
        given: dict[str, str] = {}
        for part in text.split(","):
            key, equals, value = (word.strip() for word in part.partition("="))
            pick(dict.fromkeys(KEYS, True), key, "key of --model")
            if not equals or not value or key in given:
                raise InputError(f"--model holds {part!r}; write each key once with its value: layers=96.")
            given[key] = value
        missing = [key for key in SIZES[:5] if key not in given]
        if missing:
            raise InputError(f"--model says no {missing[0]}; give {', '.join(SIZES[:5])}.")
        sizes = {key: int(_number(key, given[key])) for key in SIZES if key in given}
        switches = {key: pick(TRUTH, given[key].lower(), f"value of {key}") for key in SWITCHES if key in given}
        recompute = given.get("recompute", "none")
        pick(dict.fromkeys(RECOMPUTE, True), recompute, "recompute")
        batch, devices, peak = (
            _number(key, given[key]) if key in given else None for key in ("batch", "devices", "peak")
        )
        shape: dict[str, Any] = {**sizes, **switches}
        return cls(
            Transformer(**shape),
            batch,
            None if devices is None else int(devices),
            given.get("device", ""),
            given.get("dtype", ""),
            peak,
            recompute,
        )


def _number(key: str, text: str) -> float:
    """Return a finite number above 0; whole, but for the peak."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0) or (key != "peak" and value != int(value)):
        raise InputError(f"{key}={text}; give a {'' if key == 'peak' else 'whole '}number above 0.")
    return value


def mfu_entry(spec: ModelSpec, *, steps_per_s: float, facts: RunFacts, ranks: int) -> dict[str, Any]:
    """Return the `mfu` entry of `headway.why/2`: MFU, HFU, the formula, and what they rest on.

    `facts` are those of the run (run.json, or the meta of a trace), `ranks` its
    devices. Without a known peak `mfu` is None and `reason` says why. Raises
    `InputError` where the batch is neither given nor known.
    """
    batch = spec.batch if spec.batch is not None else _batch_of(facts, ranks)
    devices = spec.devices or ranks
    tokens_per_s = batch * spec.model.sequence * steps_per_s
    per_device = tokens_per_s * flops_per_token(spec.model) / devices
    peak, device, reason = _peak(spec, facts)
    hardware = per_device * hardware_flops_per_token(spec.model, spec.recompute) / flops_per_token(spec.model)
    return {
        "mfu": mfu(per_device, peak),
        "hfu": mfu(hardware, peak),
        "flops_per_s_per_device": per_device,
        "peak_flops_per_s": peak,
        "device": device,
        "dtype": spec.dtype,
        "devices": devices,
        "flops_per_token": flops_per_token(spec.model),
        "tokens_per_s": tokens_per_s,
        "parameters": spec.model.num_parameters,
        "formula": FORMULA,
        "recompute": spec.recompute,
        "reason": reason,
    }


def _batch_of(facts: RunFacts, ranks: int) -> float:
    """Return the sequences of one step where the run has one loader: its batch size on every rank."""
    sizes = {row.batch_size for row in facts.loaders.values() if row.batch_size}
    if len(sizes) != 1:
        raise InputError(
            "the sequences of one optimizer step are not known: the run has no loader, or several. "
            "Add batch=N to --model, all ranks together."
        )
    return float(sizes.pop()) * ranks


def _peak(spec: ModelSpec, facts: RunFacts) -> tuple[float | None, str, str]:
    """Return the peak of one device, its name, and why there is none."""
    name = spec.device or facts.device_type
    if spec.peak_flops_per_s is not None:
        return spec.peak_flops_per_s, name, ""
    if not spec.dtype:
        return None, name, "the precision is not said: add dtype=bf16 (or another) to --model"
    try:
        return shipped().device(name).peak(spec.dtype), name, ""
    except UnknownNameError as cause:
        if spec.device:
            raise
        return None, name, f"{name} has no listed peak: add device=NAME or peak=FLOPS to --model ({cause})"
