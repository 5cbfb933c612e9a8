"""What an edit of a few lines makes of the kernels of a step: seconds of each class -> seconds behind the edit.

    step      | float32 matrix            | attention | normalisation | elementwise | optimizer |
    autocast  | x .13  | casts on top     | x .22     | x .85         | x .65       | x 1       |
    compile   | x 1                       | x 1       | x .5          | x .5        | x 1       |   chains become one

A product takes max(operations / rate, bytes / bandwidth). On a faster unit it keeps a share of its efficiency: large
products on an H200 reach 95 % of the float32 units' rate, 46 % of TF32's and half of bfloat16's, because what feeds
the units did not become faster (GPT-2, docs/devices.md). Each factor is a range (fast, likely, slow); what the host's
launches allow is the replay's to say.

Sources: the roofline model (Williams et al., CACM 2009); factors without another source were measured on an H200.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from headway.compute.kernels import classify
from headway.core.units import NS_PER_S
from headway.cost.specs import Ceilings
from headway.ledger.booking.account import KernelTimes
from headway.trace.rings.compute_facts import ComputeFacts, ModelFacts, OptimizerFacts

PRODUCTS = ("matrix", "float32 matrix", "attention", "convolution")
"""Classes that multiply: what MFU counts."""

PASSES = ("elementwise", "normalisation", "reduction", "cast")
"""Classes that pass over memory, and that a compiler fuses."""

UPDATE_BYTES = {"Adam": 28, "AdamW": 28, "SGD": 20}
"""Optimizer -> bytes that a fused update of one float32 number reads and writes: parameter, gradient and states."""

CAST_BYTES = 12
"""Bytes per parameter that autocast moves in a step: its copy in half the bytes, and the gradient's way back."""


class Scale(NamedTuple):
    """Time of a class behind an edit / before it: where all goes well, likely, and where it does not."""

    fast: float
    likely: float
    slow: float

    def of(self, ratio: float) -> Scale:
        """Return the factor of a class whose units become faster by 1 / `ratio`, capped: no kernel becomes slower."""
        return Scale(*(min(1.0, ratio * factor) for factor in self))


LEAST = 0.05
"""Share of a step below which no edit is believed to bring it."""

ON_FASTER_UNITS = Scale(1.1, 1.9, 3.0)
"""1 / efficiency that is left on units several times as fast."""

SAME_UNITS = Scale(1.0, 1.4, 1.9)
"""The same from TF32 to bfloat16, which is up to twice as fast."""


@dataclass(frozen=True, slots=True)
class StepKernels:
    """The kernels of one step of one device, by class."""

    seconds: Mapping[str, float]
    """Class -> s."""

    count: Mapping[str, int]
    """Class -> launches."""

    unaligned_s: float
    """s of matrix products whose sizes are odd, or not multiples of 8 bytes: 'align1' and 'align2' in their names."""

    @property
    def total_s(self) -> float:
        """All of them."""
        return sum(self.seconds.values())

    def share(self, *names: str) -> float:
        """Return the share of some classes."""
        return sum(self.seconds.get(name, 0.0) for name in names) / max(self.total_s, 1e-12)


def step_kernels(kernels: KernelTimes) -> StepKernels | None:
    """Return the kernels of a mean step by class; None where no window showed any."""
    if not kernels.num_steps or not kernels.ns:
        return None
    seconds, count = dict[str, float](), dict[str, int]()
    unaligned_s = 0.0
    for name, ns in kernels.ns.items():
        class_name, mean_s = classify(name), ns / kernels.num_steps / NS_PER_S
        seconds[class_name] = seconds.get(class_name, 0.0) + mean_s
        count[class_name] = count.get(class_name, 0) + kernels.count.get(name, 0)
        if class_name == "matrix" and (
            "align1>" in name or "align2>" in name or "align1_" in name or "align2_" in name
        ):
            unaligned_s += mean_s
    ordered = dict(sorted(seconds.items(), key=lambda item: -item[1]))
    return StepKernels(
        ordered, {name: round(value / kernels.num_steps) for name, value in count.items()},
        unaligned_s,
    )  # fmt: skip


def behind(step: StepKernels, scales: Mapping[str, Scale], extra_s: float = 0.0) -> Scale:
    """Return the device's time behind an edit / before it; `extra_s` comes on top, half of it where all goes well."""
    parts = []
    for index, more in enumerate((0.5, 1.0, 2.0)):
        seconds = sum(value * (scales[name][index] if name in scales else 1.0) for name, value in step.seconds.items())
        parts.append(max((seconds + more * extra_s) / step.total_s, LEAST))
    return Scale(*parts)


