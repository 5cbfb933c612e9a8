"""Which random number generators a stretch of code draws from: states are compared, never touched.

The recording looks at a loader's first few loads with it, a remedy at the
examples it would keep: what draws gives other examples in another process,
and stale ones out of a cache. Known are the generators of `random`, numpy and
torch, and those that a dataset or its transforms get at ("own").

>>> import random
>>> before = fingerprints()
>>> _ = random.random()
>>> drawn(before, fingerprints())
['random']
"""

from __future__ import annotations

import random
import sys
from _random import Random
from collections.abc import Callable, Mapping, Sequence
from ctypes import string_at
from functools import cache, partial
from types import ModuleType
from typing import Any

from headway.runtime.host import device
from headway.runtime.script.object_graph import reached

OWN = "own"
"""Name of the generators that the dataset holds itself."""


def fingerprints(own: Sequence[Any] = ()) -> dict[str, object]:
    """Return generator -> something that is equal as long as nobody draws; `own` are those of `own_generators`.

    What has not been imported, or was not set up, cannot be drawn from yet and is left out. Costs 9 us, and 1 to 3 for
    each of `own`.
    """
    found: dict[str, object] = {"random": _state(random._inst)}  # what random.random() draws from
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if hasattr(torch, "get_rng_state"):
        found["torch"] = _state(torch.default_generator)  # type: ignore[union-attr]  # it has the attribute
        found["device"] = [_state(generator) for generator in device.generators()]
    if hasattr(getattr(numpy, "random", None), "get_state"):
        found["numpy"] = _state(numpy.random.mtrand._rand)  # type: ignore[union-attr]  # the same
    return {**found, OWN: [_state(generator) for generator in own]} if own else found


def restorer(own: Sequence[Any]) -> Callable[[], None]:
    """Return a function that puts the generators in `own` back to where they are now."""
    acts: list[Callable[[], Any]] = []
    for generator in own:
        kind = _kind(generator)
        if kind == "torch":
            acts.append(partial(generator.set_state, generator.get_state()))
        elif kind == "random" and not isinstance(generator, random.SystemRandom):
            acts.append(partial(generator.setstate, generator.getstate()))
        elif kind == "numpy" and hasattr(generator, "bit_generator"):
            acts.append(partial(setattr, generator.bit_generator, "state", generator.bit_generator.state))
        elif kind == "numpy" and hasattr(generator, "random_raw"):
            acts.append(partial(setattr, generator, "state", generator.state))
        elif kind == "numpy":
            acts.append(partial(generator.set_state, generator.get_state()))

    def restore() -> None:
        for act in acts:
            act()

    return restore


def drawn(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the generators whose state differs; one that appeared meanwhile was not there to be drawn from."""
    return sorted(name for name, state in before.items() if name in after and after[name] != state)


def own_generators(*holders: Any) -> list[Any]:
    """Return the generators that `holders`, such as a dataset, get at by attributes, closures and globals."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    shared = [
        random._inst,  # what random.random() draws from
        getattr(torch, "default_generator", None),
        getattr(getattr(getattr(numpy, "random", None), "mtrand", None), "_rand", None),
    ]
    return [value for value, _ in reached(*holders) if _kind(value) and all(value is not other for other in shared)]


def _kind(value: Any) -> str:
    """Return which kind of generator this is, '' for anything else."""
    if isinstance(value, random.Random):
        return "random"
    module, name = type(value).__module__, type(value).__name__
    if name == "Generator" and module.startswith("torch"):
        return "torch"
    if not module.startswith("numpy.random"):
        return ""
    return "numpy" if name in ("Generator", "RandomState") or hasattr(value, "random_raw") else ""


def _state(generator: Any) -> object:
    """Return the whole state of a generator as one value: what it has drawn ahead and keeps counts too.

    numpy's `randn` draws two numbers and keeps one, its PCG64 keeps half a word, its Philox three words: the next draw
    moves nothing else.
    """
    kind = _kind(generator)
    if kind == "random":
        if isinstance(generator, random.SystemRandom):
            return None
        if type(generator) is random.Random and _memory_tells(sys.modules.get("numpy")):
            return string_at(id(generator) + _HEAD, _RANDOM_BYTES), generator.gauss_next  # type: ignore[attr-defined]  # it has one
        return generator.getstate()
    if kind == "torch":
        return generator.get_state().numpy().tobytes()
    bits = generator if hasattr(generator, "random_raw") else getattr(generator, "bit_generator", None)
    if bits is not None:  # how many were made of its seed shows in no state
        return _flat(bits.state), getattr(getattr(bits, "seed_seq", None), "n_children_spawned", 0)
    bits = generator._bit_generator
    if type(bits).__name__ == "MT19937" and _memory_tells(sys.modules.get("numpy")):
        # The generator's own memory has the number that `randn` keeps, the other the 624 words and the place in them.
        own = string_at(id(generator) + _HEAD, type(generator).__basicsize__ - _HEAD)
        return own, string_at(bits.ctypes.state_address, _WORDS_BYTES)
    return _flat(generator.get_state(legacy=False))


def _flat(state: Any) -> object:
    """Return a numpy state, numbers and arrays in dictionaries, as one value that can be compared."""
    if isinstance(state, dict):
        return {name: _flat(value) for name, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


_HEAD = object.__basicsize__
_RANDOM_BYTES = Random.__basicsize__ - _HEAD
_WORDS_BYTES = 625 * 4
"""Of a Mersenne twister: 624 words, and the place of the next."""


def prove_layout() -> None:
    """Find out how the memory of generators is read, which processes that are forked from this one know then."""
    _memory_tells(sys.modules.get("numpy"))


@cache
def _memory_tells(numpy: ModuleType | None) -> bool:
    """Tell whether every draw shows in the memory of generators, as it is laid out in this Python and this numpy.

    Looking there takes 1 us; their own functions for the state take 10 us (random) and 35 us (numpy), which a reader
    that compares at each example would notice.
    """
    python = random.Random(1)
    if not _all_differ(lambda: string_at(id(python) + _HEAD, _RANDOM_BYTES), python.random):
        return False
    if not hasattr(getattr(numpy, "random", None), "RandomState"):
        return True
    state = numpy.random.RandomState(1)  # type: ignore[union-attr]  # it has the attribute
    bits, num_bytes = state._bit_generator, type(state).__basicsize__ - _HEAD

    def seen() -> object:
        return string_at(id(state) + _HEAD, num_bytes), string_at(bits.ctypes.state_address, _WORDS_BYTES)

    return _all_differ(seen, state.randn) and _all_differ(seen, state.random_sample)


def _all_differ(look: Callable[[], object], draw: Callable[[], object]) -> bool:
    """Tell whether looking twice shows the same, and each of 700 draws something else: twice round the words."""
    if look() != look():
        return False
    for _ in range(700):  # of two words each
        before = look()
        draw()
        if look() == before:
            return False
    return True
