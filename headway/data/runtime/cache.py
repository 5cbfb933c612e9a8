"""Remedy: keep decoded examples in memory, within a byte budget, and hand out copies.

The user's dataset and loader stay what they are. Only the object that reads
the dataset for a loader (torch's fetcher) is given a view that looks into the
cache first. The cache is shared by the rank's forked loader workers and
outlives them. A dataset whose examples are not pure is never cached, and one
that the script changes between two passes no longer: its attributes are
compared at each pass, and the first example that a reader finds in the cache,
and then every `CHECK_EVERY`-th, is read anew and compared too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch.multiprocessing
from torch.utils.data import DataLoader, IterableDataset

from headway.core.arena import Arena
from headway.data.runtime.examples import decode, encode, equal
from headway.data.runtime.outcome import Report, reporter
from headway.data.runtime.purity import impurity, picture
from headway.data.runtime.trial import in_child
from headway.runtime.probe_input import is_own
from headway.runtime.remedy import Applied, Context, Refused


def cache(parameters: Mapping[str, Any], context: Context) -> Applied | Refused:
    """Install the remedy. Parameters: bytes (budget of this rank, shared by its datasets).

    Whether a given dataset is cached is decided when its loader is first read, and reported then.
    """
    budget_bytes = int(parameters["bytes"])
    if budget_bytes < 1:
        return Refused("data.cache", f"a budget of {budget_bytes} bytes holds nothing")
    caches = ExampleCaches(budget_bytes, reporter("data.cache", parameters, context))
    context.patch("torch.utils.data.dataloader:DataLoader.__iter__", caches.around_iter)
    context.patch("torch.utils.data._utils.fetch:_BaseDatasetFetcher.__init__", caches.around_fetcher)
    return Applied("data.cache", dict(parameters))


CHECK_EVERY = 128
"""A reader compares one in this many of the examples that it finds with the dataset."""

_WRITING = threading.Lock()
"""Held while an example is kept: an arena keeps processes apart, not the threads of one."""


class Kept(Protocol):
    """Where examples are kept, encoded, by their index."""

    @property
    def num_slots(self) -> int:
        """One more than the largest index."""
        ...

    def get(self, index: int) -> memoryview | None:
        """Return the encoded example, None when it is not here."""
        ...

    def keep(self, index: int, example: Any) -> None:
        """Keep an example, if there is room; raises what `encode` raises."""
        ...


class CachedExamples:
    """A view of a dataset for one reader: from the cache where it can, else from the dataset, and then kept.

    It compares one in `check_every` of the examples that it finds with the dataset; 0: none.
    """

    def __init__(self, dataset: Any, kept: Kept, *, check_every: int = CHECK_EVERY) -> None:
        self._dataset, self._kept, self._check_every = dataset, kept, check_every
        self._num_found = 0
        self._stale = False

    def __getitem__(self, index: Any) -> Any:
        """Return example `index`: always a copy of its own."""
        found = self._find(index)
        if found is None:
            example = self._dataset[index]
            self._keep(index, example)
            return example
        return self._checked(found, lambda: self._dataset[index])

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """Return many; a dataset that reads many at once is asked once, for those that are missing."""
        many = getattr(self._dataset, "__getitems__", None)
        if not many:
            return [self[index] for index in indices]
        if type(indices) is not list or self._stale:
            return many(indices)
        found = [self._find(index) for index in indices]
        missing = [index for index, payload in zip(indices, found, strict=True) if payload is None]
        fresh = iter(many(missing) if missing else [])
        examples = []
        for index, payload in zip(indices, found, strict=True):
            if payload is None:
                examples.append(next(fresh))
                self._keep(index, examples[-1])
            else:
                examples.append(self._checked(payload, partial(_only, many, index)))
        return examples if not self._stale else many(indices)

    def _find(self, index: Any) -> memoryview | None:
        return self._kept.get(index) if self._is_slot(index) else None

    def _checked(self, found: memoryview, read: Callable[[], Any]) -> Any:
        """Return the example found; at times, and after the dataset was seen to have changed, what it says itself."""
        due = self._check_every and self._num_found % self._check_every == 0
        self._num_found += 1
        if not due:
            return decode(found)
        example = read()
        self._stale = not equal(decode(found), example)
        return example

    def _is_slot(self, index: Any) -> bool:
        return not self._stale and type(index) is int and 0 <= index < self._kept.num_slots

    def _keep(self, index: Any, example: Any) -> None:
        if self._is_slot(index):
            with suppress(Exception):  # an example that cannot be kept is read anew each time
                self._kept.keep(index, example)


@dataclass(frozen=True, slots=True)
class Shelf:
    """An arena of examples."""

    arena: Arena

    @property
    def num_slots(self) -> int:
        """Examples that it may hold."""
        return self.arena.num_slots

    def get(self, index: int) -> memoryview | None:
        """Return the encoded example, None when it is not here."""
        return self.arena.get(index)

    def keep(self, index: int, example: Any) -> None:
        """Keep an example, if there is room and nobody else is writing."""
        if not _WRITING.acquire(blocking=False):
            return  # another thread writes, or wrote when this process was forked: the next reading may keep it
        try:
            self.arena.put(index, encode(example))
        finally:
            _WRITING.release()


def _only(many: Callable[[list[Any]], list[Any]], index: Any) -> Any:
    return many([index])[0]


@dataclass(slots=True)
class ExampleCaches:
    """The caches of one rank: one per dataset, in order of first use, until the budget is spent."""

    budget_bytes: int
    """Bytes not yet given to a dataset."""
    report: Report
    """Called when something about a dataset was decided."""
    arenas: dict[int, Arena | None] = field(default_factory=dict)
    """id(dataset) -> its arena; None when it is left alone. Forked workers inherit the table and the ids."""
    alive: WeakValueDictionary[int, Any] = field(default_factory=WeakValueDictionary)
    """id(dataset) -> the dataset, so that an id used again by another object is noticed."""
    pictures: dict[int, object] = field(default_factory=dict)
    """id(dataset) -> its picture when it got its arena."""

    def around_iter(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `DataLoader.__iter__`: decide on the dataset before workers are forked."""

        def __iter__(loader: DataLoader[Any]) -> Any:  # noqa: N807 - it stands in for the method of that name
            dataset = loader.dataset
            try:
                if self.alive.get(id(dataset)) is not dataset:
                    self._decide(loader)
                elif self.arenas.get(id(dataset)) is not None and picture(dataset) != self.pictures[id(dataset)]:
                    self._leave(dataset, "it was changed after its first examples had been kept")
            except Exception as failure:
                self._leave(dataset, f"{type(failure).__name__}: {failure}")
            return original(loader)

        return __iter__

    def around_fetcher(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap the fetcher's constructor: let it read the view where its dataset has a cache."""

        def __init__(fetcher: Any, dataset: Any, *rest: Any) -> None:  # noqa: N807 - it stands in for the method
            original(fetcher, dataset, *rest)
            arena = self.arenas.get(id(dataset)) if self.alive.get(id(dataset)) is dataset else None
            if arena is not None:
                fetcher.dataset = CachedExamples(dataset, Shelf(arena))

        return __init__

    def _decide(self, loader: DataLoader[Any]) -> None:
        """Give the dataset an arena, or leave it alone and say why."""
        dataset, facts = loader.dataset, {"dataset": type(loader.dataset).__name__}
        if is_own(loader):
            reason: str | None = "it is read by headway's own loader: give that one cache_bytes"
            example_bytes = 0
        else:
            reason, example_bytes = ("the byte budget is spent", 0) if self.budget_bytes < 1 else uncacheable(loader)
        try:
            self.alive[id(dataset)] = dataset
        except TypeError:  # a list or tuple: it lies in memory already
            reason = "it is a plain container, in memory as it is"
        if reason is not None:
            self._leave(dataset, reason)
            return
        size = len(dataset)  # type: ignore[arg-type]  # map-style: uncacheable() has seen to it
        needed_bytes = size * example_bytes
        capacity_bytes = min(self.budget_bytes, 2 * needed_bytes + 4096)  # twice the first guess: examples vary in size
        self.budget_bytes -= min(needed_bytes, capacity_bytes)
        self.arenas[id(dataset)] = Arena(size, capacity_bytes)
        self.pictures[id(dataset)] = picture(dataset)
        self.report({**facts, "bytes": capacity_bytes, "examples": size})

    def _leave(self, dataset: Any, reason: str) -> None:
        """Read `dataset` as if there were no cache, from the next iterator on."""
        self.arenas[id(dataset)] = None
        self.report({"dataset": type(dataset).__name__, "reason_not_applied": reason})


def uncacheable(loader: DataLoader[Any]) -> tuple[str | None, int]:
    """Say why the examples of this loader's dataset must be read anew each time, or None; and the bytes of one."""
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return "its dataset is not map-style: examples have no index to keep them under", 0
    if len(dataset) == 0:
        return "its dataset is empty", 0
    context = loader.multiprocessing_context or torch.multiprocessing.get_context()
    if loader.num_workers and context.get_start_method() != "fork":
        return f"its workers start by {context.get_start_method()}, and would not share the cache", 0

    def probe() -> tuple[str | None, int]:
        last = len(dataset) - 1
        finding = impurity(dataset, [0, last])
        if finding is None and not _reads_one_by_one(dataset, [0, last]):
            finding = "what it reads depends on what is read with it"
        return (f"its dataset is not pure: {finding}", 0) if finding else (None, len(encode(dataset[0])))

    # What a dataset opens at its first reading must not be there already when the script's own workers are forked.
    return in_child(probe) if loader.num_workers else probe()


def _reads_one_by_one(dataset: Any, indices: list[int]) -> bool:
    """Whether a dataset that can read many examples at once gives a list of the same ones as it reads alone."""
    many = getattr(dataset, "__getitems__", None)
    if not many:
        return True
    together = many(indices)
    return type(together) is list and equal(together, [dataset[index] for index in indices])
