"""The remedies of compute: what a step computes with, without a change of what it computes."""

from __future__ import annotations

from headway.core.remedies import RemedyRecord

REMEDIES = (
    RemedyRecord(
        "compute.fused_optimizer",
        apply="headway.compute.apply:fuse_optimizer",
        causes=("compute.optimizer",),
        allow="result-equivalent",
        changes="a fused update rounds its sums in another order",
    ),
)
"""What a plan may hold of this room."""
