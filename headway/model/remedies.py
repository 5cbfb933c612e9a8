"""Remedies of the model itself: settings are tuned while the run trains; operators compute in fewer bits."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from headway.core.errors import InputError
from headway.core.remedies import Count, Names, Parameters, RemedyRecord, Size
from headway.core.tables import pick

PRECISIONS = ("int8", "bf16", "float32")
"""Of an operator's product, fewest bits first."""

OperatorsOfRanks = Annotated[dict[str, dict[str, str]], Meta(description="rank -> operator -> int8, bf16 or float32")]


class TuneParameters(Parameters, frozen=True):
    """Parameters of `model.tune`."""

    settings: Names = field(default_factory=lambda: ["lr=1e-5:1:log"])
    """NAME=LOW:HIGH[:log] or NAME=VALUE,VALUE for each tunable."""
    trials: Size = 16
    """Most trials of the first search."""
    seed: Count = 0
    """Of the settings that are drawn."""


class PrecisionParameters(Parameters, frozen=True):
    """Parameters of `model.precision`."""

    operators: OperatorsOfRanks
    """Rank -> name of a module -> precision of its products; what is not named computes as it did."""

    def __post_init__(self) -> None:
        """Raise `InputError` on what is no rank and no precision."""
        for rank, operators in self.operators.items():
            if not rank.isdecimal():
                raise InputError(f"operators of model.precision names rank {rank!r}; write whole numbers from 0.")
            for name, precision in operators.items():
                pick(dict.fromkeys(PRECISIONS), precision, f"precision of operator {name!r}")


class PrecisionPhase(Parameters, frozen=True):
    """Parameters of a phase of `headway model precision`."""

    precision: str
    steps: Size
    """Steps without sync between ranks."""
    warmup: Count
    """First steps, which do not count."""
    in_sync: Count = 0
    """Steps as they are, before those without sync."""

    def __post_init__(self) -> None:
        """Raise `UnknownNameError` on what is no precision."""
        pick(dict.fromkeys(PRECISIONS), self.precision, "precision")


REMEDIES = (
    RemedyRecord(
        "model.precision", PrecisionParameters, "headway.model.precision.apply:precision",
        allow="lossy", changes="products in fewer bits change what is computed",
        conflicts=("model.tune",),
    ),
    RemedyRecord(
        "model.tune", TuneParameters, "headway.model.tuning.apply:tune",
        allow="lossy", changes="other settings change what is learned",
        conflicts=("fault.guard",),  # losses of trials may break, which ends no job
    ),
)  # fmt: skip
"""What a plan may hold of this room."""

MEASUREMENTS = (RemedyRecord("measure.precision", PrecisionPhase, "headway.model.precision.apply:measure"),)
"""Phase of `headway model precision -- SCRIPT`."""
