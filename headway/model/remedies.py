"""The remedy of settings: an optimizer is tuned while the run trains."""

from __future__ import annotations

from msgspec import field

from headway.core.remedies import Count, Names, Parameters, RemedyRecord, Size


class TuneParameters(Parameters, frozen=True):
    """Parameters of `model.tune`."""

    settings: Names = field(default_factory=lambda: ["lr=1e-5:1:log"])
    """NAME=LOW:HIGH[:log] or NAME=VALUE,VALUE for each tunable."""
    trials: Size = 16
    """Most trials of the first search."""
    seed: Count = 0
    """Of the settings that are drawn."""


REMEDIES = (
    RemedyRecord(
        "model.tune", TuneParameters, "headway.model.tuning.apply:tune",
        allow="lossy", changes="other settings change what is learned",
        conflicts=("fault.guard",),  # losses of trials may break, which ends no job
    ),
)  # fmt: skip
"""What a plan may hold of this room."""
