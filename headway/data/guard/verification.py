"""Batches of a loader under a remedy, compared with the script's own: by default within 1 % of the time.

The script's own batch is made by its dataset and its collate function, from the indices of its sampler, at the moment
at which the loop asks for it, with all generators where they were at that moment. A forked child makes it so and
compares it with the batch that the remedy made; the training process only waits.

    loop asks for batch n     remedy gives its batch n           loop gets it
    ───────┬─────────────────────────┬─────────────────────────────────┬───────
           └ generators noted        └ child: own batch n, equal?  ────┘

By default a batch is compared whenever all comparisons together then take less than `SHARE` of the time since training
began. With `headway run --verify` compared are the first batch of each pass, a few early ones, every 100th, and the
batch at which a remedy gives up because what the dataset goes by has changed: caches, threads and workers look at that
before each batch (`circumstances.outside`), and nobody looks a second time. A change that no remedy sees is found at
the next batch that is compared; where the data have changed back by then, it is not found.

On a difference every remedy of the loader is taken away, and the loop gets the script's own batches from this one on.
Of a loader with worker processes of its own, which hold the dataset as it was when the pass began, only the first
batch of a pass can be made again, and the remedy goes at the end of the pass. A batch that cannot be compared is
counted together with the reason.
"""

from __future__ import annotations

import os
import random
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.pin_memory import pin_memory

from headway.core.machine.interruptions import pass_on
from headway.core.units import NS_PER_S
from headway.data.bytes.torch_examples import decode, encode, equal
from headway.data.bytes.torch_keyed import Keys, generator_states, set_generators
from headway.data.guard.outcome import OfDataset, OutcomeWriter
from headway.data.guard.process_state import Looks
from headway.data.guard.trial import be_worker, in_child, with_threads
from headway.runtime.calls.probe_input import name_of
from headway.runtime.in_rank import bootstrap
from headway.runtime.in_rank.remedy import Context
from headway.runtime.recorder.probes import RECORDING, now
from headway.runtime.recorder.rereading import collated
from headway.runtime.script.draws import drawn, fingerprints, own_generators, restorer
from headway.trace.events.vocabulary import READ_AGAIN
from headway.trace.rings.ring import warn

T = TypeVar("T")

EVERY = 100
"""One batch in this many is compared."""

EARLY = frozenset({2, 8, 32})
"""And these: what a loop changes from step to step shows after a few of them."""

SHARE, FIRST_COST_S = 0.01, 0.1
"""Share of the time since training began that comparisons take by default; what the first one is assumed to take."""

LONGEST_S = 20.0
"""A child that has not answered by then hangs; no more batches of loaders like this one are compared."""

FOLLOWED = "_headway_followed"
"""Attribute of an iterator whose batches are compared."""

LATER = "its own workers hold the dataset as it was when the pass began: only the first batch can be made again"
DRAWN = "its examples are drawn, and --allow result-equivalent lets the remedy draw others"
UNSTEADY = "the script's own loader gives another batch each time"

Leave = Callable[[DataLoader[Any], str], None]
"""Takes a remedy away from a loader, for the reason given."""


@dataclass(slots=True)
class VerificationCounts:
    """What was compared, of all loaders with the same facts."""

    batches: int = 0
    compared_at: int = -EVERY
    """Number of the batch that was compared last."""
    stopped: str = ""
    """Why no more batches are compared; '' while they are."""

    def due(self, in_pass: int) -> bool:
        """Whether the batch that comes now is one to compare: `in_pass` is its number in its pass."""
        return in_pass == 0 or self.batches % EVERY == 0 or self.batches in EARLY


