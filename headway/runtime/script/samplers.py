"""Which sampler decides the order of a loader's batches, and which random number generators that order rests on.

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

from typing import Any

from headway.runtime.script.object_graph import attributes
from headway.trace.events.loader_facts import EPOCH_SAMPLERS

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
