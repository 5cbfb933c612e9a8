"""State dicts that a checkpoint can be read into: filled with room for what it holds, and handed back afterwards.

`States(objects, stored)` gathers `{"model": model.state_dict(), ...}`. Where
an object cannot hold what is stored yet, room is made without running it: an
optimizer that has taken no step gets state tensors shaped like its
parameters (no step, no gradient, no random number), an object of plain values
gets the keys that were saved. Tensors that an object shares with its state
dict are filled in place; its mappings and lists are copied first, so that the
object learns of a restore by `load_state_dict` alone.

An object with a `load_state_dict` of its own may refuse. Small ones are
`asked` before all others, and `put_back` into the state that they had when
one refuses; modules, optimizers and large objects follow in `hand_back`.

>>> import torch
>>> weight = torch.nn.Parameter(torch.ones(2))
>>> optimizer = torch.optim.Adam([weight])
>>> room = _room_like(weight, (2,), "float32")
>>> room.shape == weight.shape, weight.tolist()
(True, [1.0, 1.0])
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from headway.checkpoint.layout.stored import StoredCheckpoint
from headway.checkpoint.state.shards import PLAIN as PLAIN_TENSORS
from headway.checkpoint.state.shards import FlatShard, Leaf, is_tensor, leaves
from headway.core.errors import InputError
from headway.core.units import MIB
from headway.runtime.torch_state import RngStates, StateCopy

PLAIN = (Mapping, list, torch.Tensor, FlatShard, str, bytes, int, float, complex, tuple, type(None))
"""What is its own state: tensors are filled in place, other values replaced where they stand."""

LAST = (torch.nn.Module, torch.optim.Optimizer, RngStates, *PLAIN)
"""What is not asked: large, or never refuses what fits. A load_state_dict may draw random numbers, before RngStates."""

KEPT_BYTES = 64 * MIB
"""An object whose tensors are larger is not asked: its earlier state would be a second copy of them."""


class States:
    """The state dicts of some objects, with room for what `stored` holds of them."""

    def __init__(self, objects: Mapping[str, Any], stored: StoredCheckpoint) -> None:
        self.objects = objects
        """Name -> anything with `state_dict` and `load_state_dict`, or a value that is its own state."""
        self.state: dict[str, Any] = {}
        """Name -> its state dict."""
        self._earlier: dict[str, StateCopy] = {}
        self._given: list[str] = []
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

    @property
    def asked(self) -> set[str]:
        """Names of the objects that are asked first."""
        return set(self._earlier)

    def check(self) -> None:
        """Raise `InputError` where an optimizer groups its parameters otherwise than the saved one did."""
        for name, thing in self.objects.items():
            if isinstance(thing, torch.optim.Optimizer) and "param_groups" in self.state[name]:
                mine = [len(group["params"]) for group in thing.param_groups]
                saved = [len(group.get("params", ())) for group in self.state[name]["param_groups"]]
                if mine != saved:
                    raise InputError(
                        f"'{name}' was saved with groups of {saved} parameters and has groups of {mine} here. Build "
                        "the optimizer over the groups that it had."
                    )

    def ask(self) -> None:
        """Give the objects that may refuse their state. Raises `InputError` where one does: `put_back` all then."""
        for name in self._earlier:
            self._given.append(name)
            self._give(name, strict=True)

    def put_back(self) -> None:
        """Give the objects that were asked the state that they had. Raises `InputError` where one refuses that too."""
        refusal: InputError | None = None
        for name, earlier in self._earlier.items():
            state = earlier.write()
            if name in self._given:
                self.state[name] = state
                try:
                    self._give(name, strict=True)
                except InputError as error:
                    refusal = error
        self._given.clear()
        if refusal is not None:
            raise InputError(f"{refusal} That was the state which it had before: it is in none now.") from refusal

    def hand_back(self, *, strict: bool) -> None:
        """Give every object that was not asked its state. Raises `InputError` where one refuses."""
        for name in self.objects:
            if name not in self._earlier:
                self._give(name, strict=strict)

    def _give(self, name: str, *, strict: bool) -> None:
        """Give an object its state."""
        thing, state = self.objects[name], self.state[name]
        try:
            if isinstance(thing, torch.nn.Module):
                thing.load_state_dict(state, strict=strict)
            elif isinstance(thing, torch.optim.Optimizer):
                _load_optimizer(thing, state)
            elif not isinstance(thing, PLAIN):
                thing.load_state_dict(state)
            elif state is not thing and isinstance(self.objects, MutableMapping):
                self.objects[name] = state
        except Exception as cause:
            raise InputError(
                f"'{name}' refuses what is stored of it ({type(cause).__name__}: {cause}). Build it as it was when it "
                "was saved, or leave it out of the objects."
            ) from cause

    def _gather(self, name: str, thing: Any, saved: dict[str, tuple[str | int, ...]], stored: StoredCheckpoint) -> Any:
        """Return the state dict of one object, with room for the `saved` names: name -> keys below the object."""
        if isinstance(thing, PLAIN):
            return thing
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise InputError(
                f"'{name}' is a {type(thing).__name__}, which has no state_dict and load_state_dict. Pass an object "
                "that has both, or a dict of tensors."
            )
        state = thing.state_dict()
        if not isinstance(thing, LAST) and (earlier := _earlier(state)) is not None:
            self._earlier[name] = earlier
        state = _apart(state)
        if isinstance(thing, torch.nn.Module):
            return state
        held = {leaf.fqn: leaf for leaf in leaves({name: state})}
        lacking = {fqn: path for fqn, path in saved.items() if path and (fqn not in held or held[fqn].value is None)}
        if hasattr(thing, "wants"):  # it holds a part of what all ranks saved under its name
            lacking = {fqn: path for fqn, path in lacking.items() if thing.wants(path)}
        if isinstance(thing, torch.optim.Optimizer):
            return _optimizer_room(thing, state, lacking, _saved_ids(saved), stored)
        root = {"": state}
        for fqn, path in lacking.items():
            _put(root, ("", *path), _room(stored, fqn))
        return root[""]


def _apart(state: Any) -> Any:
    """Return a state with mappings and lists of its own; the values in them, tensors too, are the same.

    >>> state = {"seen": [1], "by": {"a": 2}}
    >>> other = _apart(state)
    >>> other["seen"].append(3); other["by"]["a"] = 4; state
    {'seen': [1], 'by': {'a': 2}}
    """
    if type(state) is list:
        return [_apart(value) for value in state]
    if not isinstance(state, MutableMapping):
        return state
    found = copy.copy(state)
    for key, value in state.items():
        if isinstance(value, MutableMapping | list):
            found[key] = _apart(value)
    return found


def _earlier(state: Any) -> StateCopy | None:
    """Return a state to be put back; None where it is large, spread over ranks, or cannot be copied."""
    tensors = [leaf.value for leaf in leaves({"": state}) if is_tensor(leaf.value)]
    is_plain = all(type(tensor) in PLAIN_TENSORS for tensor in tensors)
    if not is_plain or sum(tensor.nbytes for tensor in tensors) > KEPT_BYTES:
        return None
    try:
        return StateCopy.of(state, tensors)
    except Exception:  # whatever a value of the user's raises: it is given its state as a large one is
        return None


def _by_object(stored: StoredCheckpoint, objects: Mapping[str, Any]) -> dict[str, dict[str, tuple[str | int, ...]]]:
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
    stored: StoredCheckpoint,
) -> dict[str, Any]:
    """Return an optimizer's state dict with room for the state that is saved, and none for other parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state["state"] = {key: held for key, held in state["state"].items() if not isinstance(key, int) or key in saved_ids}
    for group in state.get("param_groups", ()):  # groups may share a tensor of a rate that was saved for each
        group |= {key: value.clone() for key, value in group.items() if isinstance(value, torch.Tensor)}
    for fqn, path in lacking.items():
        if path[0] == "param_groups":
            _put(state, path, _room(stored, fqn))
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