@dataclass(slots=True)
class VerifiedIterator:
    """An iterator whose batches are compared, and what the script's own loader would make them of.

    It does not hold the loader: one that keeps its iterator would never be freed if that kept it.
    """

    asked: deque[Any] = field(default_factory=deque)
    """Indices that the sampler gave, of batches that the loop has not got yet."""
    loader: Callable[[], DataLoader[Any] | None] = lambda: None
    source: BatchSource | None = None
    counts: VerificationCounts = field(default_factory=VerificationCounts)
    own_workers: int = 0
    """Worker processes that the script gave its loader."""
    takes: dict[str, tuple[OutcomeWriter, Leave, bool]] = field(default_factory=dict)
    """Remedy -> where it reports, how it is taken away, and whether its examples may be drawn anew."""
    persistent: bool = False
    """Whether those workers stay for later passes."""
    passes: int = 0
    alone: bool = False
    """Whether the rest of the pass is read as the script would read it."""
    rest: Iterator[Any] | None = None
    """Indices of the batches that are left, where a remedy has given up its workers or threads in the pass."""
    changed: bool = False
    """Whether the next batch is compared because of a change."""
    moment: Moment | None = None
    """Where the generators were before the batch under way; None where it is not compared."""
    pid: int = field(default_factory=os.getpid)
    """The process that compares: a fork of it that reads on compares nothing."""

    def notice_change(self) -> None:
        """Have the batch under way compared, or the next one where none is."""
        if _UNDER_WAY.get() is self and self.source is not None and not self.own_workers and not self.counts.stopped:
            self.moment = Moment(self.source)  # the remedy sees a change before it makes the batch
        else:
            self.changed = True

    def ask(self, index: Any) -> None:
        """Note that the sampler gave the indices of a batch; it may have drawn, as the script's own would have."""
        self.asked.append(index)
        self.renew()

    def renew(self) -> None:
        """Note anew where the generators are: the batch under way is not made yet."""
        if self.moment is not None and self.source is not None and not self.own_workers:
            self.moment = Moment(self.source)

    def asking(self, indices: Iterator[Any]) -> Iterator[Any]:
        """Return `indices`, each of which is noted when it is taken."""
        for index in indices:
            self.ask(index)
            yield index


_UNDER_WAY: ContextVar[VerifiedIterator | None] = ContextVar("headway_batch", default=None)
"""What this thread makes the next batch of."""


def notice_change() -> None:
    """Have the batch under way compared, if any: called by a remedy that sees that a dataset goes by something else."""
    followed = _UNDER_WAY.get()
    if followed is not None:
        followed.notice_change()


