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

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from itertools import islice
from typing import Any

import numpy as np
import torch

from headway.core.errors import HeadwayError
from headway.core.processes.child import said
from headway.core.processes.interruptions import pass_on
from headway.data.runtime.positions.hidden_state import Opaque, Path, changed, shown, values_in, write_back
from headway.runtime.script.draws import own_generators
from headway.runtime.script.object_graph import attributes
from headway.runtime.script.samplers import generators_within, innermost, samplers_within

State = dict[str, Any]

LONGEST_S = 5.0
"""A child that reads a sampler again may take so long; after one that has no answer there is no other."""


def taken(sampler: Any) -> State:
    """Return {"generators", "others", "epochs", "states", "hidden", "unsaved"}.

    They are of torch's generators, of others, of `epoch` numbers, and of samplers with `state_dict` and
    `load_state_dict`; then what else has changed since the sampler's first pass (`hidden_state`), and the names of what
    has changed and cannot be copied. What there is none of is left out.
    """
    try:
        return _taken(sampler)
    except HeadwayError:
        raise
    except Exception as cause:  # whatever a class of the script's raises: a save of the job must not fail by it
        pass_on(cause)
        return {"generators": [], "epochs": [], "unsaved": [f" ({type(cause).__name__}: {cause})"]}


def _taken(sampler: Any) -> State:
    inner = innermost(sampler)
    first = _first_values(inner)
    found: State = {
        "generators": [generator.get_state() for generator in generators_within(sampler)],
        "epochs": [one.epoch for one in _with_epochs(sampler)],
    }
    others = [_state_of(generator) for generator in _others(sampler)]
    states = [deepcopy(one.state_dict()) for one in _with_states(sampler)]
    changes = changed(first, values_in(inner, _known(inner)))
    hidden = [(path, value) for path, value in changes.items() if not isinstance(value, Opaque)]
    unsaved = sorted(shown(path) for path, value in changes.items() if isinstance(value, Opaque))
    more = {"others": others, "states": states, "hidden": hidden, "unsaved": unsaved}
    return found | {name: value for name, value in more.items() if value}


def warn_of_unsaved(sampler: Any, state: State) -> None:
    """Warn, once per sampler, of what decides later passes perhaps and is not in a state that was taken of it."""
    if unsaved := state.get("unsaved"):
        kind = type(innermost(sampler)).__name__
        names = ", ".join(f"{kind}{name}" for name in unsaved[:3]) + (" and others" if len(unsaved) > 3 else "")
        warn_once(
            sampler,
            f"state_dict() does not hold {names}, which cannot be copied. If the order of {kind} rests on that, a "
            "resumed run reads another order",
        )


def warn_of_hidden(sampler: Any, state: State, first: list[Any], begin: Callable[[], Iterator[Any]]) -> None:
    """Warn, once per sampler, where the batches `first` of its latest pass do not follow from the state before it.

    A forked child that can only read puts that back and reads as many of what `begin` returns. Nothing is said where it
    cannot tell: the child does not answer, the sampler raises there, or its indices have no text of their own.
    """
    if id(innermost(sampler)) in _WARNED or " at 0x" in (expected := repr(first)):
        return

    def again() -> bytes:
        put_back(sampler, state)
        return repr([*islice(begin(), len(first))]).encode()

    answer, _ = said(again, LONGEST_S, apart="lose writes")
    if not answer:
        _WARNED.add(id(innermost(sampler)))
    elif answer != expected.encode():
        kind = type(innermost(sampler)).__name__
        warn_once(sampler, f"{kind} read again from what state_dict() holds yields other batches: a resumed run would "
                           "repeat some examples and leave others out")  # fmt: skip


def warn_once(sampler: Any, fault: str) -> None:
    """Warn, once per sampler, that a state does not hold what its order rests on."""
    sampler = innermost(sampler)
    if id(sampler) in _WARNED:
        return
    _WARNED.add(id(sampler))
    kind = type(sampler).__name__
    with suppress(RuntimeWarning):  # a script that makes errors of warnings saves its state all the same
        warnings.warn(
            f"{fault}. Give {kind} methods state_dict() and load_state_dict(state).", RuntimeWarning, stacklevel=5
        )  # fmt: skip


def put_back(sampler: Any, state: State) -> None:
    """Bring a sampler to where one like it stood when `state` was taken.

    States of before this held those of one generator and one epoch: {"generator", "sampler_epoch"}.
    """
    inner = innermost(sampler)
    first = {path: value for path, value in _first_values(inner).items() if not isinstance(value, Opaque)}
    # A sampler that has been read in this process goes back to its first values where the state names no others.
    write_back(inner, changed(values_in(inner, _known(inner)), first | dict(state.get("hidden", ()))))
    for one, own in zip(_with_states(sampler), state.get("states", ()), strict=False):
        one.load_state_dict(deepcopy(own))
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


_FIRST: dict[int, tuple[Any, dict[Path, Any]]] = {}
"""Address of a sampler -> what keeps it or a weak reference to it, and what it held before its first pass."""

_WARNED: set[int] = set()
"""Addresses of samplers whose user has been warned, or of which nothing more can be found out."""


def _first_values(sampler: Any) -> dict[Path, Any]:
    """Return what the sampler held when it was first seen here: before its first pass."""
    if id(sampler) not in _FIRST:
        here = id(sampler)

        def forget(_: Any) -> None:
            _FIRST.pop(here, None)
            _WARNED.discard(here)

        try:
            keeps: Any = weakref.ref(sampler, forget)
        except TypeError:  # of a class with slots alone, or a list
            keeps = sampler
        _FIRST[here] = keeps, values_in(sampler, _known(sampler))
    return _FIRST[id(sampler)][1]


def _known(sampler: Any) -> set[int]:
    """Return the addresses of what travels under a name of its own: generators, and samplers with a state."""
    return {id(one) for one in (*generators_within(sampler), *_others(sampler), *_with_states(sampler))}


def _with_epochs(sampler: Any) -> list[Any]:
    return [one for one in samplers_within(sampler) if isinstance(getattr(one, "epoch", None), int)]


def _with_states(sampler: Any) -> list[Any]:
    named = ("state_dict", "load_state_dict")
    return [one for one in samplers_within(sampler) if all(callable(getattr(one, name, None)) for name in named)]


def _others(sampler: Any) -> list[Any]:
    """Return the generators of numpy and Python that the sampler and those inside it hold as attributes."""
    values = [value for one in samplers_within(sampler) for value in attributes(one).values()]
    found = [value for value in own_generators(values) if not isinstance(value, torch.Generator)]
    return [value for value in found if any(value is one for one in values)]


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
