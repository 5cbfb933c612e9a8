"""Remedy: keep decoded examples in memory, within a byte budget, and hand out copies.

The user's dataset and loader stay what they are. Only the object that reads
the dataset for a loader (torch's fetcher) is given a view that looks into the
cache first. The cache is shared by the rank's forked loader workers and
outlives them. An example whose reading draws random numbers, prints, logs or
changes files is never kept; what is kept is compared with the dataset at times, and of no use any more
when it differs, or when the script has changed the dataset (`scrutiny`).
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, ref

from torch.utils.data import DataLoader

from headway.core.machine.interruptions import pass_on
from headway.data.bytes.scrutiny import ALTERED, Scrutiny
from headway.data.cached.cached_examples import CachedExamples, ExampleStore
from headway.data.guard.cache_trial import barred, probed
from headway.data.guard.decisions import NOT_TRIED, Decisions, budget_of, too_dear_to_look_at
from headway.data.guard.files_read import note_looks
from headway.data.guard.outcome import OfDataset, OutcomeWriter, speak
from headway.data.guard.picture import outside
from headway.data.guard.process_state import Looks, listens, modes
from headway.data.guard.verification import Verification, looks_for, notice_change, verification_of
from headway.data.guard.watch import listen
from headway.data.remedies import CacheParameters
from headway.runtime.calls.probe_input import is_own
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy


def cache(parameters: CacheParameters, context: Context) -> Applied | RefusedRemedy:
    """Install the remedy.

    Whether a given dataset is cached is decided when its loader is first read, and reported then.
    """
    report = OutcomeWriter("data.cache", parameters, context)
    caches = ExampleCaches(
        parameters.bytes, report, verification=verification_of(context), decisions=Decisions(budget_of(context))
    )
    atexit.register(caches.settle)
    context.undos += [caches.settle, lambda: atexit.unregister(caches.settle)]
    context.patch("torch.utils.data.dataloader:DataLoader.__iter__", caches.around_iter)
    context.patch("torch.utils.data._utils.fetch:_BaseDatasetFetcher.__init__", caches.around_fetcher)
    listen(context.patch)
    note_looks(context.patch)
    return Applied("data.cache", parameters.to_json())


CONTAINER = "it is a plain container, in memory as it is"
"""Why a list or a tuple is left alone."""


def _goes_by(dataset: Any) -> tuple[object, tuple[object, object]]:
    """Return the modes that this thread is in, and a picture of all else that what is read from `dataset` rests on."""
    *inside, around = outside(dataset)
    assert isinstance(around, tuple), "circumstances begin with the modes"
    return around[0], (tuple(inside), around[1:])


@dataclass(slots=True)
class CachedDataset:
    """What is kept of one dataset."""

    store: ExampleStore
    scrutiny: Scrutiny
    unread: tuple[object, tuple[object, object]]
    """Modes, and all else that the dataset goes by, before any of its examples was read."""
    seen: tuple[object, tuple[object, object]] | None = None
    """The same when this process had read its first example; None before."""
    bytes_taken: int = 0
    """What it takes of the rank's budget."""
    thread: int = field(default_factory=threading.get_ident)
    """The thread that noted this."""
    pid: int = field(default_factory=os.getpid)
    """The process whose dataset the script changes: a worker has a copy, which only its own reading changes."""
    any_type: bool = False
    """Whether examples are kept that hold more than arrays, tensors, numbers and text."""
    looks: Looks = field(default_factory=Looks)
    """When it is looked whether the script has changed it."""
    before: object = None
    """`data_of` the dataset where a look before the batch under way has taken it."""

    @classmethod
    def empty(cls, dataset: Any, store: ExampleStore, *, any_type: bool = False) -> CachedDataset:
        """Return what is kept of a dataset in an empty store."""
        return cls(store, Scrutiny(store.arena.num_slots), _goes_by(dataset), any_type=any_type)

    def note(self, dataset: Any) -> None:
        """Note what the dataset goes by, the first time."""
        if self.seen is None:
            self.thread = threading.get_ident()
            self.seen = _goes_by(dataset)

    def is_other(self, dataset: Any) -> bool:
        """Tell whether the dataset goes by something else than when what is kept was read.

        Where only workers have read, it still is as it was before.
        """
        if self.pid != os.getpid() or not self.store.arena.used_bytes:
            return False
        now = _goes_by(dataset)[1]
        self.before = now[0]
        return (self.seen or self.unread)[1] != now

    def is_of_now(self, dataset: Any) -> bool:
        """Tell whether the cache may serve a batch now. What the loop has changed since ends its use, also in a pass.

        Under other modes (an evaluation without gradients), and where the script listens, the dataset is read directly.
        Workers do not see what the loop sets, and other threads have settings of their own: they are only asked for the
        modes.
        """
        self.before = None
        if listens() or (self.seen is not None and modes() != self.seen[0]):
            return False
        self._end_if_changed(dataset, self.looks.are_alike)
        return True

    def check(self, dataset: Any) -> bool:
        """Look, behind the last batch of a pass, where the last batches were not looked at; return whether it did."""
        return self.looks.is_behind and self._end_if_changed(dataset, self.looks.are_alike_now)

    def _end_if_changed(self, dataset: Any, alike: Callable[[Sequence[object], Callable[[], bool]], bool]) -> bool:
        """End its use where `alike`, of the looks, says that the dataset was changed; return whether it was asked."""
        if self.scrutiny.over or threading.get_ident() != self.thread:
            return False
        if not alike([dataset], lambda: not self.is_other(dataset)):
            self.scrutiny.cause = self.looks.reason("")
            self.scrutiny.end(ALTERED)
            speak(dataset, self.scrutiny)
            notice_change()
        return True

    def in_front(self, dataset: Any) -> CachedExamples:
        """Return a view of the dataset for one reader, with what is kept in front."""
        return CachedExamples(
            dataset, self.store, self.scrutiny, partial(self.note, dataset), partial(self.is_of_now, dataset),
            lambda: self.before, any_type=self.any_type,
        )  # fmt: skip


