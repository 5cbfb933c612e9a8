"""The remedies of compute: what a step computes with, without a change of what it computes."""

from __future__ import annotations

from headway.core.remedies import Names, Parameters, RemedyRecord, Size


class TryParameters(Parameters, frozen=True):
    """Parameters of the trial of candidates, `headway try`."""

    candidates: Names
    """Names of remedies, in the order in which they are tried."""
    steps: Size
    """Steps of a branch."""
    rounds: Size = 2
    """Branches of each candidate."""
    warmup: Size = 5
    """Steps of the script's own before the first branch."""


REMEDIES = (
    RemedyRecord(
        "compute.channels_last", apply="headway.compute.torch_forward:channels_last", causes=("compute.layout",),
        allow="result-equivalent",
        changes="sums are rounded in another order, and dropout of images is drawn in another",
    ),
    RemedyRecord(
        "compute.cudnn_benchmark", apply="headway.compute.apply:cudnn_benchmark", causes=("compute.autotune",),
        allow="result-equivalent", changes="another kernel of a convolution rounds its sums in another order",
    ),
    RemedyRecord(
        "compute.fused_optimizer", apply="headway.compute.apply:fuse_optimizer", causes=("compute.optimizer",),
        allow="result-equivalent", changes="a fused update rounds its sums in another order",
    ),
    RemedyRecord(
        "compute.tf32", apply="headway.compute.apply:tf32", causes=("compute.precision",), allow="lossy",
        changes="products with 10 bits of mantissa change what is computed",
    ),
    RemedyRecord(
        "compute.autocast", apply="headway.compute.torch_forward:autocast", causes=("compute.precision",),
        allow="lossy", changes="products in bfloat16 change what is computed",
        conflicts=("model.precision",),
    ),
    RemedyRecord(
        "compute.compile", apply="headway.compute.torch_forward:compiled", causes=("compute.unfused",),
        allow="result-equivalent", changes="fused kernels round their sums in another order",
        conflicts=("model.precision",),
    ),
)  # fmt: skip
"""What a plan may hold of this room."""

MEASUREMENTS = (RemedyRecord("measure.try", TryParameters, "headway.compute.torch_tries:tries"),)
"""The trial of candidates, `headway try -- SCRIPT`."""
