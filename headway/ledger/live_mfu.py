"""MFU of a run while it goes on: operations that its models' calls take, calls a step, steps a second, the peak.

    operations of a step = sum over models of (operations of a call x training calls a step)     of one rank
    MFU                  = operations of a step x steps a second / peak of the dtype in use

A call's operations come from the child that counts them in the first step (RUN/flops), its calls from the records; the
finished run's MFU (`headway why`) decides. Source: PaLM (arXiv 2204.02311), appendix B.
"""

from __future__ import annotations

from pathlib import Path

from headway.cost.specs import DeviceSpec, shipped
from headway.cost.transformer import mfu
from headway.ledger.live_ledger import LiveFigures
from headway.trace.events.loader_facts import active_settings
from headway.trace.recording.run_facts import outcomes_of
from headway.trace.rings.rank_tables import CallFlops, counted_calls

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
"""torch's name of a dtype -> that of `DeviceSpec.flops_per_s`."""

LEAST_STEPS = 8
"""Steps from which on their calls say how many there are in a step."""


def dtype_of_products(call: CallFlops, device: DeviceSpec | None, *, applied: object = None) -> str:
    """Return the dtype whose units a call's products run on, by the names of `DeviceSpec.flops_per_s`.

    `applied` is the dtype of a remedy's autocast. Products of float32 numbers run in TF32 where the device has it and
    the script lets matrix products do so, or cuDNN its convolutions, as torch does by default.
    """
    dtype = DTYPES.get(str(applied or call.autocast or call.dtype), call.dtype)
    return "tf32" if dtype == "fp32" and call.in_tf32 and device and "tf32" in device.flops_per_s else dtype


class LiveMfu:
    """The MFU of a run folder that is being written."""

    def __init__(self, run: Path) -> None:
        """Follow the run in `run`."""
        self._run = run
        self._calls: dict[int, CallFlops] = {}
        self._applied: object = None

    def of(self, figures: LiveFigures) -> float | None:
        """Return it as things stand; None where it is not known."""
        steps = max((rank.steps for rank in figures.ranks[:1]), default=0)
        if steps < LEAST_STEPS or not figures.calls:
            return None
        if not figures.calls.keys() <= self._calls.keys():
            self._calls = {call.model: call for call in counted_calls(self._run) if call.flops is not None}
            in_force = active_settings(outcomes_of(self._run, rank=figures.ranks[0].rank))
            self._applied = in_force.get("compute.autocast", {}).get("dtype")
        if not figures.calls.keys() <= self._calls.keys() or not figures.steps_per_s_then:
            return None
        calls = [(self._calls[model], round(number / steps, 1)) for model, number in figures.calls.items()]
        flops = [((call.flops or 0) * per_step, call) for call, per_step in calls]
        largest = max(flops, key=lambda pair: pair[0])[1]
        device = shipped().reported(largest.device)
        peak = device.flops_per_s.get(dtype_of_products(largest, device, applied=self._applied)) if device else None
        return mfu(sum(number for number, _ in flops) * figures.steps_per_s_then, peak)
