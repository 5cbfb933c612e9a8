"""Random numbers that depend on the example, not on who loads it.

What a dataset draws from `random`, `numpy.random` or torch inside
`__getitem__` is keyed by (seed, epoch, item, occurrence), what a collate
function draws by (seed, epoch, batch, rank). So an augmented example is the
same for any number of workers, and after any interruption; and the caller's
own generators stay where they are. torch is seeded through
`torch.default_generator`: `torch.manual_seed` would reach for devices.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
import torch

from headway.core.rng import derived_seed
from headway.data.order import item_seeds

WORD = 0xFFFFFFFFFFFFFFFF


def seed_generators(seed: int) -> None:
    """Seed the three global generators of this process (CPU); 7 us."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed & WORD)


def generator_states() -> tuple[Any, ...]:
    """Return the states of the three global generators; 50 us, nearly all of it numpy's."""
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def set_generators(states: tuple[Any, ...]) -> None:
    """Put the three global generators where `generator_states` found them."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])


@contextmanager
def generators_kept() -> Iterator[None]:
    """Give the caller's generators back as they were, whatever the block draws; 0.1 ms."""
    states = generator_states()
    try:
        yield
    finally:
        set_generators(states)


class Keys(list[Any]):
    """The indices of one batch, and what their random numbers depend on. Loader workers get it in place of a list."""

    def __init__(self, items: Iterable[Any], occurrence: Iterable[int], *, seed: int, epoch: int, batch: int) -> None:
        super().__init__(items)
        self.seed, self.epoch, self.batch = seed, epoch, batch
        self.occurrence = list(occurrence)

    def item_seeds(self) -> list[int]:
        """Return a seed per item; an index that is no whole number (a key, a pair) counts by its text."""
        numbers = [index(item) if hasattr(item, "__index__") else derived_seed(0, repr(item)) for item in self]
        items = np.array([number & (WORD >> 1) for number in numbers], np.int64)
        seeds: list[int] = item_seeds(self.seed, self.epoch, items, np.array(self.occurrence, np.int64)).tolist()
        return seeds


@dataclass(slots=True)
class KeyedDataset:
    """A map-style dataset whose every example is made under its own seed."""

    dataset: Any
    rank: int

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, keys: Keys) -> Any:
        """Return the one example of an unbatched loader."""
        return self.__getitems__(keys)[0]

    def __getitems__(self, keys: Keys) -> list[Any]:
        """Return the examples of a batch, and leave the generators seeded for its collate function.

        A dataset that fetches whole batches (`__getitems__`) draws under the batch's seed.
        """
        many = getattr(self.dataset, "__getitems__", None)
        if callable(many):
            seed_generators(self._batch_seed("batch", keys))
            examples = list(many(list(keys)))
        else:
            examples = []
            for item, seed in zip(keys, keys.item_seeds(), strict=True):
                seed_generators(seed)
                examples.append(self.dataset[item])
        seed_generators(self._batch_seed("collate", keys))
        return examples

    def _batch_seed(self, what: str, keys: Keys) -> int:
        return derived_seed(keys.seed, what, keys.epoch, keys.batch, self.rank) & WORD


@dataclass(slots=True)
class WorkerStart:
    """What a loader worker does first: shows the user's own dataset in its worker info, then the user's function."""

    user: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        """Prepare worker number `worker`."""
        info = torch.utils.data.get_worker_info()
        if info is not None and isinstance(info.dataset, KeyedDataset):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # it refuses plain assignment
        if self.user is not None:
            self.user(worker)


class DrawsApart:
    """An iterator whose draws from the global generators are its own, seeded once: a sampler's order, repeatable."""

    def __init__(self, make: Callable[[], Iterator[Any]], seed: int) -> None:
        self._states: tuple[Any, ...] | None = None
        self._seed = seed
        self._inner = self._inside(make)

    def __iter__(self) -> DrawsApart:
        return self

    def __next__(self) -> Any:
        return self._inside(self._inner.__next__)

    def _inside(self, call: Callable[[], Any]) -> Any:
        with generators_kept():
            if self._states is None:
                seed_generators(self._seed)
            else:
                set_generators(self._states)
            try:
                return call()
            finally:
                self._states = generator_states()
