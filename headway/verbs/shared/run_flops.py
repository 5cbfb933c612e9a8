"""MFU of a recorded run without a shape to type: the operations of one step, its rate, and the peak of the device.

    operations of a step = sum over models of (operations of a call x training calls a step)     of one rank
    MFU                  = operations of a step x steps a second / peak of the dtype in use

A call's operations were counted while the script trained (`headway.compute.torch_calls`), its calls were recorded,
steps that the profiler made longer are left out of the rate.
"""

from __future__ import annotations

import msgspec
import numpy as np

from headway.cost.specs import DeviceSpec, shipped
from headway.cost.transformer import mfu
from headway.ledger.answers.compare import steps_per_s
from headway.ledger.answers.ledger import Ledger
from headway.ledger.live.live_mfu import dtype_of_products
from headway.trace.events.parts import Parts
from headway.trace.recording.basis import LEARNS
from headway.trace.recording.run_facts import RunFacts
from headway.trace.rings.compute_facts import CallFlops, ComputeFacts

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
