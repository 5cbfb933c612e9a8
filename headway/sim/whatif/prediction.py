"""The answer to a what-if: the step time that was measured, and the one after the edits. Float seconds.

>>> Prediction(0.02, 0.01, (1.9, 2.1), ("input=instant",)).speedup
2.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the edits would do to the mean time of a step."""

    base_step_s: float
    """Measured, without edits."""

    step_s: float
    """Predicted."""

    interval: tuple[float, float]
    """Range of the speedup: 90 % of block resamples of the steps, widened by what the replay itself misses."""

    edits: tuple[str, ...]
    """The edits, as written."""

    note: str = ""
    """What the model had to assume; '' when nothing."""

    @property
    def speedup(self) -> float:
        """Steps per second after / before."""
        return self.base_step_s / self.step_s if self.step_s else float("inf")

    def to_json(self) -> dict[str, Any]:
        """Return the object of `headway whatif --json`."""
        return {
            "schema": "headway.whatif/1",
            "base_step_s": self.base_step_s,
            "step_s": self.step_s,
            "speedup": self.speedup,
            "interval": list(self.interval),
            "edits": list(self.edits),
            "note": self.note,
        }