@dataclass(frozen=True, slots=True)
class BatchSource:
    """What a loader makes its batches of."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    batched: bool
    start_worker: Callable[[int], None] | None

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> BatchSource:
        """Note the parts of a loader."""
        return cls(loader.dataset, loader.collate_fn, loader._auto_collation, loader.worker_init_fn)

    def batch(self, index: Any) -> Any:
        """Return the batch of the indices that a sampler gave."""
        if isinstance(index, Keys):
            index = list(index) if self.batched else index[0]
        return collated(self.dataset, self.collate_fn, index, batched=self.batched)


class Moment:
    """Where all random number generators are when the loop asks for a batch."""

    def __init__(self, source: BatchSource) -> None:
        self.own = own_generators(source.dataset, source.collate_fn)
        self._states, self._restore_own = generator_states(), restorer(self.own)

    def again(self) -> None:
        """Put the generators back to where they were."""
        set_generators(self._states)
        self._restore_own()


class Verification:
    """Compares batches for all remedies of a rank."""

    def __init__(self, context: Context) -> None:
        self._failed, self._emit = context.probes.failed, context.probes.emit
        self.is_bounded = context.verify != "all"
        """Whether comparisons stay within a share of the time."""
        self._began, self._spent_s, self._cost_s = perf_counter(), 0.0, FIRST_COST_S
        self._counts: dict[object, VerificationCounts] = {}
        self._opening = 0
        module = "torch.utils.data.dataloader"
        context.patch(f"{module}:_BaseDataLoaderIter._next_index", self._around_next_index)
        context.patch(f"{module}:_BaseDataLoaderIter._reset", self._around_reset)
        ours = "headway.data"
        for name in (
            f"{module}:_SingleProcessDataLoaderIter", f"{module}:_MultiProcessingDataLoaderIter",
            f"{ours}.workers.torch_threads:ScriptThreads", f"{ours}.workers.worker_iterators:ScriptWorkers",
            f"{ours}.service.torch_served:Served",
        ):  # fmt: skip
            # Where a remedy was taken away, batches are read there: what the dataset raises is the script's own.
            context.patch(f"{name}._next_data", self._around_next_data, passing=(Exception,))
        context.patch(f"{ours}.workers.torch_threads:ScriptThreads._leave", self._around_leave)
        context.patch(f"{ours}.workers.worker_iterators:ScriptWorkers.leave", self._around_leave)
        context.patch(f"{ours}.service.torch_served:Served._took", self._around_took)

    def following(
        self, loader: DataLoader[Any], make: Callable[[], Any], report: OutcomeWriter, leave: Leave, *,
        own_workers: int, may_draw: bool = False,
    ) -> Any:  # fmt: skip
        """Return the iterator that `make` makes for a loader under a remedy, whose batches are compared from now on."""
        self._opening += 1
        try:
            iterator = make()
        finally:
            self._opening -= 1
        followed = iterator.__dict__.setdefault(FOLLOWED, VerifiedIterator())
        if followed.source is None:
            # Names: an object that collates may have no hash, and would be kept in memory.
            facts = (name_of(type(loader.dataset)), name_of(loader.collate_fn), loader.batch_size, own_workers)
            followed.counts = self._counts.setdefault(facts, VerificationCounts())
            followed.loader, followed.source = weakref.ref(loader), BatchSource.of(loader)
            followed.own_workers, followed.persistent = own_workers, loader.persistent_workers
        followed.own_workers = min(followed.own_workers, own_workers)  # before another remedy gave it some
        followed.takes[report.name] = (report, leave, may_draw)
        return iterator

    def _around_next_index(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `_next_index`: note which indices were asked for, in order."""

        def _next_index(iterator: Any) -> Any:
            index = original(iterator)
            followed = iterator.__dict__.get(FOLLOWED)
            if followed is None and self._opening:
                followed = iterator.__dict__[FOLLOWED] = VerifiedIterator()
            if followed is not None:
                followed.ask(index)
            return index

        return _next_index

    def _around_took(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `_took` of a data server's reader: the indices come with the batch."""

        def _took(iterator: Any, *arguments: Any) -> Any:
            items = original(iterator, *arguments)
            followed = iterator.__dict__.get(FOLLOWED)
            if followed is not None:
                found = [int(item) for item in items]
                followed.asked.append(found if followed.source is None or followed.source.batched else found[0])
            return items

        return _took

    def _around_reset(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `_reset`: a kept iterator begins another pass."""

        def _reset(iterator: Any, *arguments: Any, **named: Any) -> Any:
            followed = iterator.__dict__.get(FOLLOWED)
            if followed is not None:
                followed.asked.clear()
                followed.passes, followed.alone, followed.rest = followed.passes + 1, False, None
            return original(iterator, *arguments, **named)

        return _reset

    def _around_leave(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap what gives up workers or threads in a pass: the batch at which that happens is compared."""

        def leave(iterator: Any, *arguments: Any) -> None:
            followed, had_left = iterator.__dict__.get(FOLLOWED), iterator._single is not None
            original(iterator, *arguments)
            if followed is None or had_left or iterator._single is None:
                return
            if followed.alone or followed.pid != os.getpid():
                return
            followed.asked.clear()  # they are the first of those that are left
            followed.rest = iterator._single._indices = followed.asking(iterator._single._indices)
            followed.notice_change()

        return leave

    def _around_next_data(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `_next_data`: compare the batches that are due."""

        def _next_data(iterator: Any) -> Any:
            followed = iterator.__dict__.get(FOLLOWED)
            if followed is None or followed.source is None or not followed.takes:
                return original(iterator)
            is_inner = _UNDER_WAY.get() is followed
            if is_inner:  # torch's own method, called by that of a remedy's iterator
                followed.renew()  # that has gone on to where a loader without workers would be with its first batch
                return original(iterator)
            if followed.alone:
                return _own_batch(iterator, followed)
            if followed.pid != os.getpid():
                return original(iterator)
            followed.moment = self._tried(lambda: self._moment(followed, iterator._num_yielded))
            token = _UNDER_WAY.set(followed)
            try:
                batch = original(iterator)
            except StopIteration:
                raise
            except Exception:
                if followed.asked:
                    followed.asked.popleft()  # a batch that raises was taken too
                raise
            finally:
                _UNDER_WAY.reset(token)
                moment, followed.moment = followed.moment, None
            if iterator.__dict__.get(FOLLOWED) is not followed or not followed.asked:
                return batch  # the remedy has left the loader to itself
            index = followed.asked.popleft()
            followed.counts.batches += 1
            self._tried(lambda: _first(followed).made())
            if moment is None or not self._tried(lambda: self._is_other(iterator, followed, index, batch, moment)):
                return batch
            if not self._tried(lambda: self._taken_away(iterator, followed, moment)):
                return batch  # made by workers that hold an earlier dataset, or in another order: until the pass ends
            return _pinned(iterator, followed.source.batch(index))

        return _next_data

    def _tried(self, step: Callable[[], T]) -> T | None:
        """Do a step of comparing; None where it fails: the loop gets its batch all the same."""
        try:
            return step()
        except Exception as failure:
            pass_on(failure)
            self._failed("comparing batches", failure)
            return None

    def _moment(self, followed: VerifiedIterator, in_pass: int) -> Moment | None:
        """Return where the generators are, if the next batch is to be compared."""
        assert followed.source is not None
        return Moment(followed.source) if self._due(followed, in_pass) else None

    def _due(self, followed: VerifiedIterator, in_pass: int) -> bool:
        """Whether the next batch is to be compared; where it cannot be, the reason is counted."""
        counts, reason = followed.counts, followed.counts.stopped
        if self.is_bounded:
            can_be = not followed.own_workers or (in_pass == 0 and not (followed.passes > 0 and followed.persistent))
            affordable = self._spent_s + self._cost_s <= SHARE * (perf_counter() - self._began)
            followed.changed = False
            return affordable and can_be and not reason
        if followed.own_workers:
            due = in_pass == 0 or followed.changed or counts.batches - counts.compared_at >= EVERY
            if in_pass > 0 or (followed.passes > 0 and followed.persistent):
                reason = LATER
        else:
            due = counts.due(in_pass) or followed.changed
        if due and reason:
            counts.compared_at = counts.batches
            _first(followed).not_compared(reason)
        followed.changed = False
        return due and not reason

    def _is_other(self, iterator: Any, followed: VerifiedIterator, index: Any, batch: Any, moment: Moment) -> bool:
        """Compare a batch with the script's own; tell whether it was found to be another one."""
        followed.counts.compared_at = followed.counts.batches - 1
        began_ns = now()
        try:
            # What was pinned for a device cannot be read in a forked process.
            seen = decode(encode(batch)) if iterator._pin_memory else batch

            num_threads = 1 if followed.own_workers else torch.get_num_threads()
            made = partial(_answer, iterator, followed, index, seen, moment)
            compared = partial(in_child, partial(with_threads, num_threads, made), LONGEST_S)
            reason, found = compared()
            if reason is None and found[0] == "unequal":
                reason = None if compared() == (None, found) else UNSTEADY
            elif reason is None and found[0] == "drawn":
                reason = DRAWN
        except Exception as failure:
            pass_on(failure)
            reason, found = f"{type(failure).__name__}: {failure}", ("", 0)
        took_ns = now() - began_ns
        self._emit(RECORDING, began_ns, took_ns, READ_AGAIN)
        self._cost_s = took_ns / NS_PER_S
        self._spent_s += self._cost_s
        if reason is not None:
            followed.counts.stopped = reason if "hung" in reason else ""
            _first(followed).not_compared(reason)
            return False
        self._tried(lambda: _first(followed).compared(equal=found[0] == "equal"))
        return bool(found[0] == "unequal")

    def _taken_away(self, iterator: Any, followed: VerifiedIterator, moment: Moment) -> bool:
        """Take the remedies away; tell whether the own batch can be made still: all generators are put back for it."""
        number, loader = followed.counts.batches - 1, followed.loader()
        assert followed.source is not None
        name = type(followed.source.dataset).__name__
        reason = OfDataset(f"batch {number} of its loader is not the script's own")
        warn(f"{' and '.join(followed.takes)} changed batch {number} of {name}: taken away from this loader")
        takes, followed.takes = followed.takes, {}
        for report, leave, _ in takes.values():
            try:
                if loader is not None:
                    leave(loader, reason)
                report.withdrawn({"dataset": name} if loader is None else report.names(loader), reason)
            except Exception as failure:
                pass_on(failure)
                self._failed("taking a remedy away", failure)
        if followed.own_workers or hasattr(iterator, "_link"):
            return False
        followed.takes, followed.alone = takes, True
        getattr(iterator, "_shutdown_workers", getattr(iterator, "_close", lambda: None))()
        moment.again()
        return True


def verification_of(context: Context) -> Verification | None:
    """Return what compares the batches of this rank, one for all remedies; None where nobody asked for it."""
    if not context.verify:
        return None
    found = context.shared.get("data.verification")
    if not isinstance(found, Verification):
        found = context.shared["data.verification"] = Verification(context)
    return found


def looks_for(verification: Verification | None) -> Looks:
    """Return when a loader is looked at; where all batches that are due are compared, before each of them."""
    return Looks(each_batch=verification is not None and not verification.is_bounded)


def _answer(
    iterator: Any, followed: VerifiedIterator, index: Any, seen: Any, moment: Moment
) -> tuple[None, tuple[str, int]]:
    """In the child: make the script's own batch; say whether it is equal, and what it is like."""
    bootstrap.leave()
    source = followed.source
    assert source is not None
    moment.again()
    if followed.own_workers:
        _become_worker(source, iterator._num_yielded % followed.own_workers, followed.own_workers, iterator._base_seed)
    before = fingerprints(moment.own)
    true = source.batch(index)
    if equal(seen, true):
        return None, ("equal", 0)
    drew = drawn(before, fingerprints(moment.own))
    if drew and any(may_draw for _, _, may_draw in followed.takes.values()):
        return None, ("drawn", 0)
    return None, ("unequal", zlib.crc32(encode(true)))


def _become_worker(source: BatchSource, number: int, num_workers: int, base_seed: int) -> None:
    """Be the worker process of the script's loader that would make this batch."""
    seed = base_seed + number
    random.seed(seed)
    torch.manual_seed(seed)
    be_worker(torch_worker.WorkerInfo(id=number, num_workers=num_workers, seed=seed, dataset=source.dataset))
    if source.start_worker is not None:
        source.start_worker(number)


def _own_batch(iterator: Any, followed: VerifiedIterator) -> Any:
    """Return the next batch as the script's own loader makes it: here and now."""
    assert followed.source is not None
    if not followed.asked and followed.rest is not None:
        next(followed.rest)
    if followed.asked:
        index = followed.asked.popleft()
    else:
        sampler = iterator._sampler_iter
        index = next(getattr(sampler, "_indices", sampler))
    return _pinned(iterator, followed.source.batch(index))


def _pinned(iterator: Any, batch: Any) -> Any:
    if not iterator._pin_memory:
        return batch
    return pin_memory(batch, iterator._pin_memory_device)  # type: ignore[no-untyped-call]  # torch has no types for it


def _first(followed: VerifiedIterator) -> OutcomeWriter:
    """Return where a batch is counted: once, whatever the number of remedies that its loader has."""
    return next(iter(followed.takes.values()))[0]
