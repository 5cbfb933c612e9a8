"""What the order of the next pass over a sampler rests on: generators, epochs and states, its own and of those inside.

A sampler that draws from a generator of its own goes on drawing from pass to pass. So a state that was taken between
two passes holds where those generators stand then, one from the middle of a pass where they stood when it began: that
pass is read again up to its place.

>>> from torch.utils.data import RandomSampler
>>> sampler = RandomSampler(range(9), generator=torch.Generator().manual_seed(0))
>>> state = taken(sampler)
>>> first = list(sampler)
>>> put_back(sampler, state)
>>> list(sampler) == first
True
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import torch

from headway.runtime.draws import own_generators
from headway.runtime.samplers import generators_within, samplers_within

State = dict[str, Any]


def taken(sampler: Any) -> State:
    """Return {"generators", "others", "epochs", "states"}: of torch's generators, of others, of `epoch` numbers, and of
    samplers with `state_dict` and `load_state_dict`; what there is none of is left out."""
    found: State = {
        "generators": [generator.get_state() for generator in generators_within(sampler)],
        "epochs": [one.epoch for one in _with_epochs(sampler)],
    }
    others = [_state_of(generator) for generator in _others(sampler)]
    states = [one.state_dict() for one in _with_states(sampler)]
    return found | ({"others": others} if others else {}) | ({"states": states} if states else {})


def put_back(sampler: Any, state: State) -> None:
    """Bring a sampler to where one like it stood when `state` was taken.

    States of before this held those of one generator and one epoch: {"generator", "sampler_epoch"}.
    """
    for one, own in zip(_with_states(sampler), state.get("states", ()), strict=False):
        one.load_state_dict(own)
    states = state.get("generators", [state["generator"]] if "generator" in state else [])
    for generator, own in zip(generators_within(sampler), states, strict=False):
        generator.set_state(own)
    for generator, own in zip(_others(sampler), state.get("others", ()), strict=False):
        _set_state(generator, own)
    epochs = state.get("epochs", [state["sampler_epoch"]] if "sampler_epoch" in state else [])
    for one, epoch in zip(_with_epochs(sampler), epochs, strict=False):
        if hasattr(one, "set_epoch"):
            one.set_epoch(epoch)
        else:
            with suppress(AttributeError):  # it computes its epoch from something else
                one.epoch = epoch


def _with_epochs(sampler: Any) -> list[Any]:
    return [one for one in samplers_within(sampler) if isinstance(getattr(one, "epoch", None), int)]


def _with_states(sampler: Any) -> list[Any]:
    named = ("state_dict", "load_state_dict")
    return [one for one in samplers_within(sampler) if all(callable(getattr(one, name, None)) for name in named)]


def _others(sampler: Any) -> list[Any]:
    """Return the generators of numpy and Python that the sampler and those inside it hold as attributes."""
    attributes = [value for one in samplers_within(sampler) for value in getattr(one, "__dict__", {}).values()]
    found = [value for value in own_generators(attributes) if not isinstance(value, torch.Generator)]
    return [value for value in found if any(value is one for one in attributes)]


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)
