"""The remedy of power that swings: work that nobody needs while a rank waits."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from headway.core.remedies import Parameters, Positive, RemedyRecord


class FillerParameters(Parameters, frozen=True):
    """Parameters of `power.filler`."""

    on_after_s: Positive = 0.02
    """Seconds of waiting after which it begins."""
    off_within_s: Positive = 0.005
    """Seconds within which it ends."""
    level: Annotated[float, Meta(gt=0, le=1, description="a number above 0, 1 at most")] = 0.9
    """Fraction of a core."""


REMEDIES = (RemedyRecord("power.filler", FillerParameters, "headway.power.apply:fill_gaps"),)
"""What a plan may hold of this room."""