def _room(stored: StoredCheckpoint, fqn: str) -> Any:
    """Return memory for a saved tensor, whole on the host, or None for an object."""
    if fqn not in stored.tensors:
        return None
    shape, dtype = stored.tensors[fqn]
    return torch.zeros(shape, dtype=getattr(torch, dtype))


def _put(state: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Put a value under `path`, making the mappings and lists on the way as DCP names them: lists by numbers.

    What stands in the way gives way.

    >>> state = {"seen": 5, "by": {0: None}}
    >>> _put(state, ("seen", "best", 1), 7); _put(state, ("by", "3"), 8); state
    {'seen': {'best': [None, 7]}, 'by': {0: None, 3: 8}}
    """
    for key, below in zip(path, (*path[1:], None), strict=True):
        if isinstance(state, list):
            key = int(key)
            state.extend([None] * (key + 1 - len(state)))
            held = state[key]
        else:
            # DCP writes all keys as text; where the mapping's own are numbers, so was this one.
            numbered = bool(state) and all(isinstance(held, int) for held in state)
            key = int(key) if numbered and str(key).lstrip("-").isdecimal() else key
            held = state.get(key)
        if below is None:
            state[key] = value
        elif not _leads_to(held, below):
            held = state[key] = [] if isinstance(below, int) else {}
        state = held


def _leads_to(state: Any, key: str | int) -> bool:
    """Tell whether a value is a list or a mapping that may hold a key; without notes of DCP's all keys are text."""
    if isinstance(state, list):
        return isinstance(key, int) or key.isdecimal()
    return isinstance(state, MutableMapping) and isinstance(key, str)


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
