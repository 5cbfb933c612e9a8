"""State dicts that a checkpoint can be read into: filled with room for what it holds, and handed back afterwards.

`States(objects, stored)` gathers `{"model": model.state_dict(), ...}`. Where
an object cannot hold what is stored yet, room is made without running it: an
optimizer that has taken no step gets state tensors shaped like its
parameters (no step, no gradient, no random number), an object of plain values
gets the keys that were saved. `hand_back` gives each object its state by
`load_state_dict`. Tensors that an object shares with its state dict are
filled in place.

>>> import torch
>>> weight = torch.nn.Parameter(torch.ones(2))
>>> optimizer = torch.optim.Adam([weight])
>>> room = _room_like(weight, (2,), "float32")
>>> room.shape == weight.shape, weight.tolist()
(True, [1.0, 1.0])
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from headway.checkpoint.runtime.shards import FlatShard, Leaf, leaves
from headway.checkpoint.stored import Stored
from headway.core.errors import InputError

PLAIN = (Mapping, list, torch.Tensor, FlatShard, str, bytes, int, float, complex, tuple, type(None))
"""What is its own state: tensors are filled in place, other values replaced where they stand."""


class States:
    """The state dicts of some objects, with room for what `stored` holds of them."""

    def __init__(self, objects: Mapping[str, Any], stored: Stored) -> None:
        self.objects = objects
        """Name -> anything with `state_dict` and `load_state_dict`, or a value that is its own state."""
        self.state: dict[str, Any] = {}
        """Name -> its state dict."""
        saved = _by_object(stored, objects)
        for name, thing in objects.items():
            self.state[name] = self._gather(name, thing, saved[name], stored)

    @property
    def leaves(self) -> dict[str, Leaf]:
        """Every value that is to be restored, by its name."""
        return {leaf.fqn: leaf for leaf in leaves(self.state)}

    def is_exact(self, fqn: str) -> bool:
        """Whether a saved name that nothing wants is a mistake: it is where a module, with its fixed keys, lacks it."""
        return isinstance(self.objects.get(fqn.partition(".")[0]), torch.nn.Module)

    def hand_back(self, *, strict: bool) -> None:
        """Give every object its state."""
        for name, thing in self.objects.items():
            if isinstance(thing, torch.nn.Module):
                thing.load_state_dict(self.state[name], strict=strict)
            elif isinstance(thing, torch.optim.Optimizer):
                _load_optimizer(thing, self.state[name])
            elif not isinstance(thing, PLAIN):
                thing.load_state_dict(self.state[name])
            elif self.state[name] is not thing and isinstance(self.objects, MutableMapping):
                self.objects[name] = self.state[name]

    def _gather(self, name: str, thing: Any, saved: dict[str, tuple[str | int, ...]], stored: Stored) -> Any:
        """Return the state dict of one object, with room for the `saved` names: name -> keys below the object."""
        if isinstance(thing, PLAIN):
            return thing
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise InputError(
                f"'{name}' is a {type(thing).__name__}, which has no state_dict and load_state_dict. Pass an object "
                "that has both, or a dict of tensors."
            )
        state = thing.state_dict()
        if isinstance(thing, torch.nn.Module):
            return state
        held = {leaf.fqn: leaf for leaf in leaves({name: state})}
        lacking = {fqn: path for fqn, path in saved.items() if path and (fqn not in held or held[fqn].value is None)}
        if isinstance(thing, torch.optim.Optimizer):
            return _optimizer_room(thing, state, lacking, _saved_ids(saved), stored)
        for fqn, path in lacking.items():
            _put(state, path, _room(stored, fqn))
        return state


def _by_object(stored: Stored, objects: Mapping[str, Any]) -> dict[str, dict[str, tuple[str | int, ...]]]:
    """Return object -> saved name -> keys below the object."""
    found: dict[str, dict[str, tuple[str | int, ...]]] = {name: {} for name in objects}
    for fqn in (*stored.tensors, *stored.objects):
        path = stored.paths.get(fqn) or tuple(fqn.split("."))
        if path[0] in found:
            found[str(path[0])][fqn] = path[1:]
    return found


def _saved_ids(saved: Mapping[str, tuple[str | int, ...]]) -> set[int]:
    """Return the parameters, as an optimizer numbers them, of which state is saved."""
    return {int(path[1]) for path in saved.values() if path[0] == "state" and str(path[1]).isdecimal()}


def _optimizer_room(
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    lacking: Mapping[str, tuple[str | int, ...]],
    saved_ids: set[int],
    stored: Stored,
) -> dict[str, Any]:
    """Return an optimizer's state dict with room for the state that is saved, and none for other parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state["state"] = {key: held for key, held in state["state"].items() if not isinstance(key, int) or key in saved_ids}
    for fqn, path in lacking.items():
        if path[0] != "state" or len(path) < 3 or not str(path[1]).isdecimal():
            continue
        if int(path[1]) >= len(parameters):
            raise InputError(
                f"the checkpoint holds '{fqn}', but the optimizer has {len(parameters)} parameters. Build it over the "
                "parameters that it had when it was saved."
            )
        room = _room(stored, fqn)
        if fqn in stored.tensors:
            room = _room_like(parameters[int(path[1])], *stored.tensors[fqn])
        _put(state["state"].setdefault(int(path[1]), {}), path[2:], room)
    return state


def _room_like(parameter: torch.Tensor, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Return memory for state of a parameter: placed as it is when it has its shape, else whole on the host."""
    kind: torch.dtype = getattr(torch, dtype)
    if tuple(parameter.shape) == shape:
        return torch.zeros_like(parameter.detach(), dtype=kind)
    return torch.zeros(shape, dtype=kind)


def _room(stored: Stored, fqn: str) -> Any:
    """Return memory for a saved tensor, whole on the host, or None for an object."""
    if fqn not in stored.tensors:
        return None
    shape, dtype = stored.tensors[fqn]
    return torch.zeros(shape, dtype=getattr(torch, dtype))


def _put(state: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Put a value under `path`, making the mappings and lists on the way as DCP names them: lists by numbers."""
    for key, below in zip(path, (*path[1:], None), strict=True):
        if isinstance(key, int):
            state.extend([None] * (key + 1 - len(state)))
        elif isinstance(state, MutableMapping):
            # DCP writes all keys as text; where the mapping's own are numbers, so was this one.
            numbered = bool(state) and all(isinstance(held, int) for held in state)
            key = int(key) if numbered and key.lstrip("-").isdecimal() else key
        held = state[key] if isinstance(key, int) and isinstance(state, list) else state.get(key)
        if below is None:
            state[key] = value
        elif held is None:
            held = state[key] = [] if isinstance(below, int) else {}
        state = held


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state dict, and keep its state as it was saved: torch casts it to the parameter's type."""
    optimizer.load_state_dict(state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, held in state["state"].items():
        if not isinstance(number, int):
            continue
        loaded = optimizer.state[parameters[number]]
        for key, value in held.items():
            if isinstance(value, torch.Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)
