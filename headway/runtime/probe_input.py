"""Probes of the input pipeline: waiting in `next(loader)`, and the work behind it wherever it runs.

The wait is recorded on the training thread. The work (`input.load`) is
recorded where the dataset runs: in the main process or in a loader worker,
each in its own ring, per batch and never per example. Blocked time is wall -
thread CPU - run delay; the run delay is field 2 of /proc/thread-self/schedstat.
In the main process CPU time is read for every load that follows one longer
than 0.2 ms, and for every 16th otherwise: reading costs 3 us.
"""

from __future__ import annotations

import _thread
import functools
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

from headway.runtime.probes import Probes, now
from headway.trace.vocabulary import SPANS

NEXT, ITER, LOAD = SPANS["input.next"].code, SPANS["input.iter"].code, SPANS["input.load"].code
PARTS, WORKER = SPANS["input.parts"].code, SPANS["input.worker"].code

LONG_LOAD_NS = 200_000
"""A load longer than this pays for reading CPU time at every batch."""

EVERY = 16
"""Among shorter loads of the main process one in this many is measured."""

UNKNOWN = (-1, -1)
"""Group and iterator of an iterator that did not come from `iter(loader)`."""

cpu_now = time.thread_time_ns


def loader_iter(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `DataLoader.__iter__`: creation of an iterator, its workers' processes included."""
    emit = probes.emit
    groups = LoaderGroups(probes)
    iterators = 0

    @functools.wraps(original)
    def __iter__(self: Any) -> Any:  # noqa: N807  # the name it has in torch
        """Make the iterator and record how long that took."""
        nonlocal iterators
        start = now()
        result = original(self)
        try:
            duration, corr = now() - start, iterators
            iterators += 1
            group = groups.of(self)
            result.headway_ids = (group, corr)
            workers = getattr(result, "_workers", ())
            emit(ITER, start, duration, group, corr, len(workers))
            for worker, process in enumerate(workers):
                emit(WORKER, start + duration, 0, group, corr, worker, process.pid)
        except Exception as cause:
            probes.failed("DataLoader.__iter__", cause)
        return result

    return __iter__


def process_data(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `_MultiProcessingDataLoaderIter._process_data`: it knows which worker the batch at hand came from."""

    @functools.wraps(original)
    def _process_data(self: Any, data: Any, *rest: Any) -> Any:
        """Note the worker, then go on."""
        self.headway_worker = rest[0] if rest else -1
        return original(self, data, *rest)

    return _process_data


def loader_next(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `_BaseDataLoaderIter.__next__`: how long the training thread waits for a batch."""
    emit = probes.emit

    @functools.wraps(original)
    def __next__(self: Any) -> Any:  # noqa: N807  # the name it has in torch
        """Get the batch and record the wait; the last call, which ends the epoch, has seq = -1."""
        start = now()
        try:
            batch = original(self)
        except StopIteration:
            end_of_epoch(self, start)
            raise
        try:
            duration = now() - start
            group, corr = getattr(self, "headway_ids", UNKNOWN)
            worker = getattr(self, "headway_worker", -1) if self._num_workers else -1
            emit(NEXT, start, duration, group, self._num_yielded - 1, worker, corr)
        except Exception as cause:
            probes.failed("DataLoader.__next__", cause)
        return batch

    def end_of_epoch(self: Any, start: int) -> None:
        try:
            group, corr = getattr(self, "headway_ids", UNKNOWN)
            emit(NEXT, start, now() - start, group, -1, -1, corr)
        except Exception as cause:
            probes.failed("DataLoader.__next__", cause)

    return __next__


def fetcher_init(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `_BaseDatasetFetcher.__init__`: note whose fetcher it is, and put a clock before its collate."""
    lives = 0
    pid = os.getpid()

    @functools.wraps(original)
    def __init__(self: Any, dataset: Any, auto_collation: Any, collate_fn: Any, drop_last: Any) -> None:  # noqa: N807
        """Initialise the fetcher with a collate that notes when it starts."""
        nonlocal lives, pid
        meter = None
        try:
            if pid != os.getpid():
                pid, lives = os.getpid(), 0
            meter = Meter(probes, lives)
            lives += 1
            collate = meter.collate(collate_fn)
        except Exception as cause:
            probes.failed("fetcher", cause)
            collate = collate_fn
        original(self, dataset, auto_collation, collate, drop_last)
        self.headway_meter = meter

    return __init__


def fetch(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap the `fetch` of a fetcher: dataset and collate of one batch."""
    fetching = probes.fetching

    @functools.wraps(original)
    def fetch(self: Any, possibly_batched_index: Any) -> Any:
        """Fetch the batch and record it, its CPU time and its run delay."""
        meter = getattr(self, "headway_meter", None)
        if meter is None:
            return original(self, possibly_batched_index)
        meter.start()
        fetching[0] = True
        try:
            batch = original(self, possibly_batched_index)
        finally:
            fetching[0] = False
        meter.stop(batch)
        return batch

    return fetch


class Meter:
    """Measures the loads of one fetcher."""

    __slots__ = ("at_collate", "at_start", "begin", "bytes", "count", "delay", "emit", "gc", "life", "long", "probes",
                 "schedstat", "worker")  # fmt: skip

    def __init__(self, probes: Probes, life: int) -> None:
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        self.probes, self.emit = probes, probes.emit
        self.worker = -1 if info is None else info.id
        self.life = -1 if info is None else life
        """In a worker: n-th life of its dataset. In the main process: -1, the enclosing input.next says the loader."""
        if info is not None:
            probes.recorder.set_worker(info.id)
        self.schedstat = open_schedstat()
        self.count = self.bytes = 0
        self.long = True
        self.begin = self.at_start = self.at_collate = self.delay = self.gc = -1

    def collate(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return `collate_fn` with a reading of the CPU clock in front, for the loads that are measured."""

        def collate(examples: Any) -> Any:
            if self.at_start >= 0:
                self.at_collate = cpu_now()
            return collate_fn(examples)

        return collate

    def start(self) -> None:
        """Begin a load."""
        if self.long or self.worker >= 0 or not self.count % EVERY:
            self.at_collate, self.gc = -1, self.probes.gc_ns[0]
            self.delay = read_delay(self.schedstat)
            self.at_start = cpu_now()
        else:
            self.at_start = -1
        self.begin = now()

    def stop(self, batch: Any) -> None:
        """End a load and write its records."""
        try:
            begin, duration = self.begin, now() - self.begin
            if self.at_start < 0:
                self.emit(LOAD, begin, duration, self.life, self.count, self.worker, self.bytes)
            else:
                self._stop_measured(batch, begin, duration, cpu_now())
            self.long = duration > LONG_LOAD_NS
            self.count += 1
        except Exception as cause:
            self.probes.failed("input.load", cause)

    def _stop_measured(self, batch: Any, begin: int, duration: int, cpu: int) -> None:
        after = read_delay(self.schedstat)
        # The clocks are read one after the other: cut so that the parts never exceed the whole.
        spent = min(cpu - self.at_start, duration)
        delay = min(after - self.delay, duration - spent) if after >= 0 <= self.delay else -1
        collate = min(cpu - self.at_collate, spent) if self.at_collate >= 0 else 0
        self.bytes = batch_bytes(batch)
        self.emit(LOAD, begin, duration, self.life, self.count, self.worker, self.bytes)
        self.emit(PARTS, begin, duration, spent, delay, collate, self.probes.gc_ns[0] - self.gc)


def open_schedstat() -> int:
    """Return a descriptor of the calling thread's scheduler statistics, -1 where the kernel keeps none.

    It stays open as long as the process: one per fetcher, closed with it would cost a finaliser per iterator.
    """
    key = (os.getpid(), _thread.get_ident())
    descriptor = _SCHEDSTAT.get(key)
    if descriptor is None:
        try:
            descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            descriptor = -1
        _SCHEDSTAT[key] = descriptor
    return descriptor


_SCHEDSTAT: dict[tuple[int, int], int] = {}
"""(pid, thread) -> descriptor: one that was inherited by fork would describe the parent's thread."""


def read_delay(descriptor: int) -> int:
    """Return the nanoseconds that the thread was ready to run but had no core; -1 if unknown."""
    if descriptor < 0:
        return -1
    try:
        return int(os.pread(descriptor, 96, 0).split()[1])
    except (OSError, ValueError, IndexError):
        return -1


def batch_bytes(batch: Any, depth: int = 0) -> int:
    """Return the bytes of the tensors and arrays in a batch of nested lists, tuples and mappings."""
    nbytes = getattr(batch, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    if depth > 4:
        return 0
    if isinstance(batch, dict):
        return sum(batch_bytes(value, depth + 1) for value in batch.values())
    if isinstance(batch, (list, tuple)):
        return sum(batch_bytes(value, depth + 1) for value in batch)
    return 0


class LoaderGroups:
    """Gives each loader a small number, in order of first use: the same on all ranks that run the same script.

    A loader made anew for each epoch, with the same facts as one that is gone, keeps that one's number.
    """

    def __init__(self, probes: Probes) -> None:
        self.probes = probes
        self._loaders: list[tuple[weakref.ref[Any], dict[str, Any]]] = []

    def of(self, loader: Any) -> int:
        """Return the loader's group, and write its facts when it is new."""
        for group, (reference, _) in enumerate(self._loaders):
            if reference() is loader:
                return group
        facts = loader_facts(loader)
        for group, (reference, old) in enumerate(self._loaders):
            if reference() is None and old == facts:
                self._loaders[group] = (weakref.ref(loader), facts)
                return group
        self._loaders.append((weakref.ref(loader), facts))
        self.probes.loaders[len(self._loaders) - 1] = facts
        self.probes.write_tables()
        return len(self._loaders) - 1


def loader_facts(loader: Any) -> dict[str, Any]:
    """Return what is known of a `DataLoader`: the keys of run.json's `loaders`."""
    from torch.utils.data import IterableDataset

    streams = isinstance(loader.dataset, IterableDataset)
    size = None
    if not streams:
        try:
            size = len(loader.dataset)
        except Exception:  # a dataset without a length, or one whose length fails: a fact less
            size = None
    return {
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
        "persistent": bool(loader.persistent_workers),
        "pin_memory": bool(loader.pin_memory),
        "batch_size": loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
        "dataset_size": size,
        "sampler": type(loader.sampler).__name__,
        "dataset": type(loader.dataset).__name__,
        "reason_untunable": "an IterableDataset: more workers would repeat its data" if streams else None,
    }
