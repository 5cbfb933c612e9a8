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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, ref

import torch.multiprocessing
from torch.utils.data import DataLoader, IterableDataset

from headway.core.arena import Arena
from headway.data.caches.scrutiny import ALTERED, CHANGED, DREW, Scrutiny
from headway.data.runtime.aligned import Aligned, out_of_sight
from headway.data.runtime.circumstances import data_of, modes, outside
from headway.data.runtime.decisions import NOT_TRIED, Decisions, budget_of
from headway.data.runtime.examples import aliased, encode, equal
from headway.data.runtime.files_read import Noted, files_read, written_since
from headway.data.runtime.outcome import OfDataset, Report, reporter, speak
from headway.data.runtime.purity import impurity
from headway.data.runtime.shelf import Kept, Origin, Shelf, unpacked
from headway.data.runtime.surroundings import surroundings
from headway.data.runtime.trial import in_child, pretend_worker
from headway.data.runtime.verification import Verification, notice_change, verification_of
from headway.data.runtime.visible import listen, noting
from headway.data.runtime.watch import Watch
from headway.runtime.probe_input import is_own
from headway.runtime.remedy import Applied, Context, Refused


def cache(parameters: Mapping[str, Any], context: Context) -> Applied | Refused:
    """Install the remedy. Parameters: bytes (budget of this rank, shared by its datasets).

    Whether a given dataset is cached is decided when its loader is first read, and reported then.
    """
    budget_bytes = int(parameters["bytes"])
    if budget_bytes < 1:
        return Refused("data.cache", f"a budget of {budget_bytes} bytes holds nothing")
    report = reporter("data.cache", parameters, context)
    caches = ExampleCaches(
        budget_bytes, report, verification=verification_of(context), decisions=Decisions(budget_of(context))
    )
    atexit.register(caches.settle)
    context.undos += [caches.settle, lambda: atexit.unregister(caches.settle)]
    context.patch("torch.utils.data.dataloader:DataLoader.__iter__", caches.around_iter)
    context.patch("torch.utils.data._utils.fetch:_BaseDatasetFetcher.__init__", caches.around_fetcher)
    listen(context.patch)
    return Applied("data.cache", dict(parameters))


CONTAINER = "it is a plain container, in memory as it is"
"""Why a list or a tuple is left alone."""

LOOKS = 14
"""Examples between the first and the last that are read twice before a dataset is cached."""

LOOK_S = 0.1
"""Time after which no further one is."""


@dataclass(slots=True)
class _Readings:
    """What one batch read from the dataset."""

    data: object = None
    """What the dataset went by before the first of them; None before it."""
    pending: list[tuple[int, Any, Origin]] = field(default_factory=list)
    """What may be kept, if reading has changed nothing."""


