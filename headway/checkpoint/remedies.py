"""The remedies of checkpoints: saves behind training, and another interval."""

from __future__ import annotations

from headway.core.remedies import Parameters, RemedyRecord, Size

STALL = ("checkpoint.stall",)


class BehindParameters(Parameters, frozen=True):
    """Parameters of `checkpoint.async`."""

    every_steps: Size | None = None
    """Of the prediction; it changes nothing: the script saves when it does."""


REMEDIES = (
    RemedyRecord(
        "checkpoint.async", BehindParameters, "headway.checkpoint.torch_dcp.switch:behind", STALL,
        allow="result-equivalent", changes="a checkpoint becomes durable after the call that saves it",
    ),
    RemedyRecord("checkpoint.interval", causes=STALL),
)  # fmt: skip
"""What a plan may hold of this room; an interval is only advised."""
