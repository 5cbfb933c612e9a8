"""Branches of a training state: in memory while a search runs, as bytes in a checkpoint.

A branch in memory is a `TrainingState`, which is put back in place. One in a
checkpoint is the state dicts of the objects, so that it can be read by another
process; it is written and read by way of the objects themselves.

Who sets a tunable: an option of the optimizers, or a function of the user's.

An option is set in every group that has it. Groups keep their ratio: with
learning rates 0.1 and 0.01, `lr = 1` sets 1 and 0.1. A scheduler keeps its
position: its base rate is set, and the rate in force by the same factor.
`momentum` is Adam's beta_1 where there is no momentum.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.optim.lr_scheduler import LRScheduler

from headway.core.errors import InputError
from headway.core.tables import suggestion
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


Setter = Callable[[Any], None]


def setters(names: Iterable[str], objects: Iterable[Any], given: Mapping[str, Setter]) -> dict[str, Setter]:
    """Return how to set each name. Raises `InputError` for one that nobody can set, and lists those that can be."""
    things = list(objects)
    optimizers = [thing for thing in things if isinstance(thing, torch.optim.Optimizer)]
    schedulers = [thing for thing in things if isinstance(thing, LRScheduler)]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    options = {key for group in groups for key, now in group.items() if key != "initial_lr" and _is_number(now)}
    options |= {"momentum"} if any("betas" in group for group in groups) else set()
    found: dict[str, Setter] = {}
    for name in names:
        if name in given:
            found[name] = given[name]
        elif name in options:
            found[name] = _Option(name, optimizers, schedulers)
        else:
            fix = f"Pass set={{{name!r}: function}}, or a setting of an optimizer in state=[...]."
            near = suggestion(options, name) if options else "state=[...] holds no optimizer."
            raise InputError(f"nobody can set the tunable {name!r}. {fix} {near}")
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


class _Option:
    """Sets one option of the optimizers."""

    def __init__(self, name: str, optimizers: list[torch.optim.Optimizer], schedulers: list[LRScheduler]) -> None:
        self._name, self._optimizers, self._schedulers = name, optimizers, schedulers

    def __call__(self, value: Any) -> None:
        """Set it everywhere."""
        name = self._name
        every = [group for optimizer in self._optimizers for group in optimizer.param_groups]  # restores make new ones
        if name == "momentum" and not any("momentum" in group for group in every):
            for group in every:
                if "betas" in group:
                    group["betas"] = (value, *group["betas"][1:])
            return
        groups = [group for group in every if name in group]
        # The rate that a scheduler began with is the tunable; what it made of it since is a factor on top.
        first = next((group.get("initial_lr", group["lr"]) for group in groups if name == "lr"), None)
        for group in groups:
            if name != "lr":
                group[name] = value
                continue
            base = float(group.get("initial_lr", group["lr"]))
            ratio = base / float(first) if first else 1.0
            factor = float(group["lr"]) / base if base else 1.0
            _put(group, "lr", value * ratio * factor)
            if "initial_lr" in group:
                _put(group, "initial_lr", value * ratio)
        if name == "lr":
            for scheduler in self._schedulers:
                scheduler.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]


def _put(group: dict[str, Any], key: str, value: float) -> None:
    """Write a number in place where the optimizer holds it in a tensor."""
    if isinstance(group[key], torch.Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def check_held(state: Sequence[Any]) -> None:
    """Raise `InputError` where an optimizer's parameters are in nothing of `state`: no branch would put them back."""
    held = {id(thing) for thing in state if isinstance(thing, torch.Tensor)}
    held |= {id(p) for thing in state if isinstance(thing, torch.nn.Module) for p in thing.parameters()}
    optimizers = [thing for thing in state if isinstance(thing, torch.optim.Optimizer)]
    lost = sum(id(p) not in held for each in optimizers for group in each.param_groups for p in group["params"])
    if lost:
        raise InputError(
            f"{lost} parameters of the optimizer are in nothing of state=[...], so a branch would not put them back. "
            "Pass the model beside the optimizer."
        )