def tf32(step: StepKernels, ceilings: Ceilings) -> Scale:
    """Products of float32 numbers by matrix units: 10 bits of mantissa."""
    ratio = ceilings.flops_per_s["fp32"] / ceilings.flops_per_s["tf32"]
    return behind(step, {"float32 matrix": ON_FASTER_UNITS.of(ratio)})


def bfloat16(step: StepKernels, ceilings: Ceilings, model: ModelFacts) -> Scale:
    """Autocast: products in bfloat16, passes over half the bytes, norms and losses in float32 as before."""
    rates = ceilings.flops_per_s
    from_fp32 = ON_FASTER_UNITS.of(rates["fp32"] / rates["bf16"])
    from_tf32 = SAME_UNITS.of(rates["tf32"] / rates["bf16"])
    scales = {
        "float32 matrix": from_fp32, "matrix": from_tf32, "convolution": from_tf32,
        "attention": Scale(0.12, 0.22, 0.4), "elementwise": Scale(0.5, 0.65, 1.0),
        "normalisation": Scale(0.6, 0.85, 1.05), "layout": Scale(0.5, 0.7, 1.0), "reduction": Scale(0.5, 0.8, 1.0),
    }  # fmt: skip
    casts_s = CAST_BYTES * model.num_elements / ceilings.bytes_per_s
    return behind(step, scales, casts_s + 0.1 * (step.share("elementwise", "normalisation")) * step.total_s)


def compiled(step: StepKernels) -> Scale:
    """Passes over memory that follow each other become one."""
    return behind(step, dict.fromkeys((*PASSES, "copy"), Scale(0.25, 0.5, 0.9)))


def channels_last(step: StepKernels) -> Scale:
    """No conversions of layout, and the kernels of matrix units that read it as it is."""
    return behind(step, {
        "layout": Scale(0.0, 0.15, 0.6), "convolution": Scale(0.75, 0.93, 1.0),
        "normalisation": Scale(0.75, 0.95, 1.05),
    })  # fmt: skip


def autotuned(step: StepKernels) -> Scale:
    """The fastest of cuDNN's kernels for each shape: its choice without looking is a few per cent behind."""
    return behind(step, dict.fromkeys(("convolution", "layout"), Scale(0.7, 0.93, 1.0)))


def update_bound_s(ceilings: Ceilings, optimizer: OptimizerFacts) -> float | None:
    """Return what memory lets a fused update take, s; None for an update that is not known."""
    size = UPDATE_BYTES.get(optimizer.name)
    return None if size is None else size * optimizer.num_elements / ceilings.bytes_per_s


def fused_update(step: StepKernels, ceilings: Ceilings, optimizer: OptimizerFacts) -> Scale | None:
    """One pass over parameters, gradients and states in place of one for each operator; None for an unknown update."""
    bound_s, seconds = update_bound_s(ceilings, optimizer), step.seconds.get("optimizer", 0.0)
    if bound_s is None or not seconds:
        return None
    return behind(step, {"optimizer": Scale(1.05, 1.2, 1.6).of(bound_s / seconds)})


def gains_of(step: StepKernels, ceilings: Ceilings, facts: ComputeFacts) -> Iterator[tuple[str, Scale | str]]:
    """Yield each remedy of compute with the device's time behind it / before it, or why it is not for this run."""
    models = facts.models
    if len(models) != 1:
        return
    [model] = models
    is_plain = set(model.parameter_dtypes) == {"float32"}
    convolves = step.share("convolution", "layout") > 0 and model.num_convolution_weights > 0
    if facts.matmul_precision not in ("highest", None):
        yield "compute.tf32", "products of float32 numbers use the matrix units already"
    elif "tf32" not in ceilings.flops_per_s or model.autocast:
        yield "compute.tf32", "autocast computes the products" if model.autocast else "this device has no units for it"
    else:
        yield "compute.tf32", tf32(step, ceilings)
    if model.autocast or not is_plain:
        yield "compute.autocast", "the script chooses its precision itself"
    elif "bf16" not in ceilings.flops_per_s or "tf32" not in ceilings.flops_per_s:
        yield "compute.autocast", "this device has no units for bfloat16"
    else:
        yield "compute.autocast", bfloat16(step, ceilings, model)
    yield "compute.compile", "the script compiles the model itself" if model.is_compiled else compiled(step)
    if not convolves:
        return
    last = model.num_channels_last == model.num_convolution_weights
    yield "compute.channels_last", "its convolutions lie so already" if last else channels_last(step)
    yield "compute.cudnn_benchmark", "it is on already" if facts.cudnn_benchmark else autotuned(step)