@dataclass(slots=True)
class ExampleCaches:
    """The caches of one rank: one per dataset, in order of first use, until the budget is spent."""

    budget_bytes: int
    """Bytes not yet given to a dataset."""
    report: OutcomeWriter
    """Called when something about a dataset was decided."""
    stored: dict[int, CachedDataset | None] = field(default_factory=dict)
    """id(dataset) -> what is kept of it; None when it is left alone. Forked workers inherit the table and the ids."""
    alive: WeakValueDictionary[int, Any] = field(default_factory=WeakValueDictionary)
    """id(dataset) -> the dataset, so that an id used again by another object is noticed."""
    verification: Verification | None = None
    """Compares batches with the script's own; None where nobody asked for it."""
    decisions: Decisions = field(default_factory=Decisions)
    """What was tried, by the facts of loaders."""

    def around_iter(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `DataLoader.__iter__`: decide on the dataset before workers are forked."""

        def __iter__(loader: DataLoader[Any]) -> Any:  # noqa: N807 - it stands in for the method of that name
            dataset = loader.dataset
            try:
                if self.alive.get(id(dataset)) is not dataset:
                    self._decide(loader)
                else:
                    self._look(dataset)
            except Exception as failure:
                pass_on(failure)
                self._leave(dataset, f"{type(failure).__name__}: {failure}")
            if self.verification is None or self.stored.get(id(dataset)) is None:
                return begun(loader)
            return self.verification.following(
                loader, lambda: begun(loader), self.report, leave, own_workers=loader.num_workers
            )

        def begun(loader: DataLoader[Any]) -> Any:
            """Make the iterator. Where it has workers, all reading begins there, with the dataset as it is now.

            `data.workers` has just read the first examples in this process too, which may have opened a file.
            """
            iterator, stored = original(loader), self.stored.get(id(loader.dataset))
            if stored is not None and getattr(iterator, "_num_workers", 0) > 0:
                stored.note(loader.dataset)
            return iterator

        def leave(loader: DataLoader[Any], reason: str) -> None:
            self._leave(loader.dataset, reason)

        return __iter__

    def around_fetcher(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap the fetcher's constructor: let it read the view where its dataset has a cache."""

        def __init__(fetcher: Any, dataset: Any, *rest: Any) -> None:  # noqa: N807 - it stands in for the method
            original(fetcher, dataset, *rest)
            stored = self.stored.get(id(dataset)) if self.alive.get(id(dataset)) is dataset else None
            if stored is not None:
                fetcher.dataset = stored.in_front(dataset)

        return __init__

    def _decide(self, loader: DataLoader[Any]) -> None:
        """Give the dataset an arena, or leave it alone and say why."""
        # Memory, open files and budget of datasets that the script has let go come back.
        for key in [key for key in self.stored if key not in self.alive]:
            gone = self.stored.pop(key)
            self.budget_bytes += 0 if gone is None else gone.bytes_taken
        dataset, facts = loader.dataset, {"dataset": type(loader.dataset).__name__}
        reason, example_bytes = self._barred(loader), 0
        if reason is None:
            reason, example_bytes = self.decisions.caching(loader, lambda: probed(loader))
        if reason not in (NOT_TRIED, CONTAINER):  # else a later pass may try; and a container cannot be noted
            self.alive[id(dataset)] = dataset
        if reason is not None:
            self._leave(dataset, reason)
            return
        size = len(dataset)  # type: ignore[arg-type]  # map-style: uncacheable() has seen to it
        needed_bytes = size * example_bytes
        capacity_bytes = min(self.budget_bytes, 2 * needed_bytes + 4096)  # twice the first guess: examples vary in size
        stored = self.stored[id(dataset)] = CachedDataset.empty(dataset, ExampleStore(size, capacity_bytes))
        stored.looks = looks_for(self.verification)
        stored.looks.begin()
        stored.bytes_taken = min(needed_bytes, capacity_bytes)
        self.budget_bytes -= stored.bytes_taken
        self.report({**facts, "bytes": capacity_bytes, "examples": size})

    def _barred(self, loader: DataLoader[Any]) -> str | None:
        """Say why the dataset is not even tried, or None: asked of every dataset, since it costs next to nothing."""
        try:
            ref(loader.dataset)
        except TypeError:  # a list or tuple: it lies in memory already
            return CONTAINER
        if is_own(loader):
            return "it is read by headway's own loader: give that one cache_bytes"
        if self.budget_bytes < 1:
            return "the byte budget is spent"
        return barred(loader) or too_dear_to_look_at((loader.dataset,), self.decisions)

    def _look(self, dataset: Any) -> None:
        """Leave a dataset that the script has changed, or of which a reader found that it may not be kept."""
        stored = self.stored.get(id(dataset))
        if stored is None:
            return
        has_looked = stored.check(dataset)
        stored.looks.begin()
        if not (has_looked or stored.scrutiny.over) and stored.is_other(dataset):
            stored.scrutiny.end(ALTERED)
        if stored.scrutiny.over:
            self._leave(dataset, OfDataset(stored.scrutiny.finding))

    def settle(self) -> None:
        """Report what readers found in the last pass; call it at the end."""
        for dataset in list(self.alive.values()):
            stored = self.stored.get(id(dataset))
            if stored is not None:
                stored.check(dataset)
            if stored is not None and stored.scrutiny.over:
                self._leave(dataset, OfDataset(stored.scrutiny.finding))

    def _leave(self, dataset: Any, reason: str) -> None:
        """Read `dataset` as if there were no cache, from the next iterator on."""
        had_it = {"had_it": True} if self.stored.get(id(dataset)) is not None else {}
        self.stored[id(dataset)] = None
        self.report({"dataset": type(dataset).__name__, "reason_not_applied": reason, **had_it})
