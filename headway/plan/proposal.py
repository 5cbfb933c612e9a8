"""One change to a job, with what it would win, cost and risk; and one that was considered and refused.

Advisers (`advise.py` of each room) yield these, the planner composes them.

>>> Proposal("data.workers", "data", ("workers=4",), 1.8, (1.6, 1.9), applies=True).clear
True
>>> Proposal("data.workers", "data", ("workers=4",), 1.03, (0.98, 1.09), applies=True).clear
False
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.core.errors import InputError

MIN_SPEEDUP = 1.02
"""A gain below this is not worth a change."""

GAIN_THAT_LEADS = 1.05
"""From here on what a remedy wins leads the verdict, however large the losses that none wins back."""

KEYS = (
    "name", "room", "predicted_speedup", "interval", "applies", "cost", "risk", "reason", "edits", "parameters",
    "allow", "protects", "evaluation_share", "start_s",
)  # fmt: skip
"""Keys of a proposal in `headway plan --json`."""


def pays_from(start_s: float, base_step_s: float, step_s: float) -> float:
    """Return after how many steps of `step_s` `start_s` is won back; infinite where they are no shorter than before.

    >>> pays_from(3.0, 0.5, 0.2), pays_from(3.0, 0.5, 0.5)
    (10.0, inf)
    """
    return start_s / (base_step_s - step_s) if step_s < base_step_s else math.inf


@dataclass(frozen=True, slots=True)
class Gain:
    """What an edit wins."""

    predicted_speedup: float
    """Steps per second after / before."""

    interval: tuple[float, float]
    """Range of that."""

    @property
    def clear(self) -> bool:
        """Say whether it is worth having and is larger than the error of the prediction."""
        return self.predicted_speedup >= MIN_SPEEDUP and self.interval[0] > 1 + (MIN_SPEEDUP - 1) / 2

    @property
    def unresolved(self) -> bool:
        """Say whether it would lead a verdict, if the run told that it is there.

        >>> [Gain(gain, (low, 7.72)).unresolved for gain, low in ((1.31, 0.19), (1.31, 1.2), (1.04, 0.19))]
        [True, False, False]
        """
        return self.predicted_speedup >= GAIN_THAT_LEADS and not self.clear

    def __str__(self) -> str:
        """Return it as people read it: '1.50x (1.20 to 1.80)'."""
        return f"{self.predicted_speedup:.2f}x ({self.interval[0]:.2f} to {self.interval[1]:.2f})"


@dataclass(frozen=True, slots=True)
class Proposal:
    """A remedy for this run."""

    name: str
    """Name of the remedy: 'data.workers'."""

    room: str
    """Who proposes it."""

    edits: tuple[str, ...]
    """The change as edits of the recorded run: what the prediction replays, alone and in combination."""

    predicted_speedup: float
    """Steps per second after / before, when it is applied alone."""

    interval: tuple[float, float]
    """Range of that."""

    applies: bool
    """Whether `headway run --apply` can do it; False = predicted only."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    """What the remedy's function takes."""

    cost: str = ""
    """What it uses, in words: processes, memory."""

    risk: str = ""
    """What could go wrong or change, in words; '' = nothing known."""

    reason: str = ""
    """Why it should help, or what the prediction assumes."""

    memory_bytes: int = 0
    """Host memory that it needs per rank."""

    allow: str | None = None
    """What the user has to grant (`--allow`) before it may be applied."""

    conflicts: tuple[str, ...] = ()
    """Names of remedies that cannot be applied with it."""

    loaders: tuple[int, ...] = ()
    """Groups of the loaders that it is for; () = it is not about loaders."""

    left_alone: Mapping[int, str] = field(default_factory=dict)
    """Group -> why that loader does not take it."""

    protects: bool = False
    """Whether it is worth having for what it prevents: it is chosen without a gain in steps per second."""

    evaluation_share: float = 0.0
    """Part of the time won that is won in evaluations, 0..1."""

    by_hand: Gain | None = None
    """What the same wins as a line of the script, where that costs less than headway's own: no trial, no looks."""

    by_hand_script: str = ""
    """That line, where it is another one than the remedy's parameters give."""

    start_s: float = 0.0
    """Seconds that applying it costs once, at the start of a job: trials of loaders, as the recording timed them."""

    def __post_init__(self) -> None:
        """Check the interval."""
        if not self.interval[0] <= self.interval[1]:
            raise InputError(f"the interval of {self.name} is {self.interval}; give (low, high) with low <= high.")

    @property
    def clear(self) -> bool:
        """Say whether the gain is worth having and is larger than the error of the prediction."""
        return self.gain.clear

    @property
    def gain(self) -> Gain:
        """Return what it wins alone."""
        return Gain(self.predicted_speedup, self.interval)

    def pays_from(self, base_step_s: float) -> float:
        """Return after how many steps, each of `base_step_s` before, what it costs at the start is won back."""
        return pays_from(self.start_s, base_step_s, base_step_s / self.predicted_speedup)

    def to_json(self) -> dict[str, object]:
        """Return the row of `headway plan --json`."""
        row = {name: getattr(self, name) for name in KEYS}
        return row | {key: list(row[key]) for key in ("interval", "edits")} | {"parameters": dict(self.parameters)}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A remedy that was considered and is not proposed."""

    name: str
    """Name of the remedy."""

    room: str
    """Who considered it."""

    reason: str
    """Why not, with the number or the fact that decided."""

    unsafe: bool = False
    """Whether it was refused because it could change results, whatever it would gain."""

    left_alone: Mapping[int, str] = field(default_factory=dict)
    """Group -> why that loader does not take it."""

    known: str = ""
    """What this run made of the remedy already ("is in force already"); empty where it has not had it."""

    def to_json(self) -> dict[str, object]:
        """Return the row of the plan's list of refusals."""
        return {"name": self.name, "room": self.room, "reason": self.reason, "unsafe": self.unsafe}
