"""Remedy: keep decoded examples in memory, within a byte budget, and hand out copies.

The user's dataset and loader stay what they are. Only the object that reads
the dataset for a loader (torch's fetcher) is given a view that looks into the
cache first. The cache is shared by the rank's forked loader workers and
outlives them. A dataset whose examples are not pure is never cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch.multiprocessing
from torch.utils.data import DataLoader, IterableDataset

from headway.core.arena import Arena
from headway.data.runtime.examples import decode, encode
from headway.data.runtime.outcome import Report, reporter
from headway.data.runtime.purity import impurity
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


class CachedExamples:
    """A view of a dataset for one reader: from the cache where it can, else from the dataset, and then kept."""

    def __init__(self, dataset: Any, arena: Arena) -> None:
        self._dataset, self._arena = dataset, arena

    def __getitem__(self, index: Any) -> Any:
        """Return example `index`: always a copy of its own."""
        found = self._arena.get(index) if self._is_slot(index) else None
        if found is not None:
            return decode(found)
        example = self._dataset[index]
        self._keep(index, example)
        return example

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Return many; a dataset that reads many at once is asked once, for those that are missing."""
        if not getattr(self._dataset, "__getitems__", None):
            return [self[index] for index in indices]
        found = [self._arena.get(index) if self._is_slot(index) else None for index in indices]
        missing = [index for index, payload in zip(indices, found, strict=True) if payload is None]
        fresh = iter(self._dataset.__getitems__(missing) if missing else [])
        examples = []
        for index, payload in zip(indices, found, strict=True):
            examples.append(next(fresh) if payload is None else decode(payload))
            if payload is None:
                self._keep(index, examples[-1])
        return examples

    def _is_slot(self, index: Any) -> bool:
        return type(index) is int and 0 <= index < self._arena.num_slots

    def _keep(self, index: Any, example: Any) -> None:
        if self._is_slot(index):
            self._arena.put(index, encode(example))


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

    def around_iter(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `DataLoader.__iter__`: decide on the dataset before workers are forked."""

        def __iter__(loader: DataLoader[Any]) -> Any:  # noqa: N807 - it stands in for the method of that name
            if self.alive.get(id(loader.dataset)) is not loader.dataset:
                self._decide(loader)
            return original(loader)

        return __iter__

    def around_fetcher(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap the fetcher's constructor: let it read the view where its dataset has a cache."""

        def __init__(fetcher: Any, dataset: Any, *rest: Any) -> None:  # noqa: N807 - it stands in for the method
            original(fetcher, dataset, *rest)
            arena = self.arenas.get(id(dataset)) if self.alive.get(id(dataset)) is dataset else None
            if arena is not None:
                fetcher.dataset = CachedExamples(dataset, arena)

        return __init__

    def _decide(self, loader: DataLoader[Any]) -> None:
        """Give the dataset an arena, or leave it alone and say why."""
        dataset, facts = loader.dataset, {"dataset": type(loader.dataset).__name__}
        reason = uncacheable(loader) or (None if self.budget_bytes > 0 else "the byte budget is spent")
        try:
            self.alive[id(dataset)] = dataset
        except TypeError:  # a list or tuple: it lies in memory already
            reason = "it is a plain container, in memory as it is"
        if reason is not None:
            self.arenas[id(dataset)] = None
            self.report({**facts, "reason_not_applied": reason})
            return
        size = len(dataset)  # type: ignore[arg-type]  # map-style: uncacheable() has seen to it
        needed_bytes = size * len(encode(dataset[0]))
        capacity_bytes = min(self.budget_bytes, 2 * needed_bytes + 4096)  # twice the first guess: examples vary in size
        self.budget_bytes -= min(needed_bytes, capacity_bytes)
        self.arenas[id(dataset)] = Arena(size, capacity_bytes)
        self.report({**facts, "bytes": capacity_bytes, "examples": size})


def uncacheable(loader: DataLoader[Any]) -> str | None:
    """Say why the examples of this loader's dataset must be read anew each time, or None."""
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return "its dataset is not map-style: examples have no index to keep them under"
    if len(dataset) == 0:
        return "its dataset is empty"
    context = loader.multiprocessing_context or torch.multiprocessing.get_context()
    if loader.num_workers and context.get_start_method() != "fork":
        return f"its workers start by {context.get_start_method()}, and would not share the cache"
    finding = impurity(dataset, [0, len(dataset) - 1])
    return f"its dataset is not pure: {finding}" if finding else None
