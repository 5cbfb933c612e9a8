"""The remedy of pipelines: another order of a schedule's actions."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from headway.core.remedies import Parameters, RemedyRecord


class ScheduleParameters(Parameters, frozen=True):
    """Parameters of `parallel.schedule`."""

    order: Annotated[list[str], Meta(min_length=2, description="a row of torch's CSV for each of at least 2 ranks")]
    """A row of torch's compute-only CSV per rank of the pipeline, such as '0F0,0F1,0I0,0W0'."""


REMEDIES = (RemedyRecord("parallel.schedule", ScheduleParameters, "headway.parallel.apply:schedule", ("bubble.p2p",)),)
"""What a plan may hold of this room."""
