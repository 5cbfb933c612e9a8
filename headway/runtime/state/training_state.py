"""The state of a training job in memory: captured between steps, put back in place as often as needed.

Use it to try something and return: train some steps with one setting, put the
state back, train them with another. Tensors are written where they are, so
whoever refers to a parameter, a buffer or an optimizer's moment goes on
referring to it (graphs that were captured, DDP's buckets, other modules).

    objects = {"model": model, "optimizer": optimizer, "scaler": scaler, "loader": loader}
    state = TrainingState(objects)      # at the end of a step: gradients are no part of it
    ...                                 # train
    state.put_back()                    # parameters, buffers, moments, generators, positions as they were

>>> model = torch.nn.Linear(2, 2)
>>> state, weight = TrainingState({"model": model}), model.weight
>>> drawn = torch.rand(3)
>>> with torch.no_grad():
...     before, _ = weight.clone(), weight.zero_()
>>> state.put_back()
>>> bool((weight == before).all()), model.weight is weight, bool((torch.rand(3) == drawn).all())
(True, True, True)
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headway.core.errors import InputError
from headway.core.processes.interruptions import pass_on
from headway.runtime.state.copying import copy_into
from headway.runtime.state.rng_state import RngStates


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A state dict, and the elements that its tensors had."""

    state: Any
    """The mappings, lists and values, copied; the tensors in it are the state's own."""

    elements: list[tuple[torch.Tensor, torch.Tensor]]
    """Each tensor, and a copy of it."""

    @classmethod
    def of(cls, state: Any, tensors: Iterable[torch.Tensor]) -> StateCopy:
        """Copy `state`, in which `tensors` are; what `copy.deepcopy` raises of a value is raised."""
        found = list(tensors)
        apart = copy.deepcopy(state, {id(tensor): tensor for tensor in found})
        return cls(apart, _elements(found))

    def write(self) -> Any:
        """Write the elements into the tensors again, and return the state itself: who changes it has used it up."""
        _write(self.elements)
        return self.state

    def put_back(self) -> Any:
        """Write the elements into the tensors again, and return the state with mappings and lists of its own."""
        _write(self.elements)
        return copy.deepcopy(self.state, {id(tensor): tensor for tensor, _ in self.elements})


class TrainingState:
    """The state of some objects and of the process's generators, when it was made.

    It takes as much memory as the tensors, on their devices.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        """Capture `objects`: name -> a module, an optimizer, or anything with `state_dict` and `load_state_dict`.

        Of a module also the buffers that its state dict leaves out. Raises
        `InputError` for an object of which there is no state, or none that can be copied.
        """
        self._modules: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        self._optimizers: list[_OptimizerCopy] = []
        self._others: dict[str, tuple[Any, StateCopy]] = {}
        for name, thing in objects.items():
            if isinstance(thing, torch.nn.Module):
                self._modules.append(_elements([*thing.parameters(), *thing.buffers()]))
            elif isinstance(thing, torch.optim.Optimizer):
                self._optimizers.append(_OptimizerCopy(thing))
            else:
                self._others[name] = (thing, _state_copy(name, thing))
        self._generators = RngStates().state_dict()

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies of tensors."""
        lists = [
            *self._modules,
            *(optimizer.elements for optimizer in self._optimizers),
            *(kept.elements for _, kept in self._others.values()),
        ]
        return sum(slot.nbytes for elements in lists for _, slot in elements)

    def put_back(self) -> None:
        """Give every object the state that it had. Raises `InputError` where one refuses; the others have theirs."""
        for elements in self._modules:
            _write(elements)
        for optimizer in self._optimizers:
            optimizer.put_back()
        refusal: InputError | None = None
        for name, (thing, kept) in self._others.items():
            try:
                thing.load_state_dict(kept.put_back())
            except Exception as cause:  # whatever the user's object raises
                pass_on(cause)
                refusal = InputError(f"'{name}' refuses the state that it had ({type(cause).__name__}: {cause}).")
                refusal.__cause__ = cause
        RngStates().load_state_dict(self._generators)  # last: a load_state_dict may draw
        if refusal is not None:
            raise refusal


class _OptimizerCopy:
    """An optimizer's groups and state; torch's own load_state_dict would replace the tensors instead."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        tensors = list(_tensors([_settings(optimizer), list(optimizer.state.values())]))
        # Parameters are keys of the state and shared with the module: they are no part of this copy.
        state = {id(parameter): values for parameter, values in optimizer.state.items()}
        self._kept = StateCopy.of({"groups": _settings(optimizer), "state": state}, tensors)
        self.elements = self._kept.elements

    def put_back(self) -> None:
        """Restore settings and state; what a parameter did not have yet is dropped."""
        kept, optimizer = self._kept.put_back(), self._optimizer
        # Groups that were added since keep their settings.
        for group, settings in zip(optimizer.param_groups, kept["groups"], strict=False):
            group.update(settings)
        for parameter in list(optimizer.state):
            if id(parameter) not in kept["state"]:
                del optimizer.state[parameter]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in kept["state"]:
                    optimizer.state[parameter] = kept["state"][id(parameter)]


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group, without its parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _state_copy(name: str, thing: Any) -> StateCopy:
    """Return a copy of the state of an object that has a state dict."""
    if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
        raise InputError(
            f"'{name}' is a {type(thing).__name__}, which has no state_dict and load_state_dict. Pass an object that "
            "has both."
        )
    state = thing.state_dict()
    try:
        return StateCopy.of(state, _tensors(state))
    except Exception as cause:
        pass_on(cause)
        raise InputError(
            f"the state of '{name}' cannot be copied ({type(cause).__name__}: {cause}). Leave the object out."
        ) from cause


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested mappings, lists and tuples."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)


def _elements(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each tensor once, with a copy of its elements."""
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for tensor in tensors:
        if id(tensor) not in found:
            slot = torch.empty_like(tensor.detach())
            copy_into(slot, tensor.detach())
            found[id(tensor)] = (tensor, slot)
    return list(found.values())


def _write(elements: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write elements into their tensors, by torch: autograd then refuses a graph that has saved what they were."""
    with torch.no_grad():
        for tensor, kept in elements:
            tensor.copy_(kept)