class CachedExamples:
    """A view of a dataset for one reader: from the cache where it can, else from the dataset, and then kept.

    What may be kept, and what is compared with the dataset although it was found, `scrutiny` says.
    """

    def __init__(
        self, dataset: Any, kept: Kept, scrutiny: Scrutiny, after_first: Callable[[], object] = lambda: None,
        is_of_now: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """Begin; `after_first` is called when this reader has read its first example from the dataset.

        `is_of_now` is asked before each batch: False leaves the cache out of it.
        """
        self._dataset, self._kept, self._scrutiny = dataset, kept, scrutiny
        self._is_of_now = is_of_now
        self._watch, self._after_first = Watch(dataset), after_first
        self._has_read = self._has_found = False
        self._files, self._aligned = files_read(), Aligned(dataset)

    def __getitem__(self, index: Any) -> Any:
        """Return example `index`: always a copy of its own."""
        if not self._is_of_now():
            return self._dataset[index]
        readings = _Readings()
        example, _ = self._one(index, readings)
        self._keep_all(readings)
        return example

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """Return many; a dataset that reads many at once is asked once, for those that are missing."""
        many = getattr(self._dataset, "__getitems__", None)
        if not self._is_of_now():
            return many(indices) if many else [self._dataset[index] for index in indices]
        if many and (type(indices) is not list or self._scrutiny.over):
            return many(indices)
        readings = _Readings()
        if many:
            pairs = self._together(many, list(indices), readings)
        else:
            pairs = [self._one(index, readings) for index in indices]
        self._keep_all(readings)
        if self._scrutiny.over:  # found just now: what this batch has of the cache may be out of date too
            alone = partial(_only, many) if many else self._dataset.__getitem__
            return [alone(index) if old else example for index, (example, old) in zip(indices, pairs, strict=True)]
        return [example for example, _ in pairs]

    def _one(self, index: Any, readings: _Readings) -> tuple[Any, bool]:
        """Return an example, and whether it comes from the cache and was not compared."""
        found = self._find(index)
        if found is not None:
            return self._handed(index, found, lambda: self._dataset[index], readings)
        example, drew, files = self._read(lambda: self._dataset[index], readings)
        self._keep(index, example, drew, files, readings)
        return example, False

    def _together(
        self, many: Callable[[list[Any]], Any], indices: list[Any], readings: _Readings
    ) -> list[tuple[Any, bool]]:
        """Return the examples of a batch; where reading the missing ones drew, none of them is kept."""
        found = [self._find(index) for index in indices]
        missing = [index for index, payload in zip(indices, found, strict=True) if payload is None]
        drew: bool | None = None
        fresh: Iterator[Any] = iter(())
        files: Mapping[str, Noted] = {}
        if missing:
            examples, drew, files = self._read(lambda: many(missing), readings)
            # Of several examples nobody knows which one drew.
            fresh, drew = iter(examples), None if drew and len(missing) > 1 else drew
        pairs = []
        for index, payload in zip(indices, found, strict=True):
            if payload is not None:
                pairs.append(self._handed(index, payload, partial(_only, many, index), readings))
                continue
            example = next(fresh)
            self._keep(index, example, drew, files, readings)
            pairs.append((example, False))
        return pairs

    def _find(self, index: Any) -> memoryview | None:
        return self._kept.get(index) if self._is_slot(index) else None

    def _handed(self, index: int, found: memoryview, read: Callable[[], Any], readings: _Readings) -> tuple[Any, bool]:
        """Return the example found, or, where a comparison is due, what the dataset gives."""
        first, self._has_found = not self._has_found, True
        kept, is_old = unpacked(found, self._aligned, index)
        if not is_old and (self._scrutiny.over or not self._scrutiny.is_due(len(found), first=first)):
            return kept, True
        example, drew, _ = self._read(read, readings)
        if drew:
            self._scrutiny.end(DREW, index)
        elif not is_old and not equal(kept, example):
            self._scrutiny.end(CHANGED, index)
        speak(self._dataset, self._scrutiny)
        return example, False

    def _read(self, read: Callable[[], Any], readings: _Readings) -> tuple[Any, bool | None, Mapping[str, Noted]]:
        """Read from the dataset; return what came, whether that drew, or did what others see, and from which files."""
        if self._scrutiny.over:
            return read(), None, {}
        if readings.data is None:
            readings.data = data_of(self._dataset)
        with noting() as acts, self._files.noting() as files:
            reading = self._watch.around(read)
        if not self._has_read:
            self._has_read = True
            self._after_first()
        return reading.value, True if acts else reading.drew, files

    def _is_slot(self, index: Any) -> bool:
        return type(index) is int and 0 <= index < self._kept.num_slots and not self._scrutiny.over

    def _keep(
        self, index: Any, example: Any, drew: bool | None, files: Mapping[str, Noted], readings: _Readings
    ) -> None:
        may = self._is_slot(index) and self._scrutiny.may_keep(index, drew=drew) and not aliased(example)
        # Of a file that was written just now, another write might leave no trace.
        if may and written_since(files, time.time_ns()) is None:
            readings.pending.append((index, example, Origin(files, self._aligned.of([index]))))
        speak(self._dataset, self._scrutiny)

    def _keep_all(self, readings: _Readings) -> None:
        """Keep what was read for this batch, where that changed nothing the dataset goes by: a hit would leave it out.

        One look for all of them. A file opened lazily, at the first reading, is such a change, and costs no more than
        that batch.
        """
        if readings.pending and readings.data == data_of(self._dataset):
            for index, example, origin in readings.pending:
                with suppress(Exception):  # an example that cannot be kept is read anew each time
                    self._kept.keep(index, example, origin)


def _only(many: Callable[[list[Any]], list[Any]], index: Any) -> Any:
    return many([index])[0]


def _goes_by(dataset: Any) -> tuple[object, object]:
    """Return the modes that this thread is in, and a picture of all else that what is read from `dataset` rests on."""
    *inside, around = outside(dataset)
    assert isinstance(around, tuple), "circumstances begin with the modes"
    return around[0], (inside, around[1:])


@dataclass(slots=True)
class Stored:
    """What is kept of one dataset."""

    arena: Arena
    scrutiny: Scrutiny
    unread: tuple[object, object]
    """Modes, and all else that the dataset goes by, before any of its examples was read."""
    seen: tuple[object, object] | None = None
    """The same when this process had read its first example; None before."""
    bytes_taken: int = 0
    """What it takes of the rank's budget."""
    thread: int = field(default_factory=threading.get_ident)
    """The thread that noted this."""
    pid: int = field(default_factory=os.getpid)
    """The process whose dataset the script changes: a worker has a copy, which only its own reading changes."""

    @classmethod
    def empty(cls, dataset: Any, num_examples: int, capacity_bytes: int) -> Stored:
        """Return room for the examples of a dataset."""
        return cls(Arena(num_examples, capacity_bytes), Scrutiny(num_examples), _goes_by(dataset))

    def note(self, dataset: Any) -> None:
        """Note what the dataset goes by, the first time."""
        if self.seen is None:
            self.thread = threading.get_ident()
            self.seen = _goes_by(dataset)

    def is_other(self, dataset: Any) -> bool:
        """Tell whether the dataset goes by something else than when what is kept was read.

        Where only workers have read, it still is as it was before.
        """
        if self.pid != os.getpid() or not self.arena.used_bytes:
            return False
        return (self.seen or self.unread)[1] != _goes_by(dataset)[1]

    def is_of_now(self, dataset: Any) -> bool:
        """Tell whether the cache may serve a batch now. What the loop has changed since ends its use, also in a pass.

        Under other modes (an evaluation without gradients) the dataset is read directly. Workers do not see what the
        loop sets, and other threads have settings of their own: they are only asked for the modes.
        """
        if self.seen is not None and modes() != self.seen[0]:
            return False
        if threading.get_ident() == self.thread and not self.scrutiny.over and self.is_other(dataset):
            self.scrutiny.end(ALTERED)
            speak(dataset, self.scrutiny)
            notice_change()
        return True

    def in_front(self, dataset: Any, kept: Kept) -> CachedExamples:
        """Return a view of the dataset for one reader, with `kept` in front."""
        return CachedExamples(
            dataset, kept, self.scrutiny, partial(self.note, dataset), partial(self.is_of_now, dataset)
        )


@dataclass(slots=True)
class ExampleCaches:
    """The caches of one rank: one per dataset, in order of first use, until the budget is spent."""

    budget_bytes: int
    """Bytes not yet given to a dataset."""
    report: Report
    """Called when something about a dataset was decided."""
    stored: dict[int, Stored | None] = field(default_factory=dict)
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
                self._leave(dataset, f"{type(failure).__name__}: {failure}")
            if self.verification is None or self.stored.get(id(dataset)) is None:
                return original(loader)
            return self.verification.following(
                loader, lambda: original(loader), self.report, leave, own_workers=loader.num_workers
            )

        def leave(loader: DataLoader[Any], reason: str) -> None:
            self._leave(loader.dataset, reason)

        return __iter__

    def around_fetcher(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap the fetcher's constructor: let it read the view where its dataset has a cache."""

        def __init__(fetcher: Any, dataset: Any, *rest: Any) -> None:  # noqa: N807 - it stands in for the method
            original(fetcher, dataset, *rest)
            stored = self.stored.get(id(dataset)) if self.alive.get(id(dataset)) is dataset else None
            if stored is not None:
                fetcher.dataset = stored.in_front(dataset, Shelf(stored.arena))

        return __init__

    def _decide(self, loader: DataLoader[Any]) -> None:
        """Give the dataset an arena, or leave it alone and say why."""
        self._forget_the_dead()
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
        stored = self.stored[id(dataset)] = Stored.empty(dataset, size, capacity_bytes)
        stored.bytes_taken = min(needed_bytes, capacity_bytes)
        self.budget_bytes -= stored.bytes_taken
        if loader.num_workers:  # else the first example read may open a file: no change that matters
            stored.note(dataset)
        self.report({**facts, "bytes": capacity_bytes, "examples": size})

    def _forget_the_dead(self) -> None:
        """Give back the memory, open files and budget of datasets that the script has let go."""
        for key in [key for key in self.stored if key not in self.alive]:
            stored = self.stored.pop(key)
            self.budget_bytes += 0 if stored is None else stored.bytes_taken

    def _barred(self, loader: DataLoader[Any]) -> str | None:
        """Say why the dataset is not even tried, or None: asked of every dataset, since it costs next to nothing."""
        try:
            ref(loader.dataset)
        except TypeError:  # a list or tuple: it lies in memory already
            return CONTAINER
        if is_own(loader):
            return "it is read by headway's own loader: give that one cache_bytes"
        return "the byte budget is spent" if self.budget_bytes < 1 else barred(loader)

    def _look(self, dataset: Any) -> None:
        """Leave a dataset that the script has changed, or of which a reader found that it may not be kept."""
        stored = self.stored.get(id(dataset))
        if stored is None:
            return
        if stored.is_other(dataset):
            stored.scrutiny.end(ALTERED)
        if stored.scrutiny.over:
            self._leave(dataset, OfDataset(stored.scrutiny.finding))

    def settle(self) -> None:
        """Report what readers found in the last pass; call it at the end."""
        for dataset in list(self.alive.values()):
            stored = self.stored.get(id(dataset))
            if stored is not None and stored.scrutiny.over:
                self._leave(dataset, OfDataset(stored.scrutiny.finding))

    def _leave(self, dataset: Any, reason: str) -> None:
        """Read `dataset` as if there were no cache, from the next iterator on."""
        self.stored[id(dataset)] = None
        self.report({"dataset": type(dataset).__name__, "reason_not_applied": reason})


def uncacheable(loader: DataLoader[Any], *, fresh: bool = True) -> tuple[str | None, int]:
    """Say why the examples of this loader's dataset must be read anew each time, or None; and the bytes of one.

    `fresh`: a script that knows nothing of a cache must not get copies of what its dataset has in memory.
    """
    reason = barred(loader)
    return probed(loader, fresh=fresh) if reason is None else (reason, 0)


def barred(loader: DataLoader[Any]) -> str | None:
    """Say why the examples of this loader's dataset may not be kept, or None, as far as no example need be read."""
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return "its dataset is not map-style: examples have no index to keep them under"
    if len(dataset) == 0:
        return "its dataset is empty"
    reason = out_of_sight(dataset)
    if reason is not None:
        return reason
    context = loader.multiprocessing_context or torch.multiprocessing.get_context()
    if loader.num_workers and context.get_start_method() != "fork":
        return f"its workers start by {context.get_start_method()}, and would not share the cache"
    return None


def probed(loader: DataLoader[Any], *, fresh: bool = True) -> tuple[str | None, int]:
    """Say the same by reading some examples in a forked child; and the bytes of one."""
    dataset: Any = loader.dataset

    def probe() -> tuple[str | None, int]:
        last = len(dataset) - 1
        finding = impurity(dataset, [0, last], fresh=fresh)
        if finding is None and not _reads_one_by_one(dataset, [0, last]):
            finding = "what it reads depends on what is read with it"
        finding = finding or _unsteady(dataset)
        example, num_bytes = dataset[0], 0 if finding else len(encode(dataset[0]))
        if finding is None and aliased(example):
            finding = "parts of an example share memory, and parts of a copy would not"
        finding = finding or _differs_in_workers(loader, [0, last])
        return (type(finding)(f"its dataset is not pure: {finding}"), 0) if finding else (None, num_bytes)

    # Never here: a dataset may count its readings, and what it opens at its first one must not be there already when
    # the script's own workers are forked.
    return in_child(probe, lose_writes=True)


def _differs_in_workers(loader: Any, indices: list[int]) -> str | None:
    """Say that examples depend on which worker reads them, or on whether one does; for a child that ends with this."""
    here = [loader.dataset[index] for index in indices]
    for number in range(2):
        pretend_worker(loader, number)
        if not equal([loader.dataset[index] for index in indices], here):
            return "an example depends on the worker that reads it"
    return None


def _unsteady(dataset: Any) -> str | None:
    """Say what changes from one reading of an example to the next although it draws from no generator in sight.

    Examples that draw say nothing here: they are not kept when they are missed, others may be.
    """
    watch, began = Watch(dataset), time.monotonic()
    for index in sorted({k * len(dataset) // (LOOKS + 1) for k in range(1, LOOKS + 1)}):
        if time.monotonic() - began > LOOK_S:
            break
        first = watch.around(partial(dataset.__getitem__, index), alone=True)
        before = surroundings(dataset)
        second = watch.around(partial(dataset.__getitem__, index), alone=True)
        if first.drew is not False or second.drew is not False or not _is_encodable(first.value):
            continue
        if not equal(first.value, second.value):
            return OfDataset(f"reading example {index} twice gave two different results")
        if surroundings(dataset) != before:
            return OfDataset(f"reading example {index} changes what the dataset goes by")
    return None


def _is_encodable(example: Any) -> bool:
    """Tell whether an example could be kept at all."""
    try:
        encode(example)
    except Exception:
        return False
    return True


def _reads_one_by_one(dataset: Any, indices: list[int]) -> bool:
    """Whether a dataset that can read many examples at once gives a list of the same ones as it reads alone."""
    many = getattr(dataset, "__getitems__", None)
    if not many:
        return True
    together = many(indices)
    return type(together) is list and equal(together, [dataset[index] for index in indices])
