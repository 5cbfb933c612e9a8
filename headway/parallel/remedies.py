"""The remedy of pipelines: another order of a schedule's actions."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headway.core.errors import InputError
from headway.core.remedies import Parameters, RemedyRecord


class ScheduleParameters(Parameters, frozen=True):
    """Parameters of `parallel.schedule`."""

    order: (
        Annotated[list[str], Meta(min_length=2, description="a row of torch's CSV for each of at least 2 ranks")] | None
    ) = None
    """A row of torch's compute-only CSV per rank of the pipeline, such as '0F0,0F1,0I0,0W0'."""

    preds: Annotated[list[list[int]], Meta(description="the stages before each stage")] | None = None
    """Beside `order`, on a runner of headway's: the stages that each stage takes its inputs from; None = a chain."""

    schedule: Annotated[Literal["two_buffer"], Meta(description="two_buffer")] | None = None
    """Instead, on a runner of headway's: a schedule without a flush."""

    def __post_init__(self) -> None:
        """Raise `InputError` unless one of both is given."""
        if (self.order is None) == (self.schedule is None):
            raise InputError(
                "parallel.schedule takes order, a row of torch's CSV for each of at least 2 ranks, or schedule, "
                "two_buffer. Give one of them, or regenerate the plan: headway plan RUN."
            )


REMEDIES = (RemedyRecord("parallel.schedule", ScheduleParameters, "headway.parallel.apply:schedule", ("bubble.p2p",)),)
"""What a plan may hold of this room."""
