"""What share of the hardware a job's model uses: `--model layers=96,hidden=12288,...` and the rate of the run -> MFU.

The recorded run knows its steps per second and its device; the shape of the
model, and the sequences of one step, come from the caller.

>>> spec = ModelSpec.parse("layers=96,hidden=12288,heads=96,sequence=2048,vocabulary=64000,batch=6144,dtype=bf16")
>>> spec.model.num_parameters // 10**9, spec.batch, spec.dtype
(174, 6144.0, 'bf16')

MFU of a recorded run without a shape to type: the operations of one step, its rate, and the peak of the device.

    operations of a step = sum over models of (operations of a call x training calls a step)     of one rank
    MFU                  = operations of a step x steps a second / peak of the dtype in use

A call's operations were counted while the script trained (`headway.compute.torch_calls`), its calls were recorded,
steps that the profiler made longer are left out of the rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from headway.core.errors import InputError, UnknownNameError
from headway.core.tables import pick
from headway.cost.specs import DeviceSpec, shipped
from headway.cost.transformer import RECOMPUTE, Transformer, flops_per_token, hardware_flops_per_token, mfu
from headway.ledger.answers.compare import steps_per_s
from headway.ledger.answers.ledger import Ledger
from headway.ledger.live_mfu import dtype_of_products
from headway.trace.events.parts import Parts
from headway.trace.recording.basis import LEARNS
from headway.trace.recording.run_facts import RunFacts
from headway.trace.rings.rank_tables import CallFlops, ComputeFacts

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


UNUSED = ("int8", "fp8")
"""dtypes that torch's modules do not train in by themselves: no best of theirs."""

RANK = 0
"""The rank whose calls are counted."""


def calls_per_step(parts: Parts, rank: int = RANK) -> dict[int, float]:
    """Return model -> its calls in training in a step of a rank, the mean over steps; {} without a step."""
    if not {"forward", "step"} <= set(parts.tables.names):
        return {}
    trace = parts.read({"rank": (rank, rank + 1)}, ("rank", "name", "corr", "seq", "step"))
    num_steps = int(trace.named("step").sum())
    calls = trace.where(trace.named("forward")).events
    learns = (calls["seq"] & LEARNS > 0) & (calls["step"] >= 0) & (calls["corr"] >= 0)
    models, counts = np.unique(calls["corr"][learns], return_counts=True)
    if not num_steps:
        return {}
    return {int(model): int(count) / num_steps for model, count in zip(models, counts, strict=True)}


def run_flops(parts: Parts, ledger: Ledger, facts: RunFacts) -> dict[str, object]:
    """Return what `compute` of `headway.why/2` says of operations: those of a step and the MFU, null where unknown.

    `note` says why something is.
    """
    compute = facts.compute or ComputeFacts()
    per_step, by_model = calls_per_step(parts), {call.model: call for call in compute.calls}
    unknown = CallFlops(reason="its operations were not counted in this run")
    counted = [(by_model.get(model, unknown), calls) for model, calls in per_step.items()]
    missing = [f"{call.name or 'a model'}: {call.reason}" for call, _ in counted if call.flops is None]
    numbers = ("mfu", "flops_per_step", "flops_per_s", "peak_flops_per_s", "best_flops_per_s")
    row: dict[str, object] = dict.fromkeys(numbers)
    if missing or not counted:
        note = "; ".join(missing) or "no call of a model in its steps was recorded"
        return {**row, "basis": "", "device": "", "dtype": "", "best_dtype": "", "note": note}
    flops = sum((call.flops or 0) * calls for call, calls in counted)
    rate = flops * steps_per_s(ledger)
    largest = max(counted, key=lambda pair: (pair[0].flops or 0) * pair[1])[0]
    device = shipped().reported(facts.device_type)
    dtype = dtype_in_use(largest, facts, device)
    rates = {name: peak for name, peak in device.flops_per_s.items() if name not in UNUSED} if device else {}
    peak, best = rates.get(dtype), max(rates, key=lambda name: rates[name], default="")
    where = device.name if device else facts.device_type
    calls = ", ".join(f"{call.name} {round(number, 2):g} times" for call, number in counted)
    of_peak = f"the peak of {dtype} on {where}" if peak else f"no peak of {dtype} is listed for {where}"
    basis = f"{of_peak}; operations of a step of rank {RANK} by shapes ({calls}); steps without the profiler's"
    return {
        **row,
        "mfu": mfu(rate, peak) if rate else None,
        "flops_per_step": round(flops),
        "flops_per_s": rate,
        "peak_flops_per_s": peak,
        "basis": basis,
        "device": where,
        "dtype": dtype,
        "best_dtype": best,
        "best_flops_per_s": rates.get(best),
        "note": "" if peak else of_peak,
    }


def dtype_in_use(call: CallFlops, facts: RunFacts, device: DeviceSpec | None) -> str:
    """Return the dtype whose units a call's products run on, with what the run's settings and remedies say."""
    compute = facts.compute or ComputeFacts()
    of_matmuls = (compute.matmul_precision or "highest") != "highest"
    in_tf32 = call.in_tf32 or of_matmuls or bool(call.has_convolutions and compute.cudnn_tf32)
    applied = facts.in_force.get("compute.autocast", {}).get("dtype")
    return dtype_of_products(msgspec.structs.replace(call, in_tf32=in_tf32), device, applied=applied)
