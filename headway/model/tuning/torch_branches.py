"""Branches of a training state: in memory while a search runs, as bytes in a checkpoint.

A branch in memory is a `TrainingState`, which is put back in place. One in a
checkpoint is the state dicts of the objects, so that it can be read by another
process; it is written and read by way of the objects themselves.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from headway.model.tuning.search import Trial
from headway.runtime.torch_state import RngStates, TrainingState


class LoaderPosition(msgspec.Struct):
    """Where a branch is in the loader."""

    epoch: int = 0
    """Passes of this call of `steps` that have ended."""
    batches: int = 0
    """Batches of the pass so far."""


class TuningProgress(msgspec.Struct):
    """What is not a tensor, between two steps."""

    place: LoaderPosition = msgspec.field(default_factory=LoaderPosition)
    setting: dict[str, Any] | None = None
    label: str = ""
    num_steps: int = 0
    num_trials: int = 0
    num_searches: int = 0
    most_trials: int = 0
    """Most trials of the next search: as many as the one before had; 0 before the first."""
    fruitless: int = 0
    """Searches in a row that found nothing better: each doubles the wait for the next."""
    metric: float | None = None
    window_steps: int = 0
    """Steps of a window of the run."""
    trial_steps: int = 0
    """Length of the trials that chose the setting."""
    window: list[float] = []
    means: list[float] = []
    """Mean loss of each window since the latest search."""


class Searching(msgspec.Struct):
    """A search, as it is saved."""

    most_steps: int
    most_trials: int
    start: float | None
    start_count: int
    first: list[dict[str, Any]]
    trials: list[Trial]
    trial_steps: int
    converged: bool
    compared_at: int = 0


@dataclass(slots=True)
class Branch:
    """A training state that is not in force, and its place in the data."""

    state: TrainingState
    place: LoaderPosition

    @classmethod
    def of(cls, objects: Mapping[str, Any], place: LoaderPosition) -> Branch:
        """Copy what is in force."""
        return cls(TrainingState(objects), msgspec.structs.replace(place))

    def put_back(self) -> LoaderPosition:
        """Put it in force, and return its place."""
        self.state.put_back()
        return msgspec.structs.replace(self.place)


def packed(objects: Mapping[str, Any], place: LoaderPosition) -> bytes:
    """Return the state dicts of what is in force, the generators and the place."""
    buffer = io.BytesIO()
    states = {name: thing.state_dict() for name, thing in objects.items()}
    torch.save({"states": states, "generators": RngStates().state_dict(), "place": msgspec.json.encode(place)}, buffer)
    return buffer.getvalue()


def unpack(objects: Mapping[str, Any], written: bytes) -> LoaderPosition:
    """Put in force what `packed` wrote, and return its place."""
    branch = torch.load(io.BytesIO(written), weights_only=True)
    for name, thing in objects.items():
        thing.load_state_dict(branch["states"][name])
    RngStates().load_state_dict(branch["generators"])
    return msgspec.json.decode(branch["place"], type=LoaderPosition)
