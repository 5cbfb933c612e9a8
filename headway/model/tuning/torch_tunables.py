"""Who sets a tunable: an option of the optimizers, or a function of the user's.

An option is set in every group that has it. Groups keep their ratio: with
learning rates 0.1 and 0.01, `lr = 1` sets 1 and 0.1. A scheduler keeps its
position: its base rate is set, and the rate in force by the same factor.
`momentum` is Adam's beta_1 where there is no momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from headway.core.errors import InputError
from headway.core.tables import suggestion

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
