"""Loaders of every kind that can be interrupted: in an order of their own, by samplers, over streams that know where
they are. Each is made anew, as a script that is started again does, and played from a state on."""

import pickle
import random
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from headway.data import DataLoader

ITEMS = range(23)


def seeded(seed: int = 5) -> torch.Generator:
    """Return a generator of the sampler's own."""
    return torch.Generator().manual_seed(seed)


class Shuffled(Sampler):
    """Draws with numpy, and in every other pass with Python, from generators of its own."""

    def __init__(self) -> None:
        self.draws, self.python, self.epoch = np.random.default_rng(3), random.Random(4), 0

    def __len__(self) -> int:
        return len(ITEMS)

    def __iter__(self) -> Iterator[int]:
        order = self.draws.permutation(len(ITEMS)).tolist()
        if self.epoch % 2:
            self.python.shuffle(order)
        self.epoch += 1
        return iter(order)


class Rotating(Sampler):
    """Begins each pass one further, which only its own state tells."""

    def __init__(self) -> None:
        self._passes = 0

    def __len__(self) -> int:
        return len(ITEMS)

    def __iter__(self) -> Iterator[int]:
        first, self._passes = self._passes, self._passes + 1
        return iter([(first + item) % len(ITEMS) for item in ITEMS])

    def state_dict(self) -> dict[str, int]:
        """Return how many passes have begun."""
        return {"passes": self._passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self._passes = state["passes"]


class Hidden(Sampler):
    """Keeps what the next pass rests on under names, and in places, of its own: `how` says where."""

    __slots__ = ("_draws",)

    def __init__(self, how: str) -> None:
        self.how, self._passes_read = how, 0
        self.helper = SimpleNamespace(draws=random.Random(4), turns=[0, 0])
        self.by_name: dict[str, Any] = {"numpy": np.random.default_rng(3), "torch": [seeded()], "left": 0}
        self.parts = [SubsetRandomSampler(range(12), generator=seeded()), SubsetRandomSampler(range(12, 23))]
        self._draws = seeded(8)

    def __len__(self) -> int:
        return len(ITEMS)

    def __iter__(self) -> Iterator[int]:
        order = list(ITEMS)
        if self.how == "counter":
            self._passes_read += 1
            order = order[self._passes_read :] + order[: self._passes_read]
        elif self.how == "helper":
            self.helper.turns[1] += 1
            self.helper.draws.shuffle(order)
            order = order[:: -1 if self.helper.turns[1] % 2 else 1]
        elif self.how == "containers":
            order = self.by_name["numpy"].permutation(order).tolist()
            order = [order[place] for place in torch.randperm(len(order), generator=self.by_name["torch"][0])]
        elif self.how == "slots":
            order = torch.randperm(len(order), generator=self._draws).tolist()
        else:
            order = [item for part in self.parts for item in part]
        return iter(order)


class LeftOver(Sampler):
    """Batches whose rest of a pass goes into the first batch of the next one."""

    def __init__(self) -> None:
        self._left: list[int] = []
        self._sampler = RandomSampler(ITEMS, generator=seeded())

    def __len__(self) -> int:
        return (len(self._left) + len(ITEMS)) // 5

    def __iter__(self) -> Iterator[list[int]]:
        for item in self._sampler:
            self._left.append(item)
            if len(self._left) == 5:
                yield self._left
                self._left = []


class InPlace(Sampler):
    """Shuffles what it holds where it lies: an array, a tensor, one that two names share, a deque in a helper."""

    def __init__(self, how: str) -> None:
        self.how, self.draws = how, np.random.RandomState(3)
        self.order: Any = torch.arange(len(ITEMS)) if how == "tensor" else np.arange(len(ITEMS))
        self.helper = SimpleNamespace(same=self.order, turns=deque(ITEMS))

    def __len__(self) -> int:
        return len(ITEMS)

    def __iter__(self) -> Iterator[int]:
        if self.how == "deque":
            self.helper.turns.rotate(5)
            return iter([*self.helper.turns])
        (self.helper.same if self.how == "shared" else self.order)[:] = self.order[self.draws.permutation(len(ITEMS))]
        return iter(self.order.tolist())


def counters() -> dict[str, Callable[[int], int]]:
    """Return functions that add to a number and return it: where -> one that keeps its number there."""
    number = 0

    def in_closure(more: int) -> int:
        nonlocal number
        number += more
        return number

    def in_argument(kept: list[int], more: int) -> int:
        kept[0] += more
        return kept[0]

    def in_default(more: int, kept: list[int] = [0]) -> int:  # noqa: B006 - scripts do it
        return in_argument(kept, more)

    class InClass:
        number = 0

        def __call__(self, more: int) -> int:
            InClass.number += more
            return InClass.number

    def in_iterator() -> Generator[int, int, None]:
        number = more = 0
        while True:
            number += more
            more = yield number

    next(adds := in_iterator())
    adder = partial(in_argument, [0])
    return {"closure": in_closure, "partial": adder, "class": InClass(), "default": in_default, "iterator": adds.send}


class Turning(Sampler):
    """Begins each pass further on, by a count that it cannot be seen to hold; with `late` it counts on at the end."""

    def __init__(self, where: str, *, late: bool) -> None:
        self.count, self.late = counters()[where], late

    def __len__(self) -> int:
        return len(ITEMS)

    def __iter__(self) -> Iterator[int]:
        first = self.count(0 if self.late else 1)
        yield from [(first + item) % len(ITEMS) for item in ITEMS]
        self.count(1 if self.late else 0)


class Stream(IterableDataset):
    """Numbers, sharded over workers; each pass draws anew from a generator that runs on."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes, self.place, self.passes, self.draws = sizes, 0, 0, seeded()

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        size = self.sizes[info.id % len(self.sizes)] if info else sum(self.sizes)
        while self.place < size:
            self.place += 1
            number = self.place + 1000 * (info.id if info else 0) + 100_000 * self.passes
            yield torch.tensor([float(number), torch.rand((), generator=self.draws).item()])
        self.place, self.passes = 0, self.passes + 1

    def state_dict(self) -> dict[str, Any]:
        """Return place, pass and generator."""
        return {"place": self.place, "passes": self.passes, "draws": self.draws.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.place, self.passes = state["place"], state["passes"]
        self.draws.set_state(state["draws"])


def by(sampler: Callable[[], Any]) -> Callable[..., DataLoader]:
    """Return what makes a loader with a sampler."""
    return lambda **more: DataLoader(ITEMS, 4, sampler=sampler(), **more)


def over(*sizes: int, **fixed: Any) -> Callable[..., DataLoader]:
    """Return what makes a loader over a stream of so many examples per worker."""
    return lambda **more: DataLoader(Stream(sizes), **{"batch_size": 2, **fixed}, **more)


SAMPLED: dict[str, Callable[..., DataLoader]] = {
    "own order": lambda **more: DataLoader(ITEMS, 4, shuffle=True, **more),
    "sequential": by(lambda: SequentialSampler(ITEMS)),
    "random": by(lambda: RandomSampler(ITEMS)),
    "random, own generator": by(lambda: RandomSampler(ITEMS, generator=seeded())),
    "random, replaced": by(lambda: RandomSampler(ITEMS, replacement=True, num_samples=30, generator=seeded())),
    "subset": by(lambda: SubsetRandomSampler(range(3, 20), generator=seeded())),
    "weighted": by(lambda: WeightedRandomSampler([0.1 + item for item in ITEMS], 19, generator=seeded())),
    "distributed": by(lambda: DistributedSampler(ITEMS, 2, 1, seed=7)),
    "numpy and Python": by(Shuffled),
    "its own state": by(Rotating),
    "batch sampler": lambda **more: DataLoader(
        ITEMS, batch_sampler=BatchSampler(RandomSampler(ITEMS, generator=seeded()), 5, drop_last=False), **more
    ),
    "batch sampler of a user's": lambda **more: DataLoader(
        ITEMS, batch_sampler=BatchSampler(Shuffled(), 3, drop_last=True), **more
    ),
    "hidden counter": by(lambda: Hidden("counter")),
    "generator in a helper object": by(lambda: Hidden("helper")),
    "generators in containers": by(lambda: Hidden("containers")),
    "generator in slots": by(lambda: Hidden("slots")),
    "samplers in a list": by(lambda: Hidden("list")),
    "indices left over": lambda **more: DataLoader(ITEMS, batch_sampler=LeftOver(), **more),
}
"""Kinds that all kinds of workers can load."""

STREAMED: dict[str, Callable[..., DataLoader]] = {
    "a stream": over(7, 7),
    "workers that end apart": over(1, 9),
    "a worker without examples": over(0, 6),
    "whole batches": over(4, 6),
    "rests dropped": over(5, 8, drop_last=True),
    "no batches": over(3, 5, batch_size=None),
}
"""Kinds without threads."""


def served(**more: Any) -> DataLoader:
    """Return a loader whose batches come from the data server of this user, in the server's order."""
    return DataLoader(ITEMS, 4, shuffle=True, server="auto", **more)


IN_PLACE = {how: by(partial(InPlace, how)) for how in ("array", "tensor", "shared", "deque")}
"""Kinds that change what they hold where it lies."""

TURNING = {(where, late): by(partial(Turning, where, late=late)) for where in counters() for late in (False, True)}
"""Kinds whose next pass rests on what no look finds."""

LIVES = ((1,), (3,), (6,), (7,), (12,), (3, 1), (7, 1), (7, 4), (6, 6), (9, 4), (1, 1, 1), (7, 1, 1), (7, 2, 3),
         (6, 2, 2), (8, 6, 1))  # fmt: skip
"""Batches that are taken in each process before the last one: six make a pass."""


def lived(make: Callable[..., DataLoader], whole: list[Any], lives: tuple[int, ...]) -> tuple[bool, bool]:
    """Return whether a job that is interrupted after so many batches, each time, gets the batches `whole`; if warned.

    Where it stops at the end of a pass, the loop has asked for one batch more.
    """
    got: list[Any] = []
    state = None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in [*lives, len(whole)]:
            loader, stop = make(), min(len(got) + number, len(whole))
            if state is not None:
                loader.load_state_dict(pickle.loads(state))
            while len(got) < stop:
                for batch in loader:
                    got.append(plain(batch))
                    if len(got) == stop and stop % 6:
                        break
            state = pickle.dumps(loader.state_dict())
    return got == whole, any(issubclass(one.category, RuntimeWarning) for one in said)


Place = tuple[int, int]
"""(passes that are over, batches taken in the next one; -1 = it has not begun)."""


def passes(loader: DataLoader, first: int) -> Iterator[Iterator[Any]]:
    """Yield one pass after another, as a script's loop does, which tells a DistributedSampler its epoch."""
    while True:
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(first)
        yield iter(loader)
        first += 1


def plain(batch: Any) -> Any:
    """Return a batch as lists of numbers."""
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def played(make: Callable[..., DataLoader], num_passes: int, **options: Any) -> list[list[Any]]:
    """Return the batches of some passes, without an interruption."""
    loader = make(**options)
    every = passes(loader, 0)
    return [[plain(batch) for batch in next(every)] for _ in range(num_passes)]


def taken_to(loader: DataLoader, place: Place) -> list[list[Any]]:
    """Take the batches up to a place; returns those of each pass that had begun."""
    every = passes(loader, 0)
    taken = [[plain(batch) for batch in next(every)] for _ in range(place[0])]
    if place[1] >= 0:
        batches = next(every)
        taken.append([plain(next(batches)) for _ in range(place[1])])
    return taken


def once_each(
    make: Callable[..., DataLoader], place: Place, num_passes: int, *, between: Callable[[], object] = lambda: None
) -> bool:
    """Tell whether each pass gives each item once, with an interruption at `place`; `between` is called at it."""
    loader = make()
    taken = taken_to(loader, place)
    state = loader.state_dict()
    del loader
    between()
    loader = make()
    loader.load_state_dict(state)
    taken += [[] for _ in range(num_passes - len(taken))]
    for number in range(state["epoch"], num_passes):
        taken[number] += [plain(batch) for batch in loader]
    return all(sorted(item for batch in one for item in batch) == [*ITEMS] for one in taken)


def rest(
    make: Callable[..., DataLoader], place: Place, num_passes: int, *, times: int = 1, **options: Any
) -> list[Any]:
    """Return the batches that come after `place` in a process that goes on from its state, loaded `times` times."""
    loader = make(**options)
    taken_to(loader, place)
    state = loader.state_dict()
    for _ in range(times):
        loader = make(**options)
        loader.load_state_dict(state)
        state = loader.state_dict()
    every = passes(loader, state["epoch"])
    return [plain(batch) for _ in range(num_passes - state["epoch"]) for batch in next(every)]


def places(whole: list[list[Any]]) -> list[Place]:
    """Return where to interrupt: before, within, at the end of and between passes."""
    found: list[Place] = [(0, -1), (1, -1), (len(whole) - 1, -1), (len(whole), -1)]
    for index in range(len(whole) - 1):
        found += [(index, count) for count in range(len(whole[index]) + 1)]
    return found


def after(whole: list[list[Any]], place: Place) -> list[Any]:
    """Return what comes after a place."""
    flat = [batch for one in whole[place[0] :] for batch in one]
    return flat[max(place[1], 0) :]
