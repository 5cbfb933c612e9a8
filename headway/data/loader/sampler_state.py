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

State of a sampler under names that nobody has agreed on: counters, lists of left-over indices, helper objects.

What the sampler holds is looked at before its first pass in this process, and again whenever a state is taken. What
has changed in between decides the passes that follow, so it travels in the state, and is written to the same places
when that is loaded into the sampler of a script that was started again.

    sampler -> attributes and slots -> short containers and helper objects -> ... -> values (numbers, texts, arrays,
                                                                                   lists of numbers, generators)

A dataset is not looked into: what has a length and items is data, unless it is a list, a tuple or a dict. Values that
cannot be written back (an iterator in the middle of its pass, a value of more than 16 MiB) are named in a warning.

>>> from types import SimpleNamespace
>>> sampler = SimpleNamespace(passes=0, kept=[4, 2], size=9)
>>> before = values_in(sampler)
>>> sampler.passes, sampler.kept[:] = 3, [7]
>>> changes = changed(before, values_in(sampler))
>>> fresh = SimpleNamespace(passes=0, kept=[4, 2], size=9)
>>> write_back(fresh, changes)
>>> fresh
namespace(passes=3, kept=[7], size=9)
"""

from __future__ import annotations

import random
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from headway.core.errors import HeadwayError, InputError
from headway.core.machine.child import said
from headway.core.machine.interruptions import pass_on
from headway.runtime.script.draws import generators_within, innermost, own_generators, samplers_within
from headway.runtime.script.object_graph import attributes, of_library

# State of a sampler under names that nobody has agreed on: counters, lists of left-over indices, helper objects.

MOST_PLACES = 4096
"""Places that are looked at in one sampler."""

MOST_BYTES = 16 << 20
"""What all values of one sampler that travel in a state may take together."""

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, torch.nn.Module)
DATA = frozenset({"data_source", "dataset"})
"""Attributes by which samplers hold what they only need the length of."""

RECORDS = frozenset({"types", "argparse", "collections", "dataclasses"})
"""Modules of the standard library whose objects hold what the script puts into them."""

Path = tuple[tuple[str, Any], ...]
"""Steps from the sampler to a place: ("attribute", name) or ("item", index or key)."""


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """A value that cannot be copied; the object itself, so that no other gets its address."""

    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """The state of a random number generator."""

    state: Any


def values_in(sampler: Any, known: Container[int] = ()) -> dict[Path, Any]:
    """Return a copy of each value that the sampler reaches, by its place; of generators, a `Drawn`.

    Objects whose `id` is among the `known` ones are left out, with what they hold.
    """
    found: dict[Path, Any] = {}
    seen: dict[int, Any] = {}
    left = MOST_BYTES
    queue: deque[tuple[Path, Any]] = deque([((), sampler)])
    while queue and len(found) < MOST_PLACES and len(seen) < MOST_PLACES:
        path, value = queue.popleft()
        if type(value) in PLAIN:
            found[path] = value
            continue
        if isinstance(value, CODE) or id(value) in seen or id(value) in known:
            continue
        seen[id(value)] = value
        size = _size(value, left)
        if size is not None:
            left -= size
            found[path] = _copied(value)
            continue
        parts = _parts(value, is_root=not path)
        if parts is None:
            found[path] = Opaque(value)
        else:
            queue.extend(((*path, step), part) for step, part in parts)
    return found


def changed(before: dict[Path, Any], now: dict[Path, Any]) -> dict[Path, Any]:
    """Return the values of `now` that are new or differ from those of `before`, `Opaque` ones too, and all `Drawn`."""
    missing = object()
    return {path: value for path, value in now.items() if not _equal(before.get(path, missing), value)}


def write_back(sampler: Any, values: dict[Path, Any]) -> None:
    """Write copies of values to their places in a sampler like the one that they were taken from.

    Raises `InputError` where it has no such place.
    """
    for path, value in deepcopy(values).items():  # the sampler may change in place what it gets
        try:
            holder = sampler
            if not path:  # the sampler is a list itself
                sampler[:] = value
                continue
            for step in path[:-1]:
                holder = getattr(holder, step[1]) if step[0] == "attribute" else holder[step[1]]
            _write(holder, path[-1], value)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise InputError(
                f"the state holds a value of {type(sampler).__name__}{shown(path)}, which this sampler does not have "
                f"({error}). Give the loader the sampler that it had."
            ) from None


def shown(path: Path) -> str:
    """Return a place as code that follows the sampler's name.

    >>> shown((("attribute", "left"), ("item", 0)))
    '.left[0]'
    """
    return "".join(f".{name}" if kind == "attribute" else f"[{name!r}]" for kind, name in path)


def _parts(value: Any, *, is_root: bool) -> list[tuple[tuple[str, Any], Any]] | None:
    """Return the steps into a value and what is there; None where it is looked at as a whole."""
    if isinstance(value, (Iterator, set, frozenset, deque, torch.Tensor, np.ndarray)):
        return None
    if isinstance(value, (list, tuple, dict)):
        if len(value) > MOST_PLACES:
            return None
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return [(("item", key), part) for key, part in pairs if type(key) in PLAIN]
    module = type(value).__module__
    if isinstance(value, Sampler) and of_library(module):  # torch's own: nothing else of theirs is changed
        names = ("sampler", "generator", "weights", "indices")
        return [(("attribute", name), getattr(value, name)) for name in names if hasattr(value, name)]
    is_data = hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__")
    if not is_root and (is_data or (of_library(module) and module not in RECORDS)):
        return []
    return [(("attribute", name), part) for name, part in attributes(value).items() if name not in DATA]


def _size(value: Any, most: int) -> int | None:
    """Return the bytes, roughly, of a value that is copied as a whole; None for one that is not or takes more."""
    size: int | None = None
    if isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
        return 0  # always copied: a few kilobytes at most
    if isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
        size = value.nbytes
    elif isinstance(value, (list, tuple, set, frozenset, deque)) and 8 * len(value) <= most:
        size = _size_of_plain(value)
    return size if size is not None and size <= most else None


def _size_of_plain(value: Any) -> int | None:
    """Return the bytes of a container of plain values, or of lists and tuples of those; None for any other."""
    sizes = [
        8 if type(part) in PLAIN else _size_of_plain(part) if type(part) in (list, tuple) else None for part in value
    ]
    return None if None in sizes else 64 + sum(size for size in sizes if size is not None)


def _copied(value: Any) -> Any:
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        return Drawn(value.get_state())
    if isinstance(value, np.random.Generator):
        return Drawn(value.bit_generator.state)
    if isinstance(value, random.Random):
        return Drawn(value.getstate())
    return value.detach().clone() if isinstance(value, torch.Tensor) else deepcopy(value)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Opaque) and isinstance(other, Opaque):
        # An iterator may have moved on; anything else of one identity is taken for unchanged.
        return one.value is other.value and not isinstance(one.value, Iterator)
    if type(one) is not type(other) or isinstance(one, Drawn):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


def _write(holder: Any, step: tuple[str, Any], value: Any) -> None:
    """Put a value at its place: into the object that is there where that can be changed, for others may share it."""
    kind, name = step
    value = value.state if isinstance(value, Drawn) else value
    there = getattr(holder, name, None) if kind == "attribute" else (holder[name] if _has(holder, name) else None)
    if isinstance(there, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
        _set_state(there, value)
    elif type(there) is list and type(value) is list:
        there[:] = value
    elif type(there) is type(value) is np.ndarray and _fits(there, value) and there.flags.writeable:
        there[...] = value
    elif type(there) is type(value) is torch.Tensor and _fits(there, value) and there.is_contiguous():
        there.detach().copy_(value)
    elif kind == "attribute":
        setattr(holder, name, value)
    else:
        holder[name] = value


def _fits(there: Any, value: Any) -> bool:
    """Tell whether an array can take over the entries of another."""
    return (there.shape, there.dtype) == (value.shape, value.dtype)


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


State = dict[str, Any]

LONGEST_S = 5.0
"""A child that reads a sampler again may take so long; after one that has no answer there is no other."""


def taken(sampler: Any) -> State:
    """Return {"generators", "others", "epochs", "states", "hidden", "unsaved"}.

    They are of torch's generators, of others, of `epoch` numbers, and of samplers with `state_dict` and
    `load_state_dict`; then what else has changed since the sampler's first pass (below), and the names of what
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
    elif isinstance(generator, (torch.Generator, np.random.RandomState)):
        generator.set_state(state)
    else:
        generator.setstate(state)
