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

Which sampler decides the order of a loader's batches, and which random number generators that order rests on.

`loader.sampler` is the answer only where torch made the batch sampler itself: beside a batch sampler of the script's,
torch leaves a SequentialSampler there that is never read.

    DataLoader(data, batch_sampler=BatchSampler(Curriculum(), 8, False))
        loader.sampler         SequentialSampler     what torch put there
        sampler_of(loader)     Curriculum            what decides the order

>>> from types import SimpleNamespace
>>> type(sampler_of(SimpleNamespace(sampler=range(3), batch_sampler=None))).__name__
'range'
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
from headway.runtime.script.batches import tensor_memory
from headway.runtime.script.object_graph import attributes, reached
from headway.trace.events.loader_facts import EPOCH_SAMPLERS

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
        return tensor_memory(generator.get_state())
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


# Which sampler decides the order of a loader's batches, and which random number generators that order rests on.

MOST_SAMPLERS = 64
"""Samplers inside each other, and beside each other, that are looked into."""


def sampler_of(loader: Any) -> Any:
    """Return the sampler that decides the order of `loader`: the innermost one of torch's plain BatchSamplers.

    A batch sampler of any other class, a subclass of torch's included, decides itself: it is what is returned.
    """
    return innermost(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)


def innermost(sampler: Any) -> Any:
    """Return what torch's plain BatchSamplers around it, if any, read.

    >>> innermost([2, 0, 1])
    [2, 0, 1]
    """
    from torch.utils.data import BatchSampler

    for _ in range(MOST_SAMPLERS):
        if type(sampler) is not BatchSampler:
            break
        sampler = sampler.sampler
    return sampler


def steered(loader: Any) -> str | None:
    """Say how the training loop could change the order of `loader` while it is read, or None when it cannot.

    Known are torch's own samplers: their order depends on nothing that training changes once a pass has begun.
    """
    from torch.utils import data

    sampler = sampler_of(loader)
    kind = type(sampler)
    if kind is data.SubsetRandomSampler and type(sampler.indices) not in (tuple, range):
        kept_in = type(sampler.indices).__name__
        return (
            f"its SubsetRandomSampler looks each index up in a {kept_in}, which may change on the way: give it a tuple"
        )
    draws = kind is data.RandomSampler and sampler.generator is not None
    if draws and (sampler.replacement or sampler.num_samples > len(sampler.data_source)):
        return "its sampler draws from the script's own generator all along, and would with workers sooner"
    if kind in (data.SequentialSampler, data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler):
        return None
    if kind is data.distributed.DistributedSampler:
        return None
    if kind.__name__ in EPOCH_SAMPLERS:
        return f"its {kind.__name__} counts epochs as it is read, with workers too early: set num_workers in the script"
    return f"its sampler is its own class ({kind.__name__}): workers would read it ahead of training"


def order_generators(loader: Any) -> list[Any]:
    """Return the torch generators that `loader`, its batch sampler and every sampler inside them hold, each once."""
    inside = generators_within(loader.sampler, loader.batch_sampler)
    own = loader.generator
    return inside if own is None or any(own is other for other in inside) else [own, *inside]


def generators_within(*samplers: Any) -> list[Any]:
    """Return the torch generators that `samplers` and the samplers inside them hold, each once."""
    from torch import Generator

    values = [value for sampler in samplers_within(*samplers) for value in attributes(sampler).values()]
    return list({id(value): value for value in values if isinstance(value, Generator)}.values())


def samplers_within(*samplers: Any) -> list[Any]:
    """Return `samplers` and the samplers inside them, each once, whatever attribute, or short container, they are in.

    What a sampler reads the length of, its data source, is no sampler: nothing inside a dataset is returned.
    """
    from torch.utils.data import Sampler

    found: dict[int, Any] = {}
    stack = list(reversed(samplers))
    while stack and len(found) < MOST_SAMPLERS:
        sampler = stack.pop()
        if sampler is None or id(sampler) in found:
            continue
        found[id(sampler)] = sampler
        for name, value in attributes(sampler).items():
            if name in ("sampler", "batch_sampler") or isinstance(value, Sampler):
                stack.append(value)
            elif isinstance(value, (list, tuple, dict)) and len(value) <= MOST_SAMPLERS:
                parts = value.values() if isinstance(value, dict) else value
                stack += [part for part in parts if isinstance(part, Sampler)]
    return list(found.values())
