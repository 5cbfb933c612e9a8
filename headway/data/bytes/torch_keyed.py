"""Random numbers that depend on the example, not on who loads it.

What a dataset draws from `random`, `numpy.random` or torch inside
`__getitem__` is keyed by (seed, epoch, item, occurrence), what a collate
function draws by (seed, epoch, batch, rank). So an augmented example is the
same for any number of workers, and after any interruption; and the caller's
own generators stay where they are. torch is seeded through
`torch.default_generator`: `torch.manual_seed` would reach for devices.

Threads share those generators, so nothing can key them there. `generator`
and `torch_generator` are keyed in the same way and work everywhere.

>>> with Draws(seed=5):
...     first = generator().integers(0, 100, 3).tolist()
>>> with Draws(seed=5):
...     first == generator().integers(0, 100, 3).tolist()
True
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from headway.core.rng import derived_seed
from headway.data.bytes.order import item_seeds
from headway.runtime.host.device import generators as device_generators

WORD = 0xFFFFFFFFFFFFFFFF


def seed_generators(seed: int) -> None:
    """Seed the three global generators of this process (CPU); 7 us."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed & WORD)


def generator_states() -> tuple[Any, ...]:
    """Return the states of the global generators, those of devices in use included; 50 us, nearly all of it numpy's."""
    devices = [device.get_state() for device in device_generators()]
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state(), devices


def set_generators(states: tuple[Any, ...]) -> None:
    """Put the global generators where `generator_states` found them."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])
    # A device that came into use since has no earlier state to go back to.
    for device, state in zip(device_generators(), states[3], strict=False):
        device.set_state(state)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Give the caller's generators back as they were, whatever the block draws; 0.1 ms."""
    states = generator_states()
    try:
        yield
    finally:
        set_generators(states)


class Draws:
    """A block whose random numbers come from `seed`: those of `generator`, and of the global generators if `shared`."""

    __slots__ = ("_numpy", "_shared", "_token", "_torch", "asked", "seed")

    def __init__(self, seed: int, *, shared: bool = False) -> None:
        self.seed, self._shared = seed & WORD, shared
        self.asked = 0
        """How often one of the generators was asked for: who asks draws."""
        self._numpy: np.random.Generator | None = None
        self._torch: torch.Generator | None = None
        self._token: Token[Draws | None]

    def __enter__(self) -> Draws:
        self._token = self.stay()
        return self

    def __exit__(self, *_: object) -> None:
        _DRAWS.reset(self._token)

    def stay(self) -> Token[Draws | None]:
        """Begin the block; who keeps the token, which holds the block before, may end it. Else the next one does."""
        if self._shared:
            seed_generators(self.seed)
        return _DRAWS.set(self)

    def numpy(self) -> np.random.Generator:
        """Return the block's numpy generator."""
        self.asked += 1
        if self._numpy is None:
            self._numpy = np.random.Generator(np.random.Philox(key=self.seed))
        return self._numpy

    def torch(self) -> torch.Generator:
        """Return the block's torch generator (CPU)."""
        self.asked += 1
        if self._torch is None:
            self._torch = torch.Generator().manual_seed(self.seed)
        return self._torch


_DRAWS: ContextVar[Draws | None] = ContextVar("headway_draws", default=None)
"""What is being loaded here and now, by this thread."""


def current() -> Draws | None:
    """Return the block that is being loaded in by this thread, None outside of one."""
    return _DRAWS.get()


def generator() -> np.random.Generator:
    """Return the numpy generator of the example being loaded, in collate functions of the batch.

    Call it inside `__getitem__` or a collate function, in threads, worker
    processes and the caller's process alike; within one example it goes on
    where it was. Outside of a headway loader it is seeded by a draw from
    torch's default generator, as torch seeds what its own loaders start.
    """
    return _draws().numpy()


def torch_generator() -> torch.Generator:
    """Return the torch generator (CPU) of the example or batch being loaded; see `generator`."""
    return _draws().torch()


def _draws() -> Draws:
    return _DRAWS.get() or Draws(int(torch.empty((), dtype=torch.int64).random_()))


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

    def batch_seed(self, what: str, rank: int) -> int:
        """Return the seed of something that is done once per batch and rank."""
        return derived_seed(self.seed, what, self.epoch, self.batch, rank) & WORD

    def first(self, count: int) -> Keys:
        """Return the first `count` of them, as a batch."""
        return Keys(self[:count], self.occurrence[:count], seed=self.seed, epoch=self.epoch, batch=self.batch)

    def only(self, place: int) -> Keys:
        """Return a batch of the one at `place`."""
        return Keys([self[place]], [self.occurrence[place]], seed=self.seed, epoch=self.epoch, batch=self.batch)


def reads_batches(dataset: Any) -> bool:
    """Tell whether `dataset` fetches whole batches by itself; a subset reads as the dataset behind it does."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


@dataclass(slots=True)
class KeyedDataset:
    """A map-style dataset whose every example is made under its own seed."""

    dataset: Any
    """The user's own."""
    rank: int
    cached: Any = None
    """What is read in its place: the same with a cache in front."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, keys: Keys) -> Any:
        """Return the one example of an unbatched loader."""
        return self.__getitems__(keys)[0]

    def __getitems__(self, keys: Keys) -> list[Any]:
        """Return the examples of a batch, and leave everything seeded for its collate function, which torch calls."""
        if reads_batches(self.dataset):
            with Draws(keys.batch_seed("batch", self.rank), shared=True):
                examples = self.many(keys)
        else:
            examples = []
            with contextlib.nullcontext() if self.cached is None else self.cached.batch(list(keys)):
                for item, seed in zip(keys, keys.item_seeds(), strict=True):
                    with Draws(seed, shared=True):
                        examples.append(self.one(item))
        # Not entered: block would hold block, from the first batch of a worker on.
        Draws(keys.batch_seed("collate", self.rank), shared=True).stay()
        return examples

    def one(self, item: Any) -> Any:
        """Return one example, under whatever seed is in place."""
        return (self.dataset if self.cached is None else self.cached)[item]

    def many(self, keys: Keys) -> list[Any]:
        """Return the examples of a dataset that reads whole batches."""
        return list((self.dataset if self.cached is None else self.cached).__getitems__(list(keys)))


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
