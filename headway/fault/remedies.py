"""The remedy of losses that break, and what a drill does inside ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headway.core.remedies import Parameters, Positive, RemedyRecord

WARM, INTERVAL = "fault.warm", "fault.interval"

FOLLOWS_FAILURES = 'headway.Checkpointer(..., policy=headway.CheckpointPolicy(mode="goodput"))'
"""What a script writes in place of 'fault.interval'."""


class GuardParameters(Parameters, frozen=True):
    """Parameters of `fault.guard`."""

    action: Literal["rollback", "skip", "stop"] = "rollback"
    """What a loss that breaks is answered with."""


class WarmParameters(Parameters, frozen=True):
    """Parameters of `fault.warm`: what was predicted of it; they change nothing."""

    ettr: float | None = None
    """ETTR with warm attempts, with the failures of the run that the plan was made of."""

    ettr_before: float | None = None
    """ETTR of that run."""


class IntervalParameters(WarmParameters, frozen=True):
    """Parameters of `fault.interval`."""

    mtbf_s: Positive = 3600.0
    """Mean time between failures that policies of checkpointers begin with."""


class InjectParameters(Parameters, frozen=True):
    """Parameters of `fault.inject`."""

    due: Annotated[list[tuple[str, int, int]], Meta(description="a list of [fault, rank, step]")]
    """(fault, rank that it strikes, step before which it does)."""


REMEDIES = (
    RemedyRecord(
        "fault.guard", GuardParameters, "headway.fault.torch_guard:guard",
        allow="lossy", changes="it changes the results of a job whose loss breaks", conflicts=("model.tune",),
    ),
    RemedyRecord(WARM, WarmParameters, "headway.fault.apply:warm", ("restart",)),
    RemedyRecord(INTERVAL, IntervalParameters, "headway.fault.apply:follow_failures", ("rework",)),
)  # fmt: skip
"""What a plan may hold of this room."""

DRILL = (RemedyRecord("fault.inject", InjectParameters, "headway.fault.torch_drill:inject"),)
"""What a drill does; no plan of a user's names it."""
