"""Probes of the input pipeline: waiting in `next(loader)`, and the work behind it wherever it runs.

The wait is recorded on the training thread. The work (`input.load`) is recorded where the dataset runs: in the main
process or in a loader worker, each in its own ring, per batch and never per example. Blocked time is wall - thread CPU
- run delay; the run delay is field 2 of /proc/thread-self/schedstat. In the main process CPU time is read for every
load that follows one longer than 1 ms, otherwise for every 16th of the first 256 and every 64th behind them: what a
measured load costs more is 0.2 ms where training has emptied the caches. Around the first few loads of each loader the
states of random number generators are compared: a plan has to know whether examples are drawn.
"""

from __future__ import annotations

import _thread
import functools
import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from headway.core.machine.interruptions import pass_on, suppress_own
from headway.runtime.recorder import rehearsals
from headway.runtime.recorder.probes import Probes, now, write_json
from headway.runtime.recorder.rereading import FirstLoad, Rereadings, begin_alike
from headway.runtime.script.batches import batch_bytes, checksum
from headway.runtime.script.draws import drawn, fingerprints, own_generators, prove_layout, sampler_of, steered
from headway.runtime.script.gap_stacks import calling_library, calling_line
from headway.runtime.script.run_delay import open_schedstat, read_delay
from headway.trace.events.vocabulary import SPANS, UNASKED
from headway.trace.rings.ring import LOADER

NEXT, ITER, LOAD = SPANS["input.next"].code, SPANS["input.iter"].code, SPANS["input.load"].code
PARTS, WORKER = SPANS["input.parts"].code, SPANS["input.worker"].code

LONG_LOAD_NS = 1_000_000
"""A load longer than this pays for reading CPU time, some 0.05 ms between two steps of training, at every batch."""

EVERY, EARLY, LATER = 16, 256, 64
"""Among shorter loads of the main process one in `EVERY` is measured, behind the first `EARLY` one in `LATER`."""

MOST_RNG_PROBES = 4
"""Loads of each loader around which generators are looked at, in each process that loads for it: 0.1 ms each."""

UNKNOWN = (-1, -1)
"""Group and iterator of an iterator that did not come from `iter(loader)`."""

cpu_now = time.thread_time_ns


def loader_init(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `DataLoader.__init__`: where the script constructs the loader, or which library does.

    Lightning and Accelerate construct a loader of their own in the place of the script's, over the same dataset: that
    one is where the script's was.
    """
    by_dataset: dict[int, tuple[Callable[[Any], bool], dict[str, str]]] = {}

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # the name it has in torch
        """Construct the loader, and note where."""
        original(self, *args, **kwargs)
        try:
            frame = sys._getframe(1)
            found = {"constructed": calling_line(frame), "library": calling_library(frame)}
            is_known, earlier = by_dataset.get(id(self.dataset), (lambda _: False, found))
            if found["library"] and is_known(self.dataset):
                found = earlier
            by_dataset[id(self.dataset)] = (_recognised(self.dataset), found)
            probes.constructed[self] = found  # not an attribute: a copy or pickle of the loader is the script's alone
        except Exception as cause:
            probes.failed("DataLoader.__init__", cause)

    return __init__


def loader_iter(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `DataLoader.__iter__`: creation of an iterator, its workers' processes included."""
    emit, groups, iterators = probes.emit, LoaderGroups(probes), 0

    @functools.wraps(original)
    def __iter__(self: Any) -> Any:  # noqa: N807  # the name it has in torch
        """Make the iterator and record how long that took."""
        nonlocal iterators
        group, outer = opened(self), probes.opening[0]
        start = now()
        try:
            probes.opening[0] = group  # workers that are forked now inherit it: so they know whom they load for
            result = original(self)
        finally:
            probes.opening[0] = outer
        try:
            duration, corr = now() - start, iterators
            iterators += 1
            result.headway_ids = (group, corr)
            result.headway_worker = -1
            workers = getattr(result, "_workers", ())
            streams = len(workers) > 1 and probes.loaders.get(group, {}).get("repeats", True) is None
            result.headway_firsts = {} if streams else None
            emit(ITER, start, duration, group, corr, len(workers))
            for worker, process in enumerate(workers):
                emit(WORKER, start + duration, 0, group, corr, worker, process.pid)
        except Exception as cause:
            probes.failed("DataLoader.__iter__", cause)
        return result

    def opened(loader: Any) -> int:
        try:
            begun, group = now(), groups.of(loader)
            if probes.rereadings is None and probes.leads:
                probes.rereadings = Rereadings(probes)
                prove_layout()  # once (4 ms), and not in each worker again
            if loader.num_workers and probes.rereadings is not None:
                probes.rereadings.keep(group, loader.dataset, loader.collate_fn, None)
            if probes.leads:
                probes.begins_pass(begun)
        except Exception as cause:
            probes.failed("loader facts", cause)
            return -1
        return group

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
    emit, uses = probes.emit, probes.gradients.uses

    @functools.wraps(original)
    def __next__(self: Any) -> Any:  # noqa: N807  # the name it has in torch
        """Get the batch and record the wait; the last call, which ends the epoch, has seq = -1."""
        start = now()
        try:
            batch = original(self)
        except StopIteration:
            record(self, start, now() - start, ended=True)
            raise
        duration = now() - start
        try:
            group, corr = self.headway_ids
            emit(NEXT, start, duration, group, self._num_yielded - 1, self.headway_worker, corr)
            if uses.on[0]:
                uses.took(batch)
        except Exception as cause:
            pass_on(cause)
            record(self, start, duration, ended=False)
        if getattr(self, "headway_firsts", None) is not None:
            compare_firsts(self, batch)
        return batch

    def compare_firsts(self: Any, batch: object) -> None:
        """Note, once it is known, whether the workers of this iterator begin with the same examples."""
        try:
            repeats = begin_alike(self.headway_firsts, self.headway_worker, len(self._workers), batch)
            if repeats is not None:
                self.headway_firsts, probes.loaders[self.headway_ids[0]]["repeats"] = None, repeats
                probes.write_tables_beside()
        except Exception as cause:
            self.headway_firsts = None
            probes.failed("the first batches of workers", cause)

    def record(self: Any, start: int, duration: int, *, ended: bool) -> None:
        """The same with what is known, for an iterator that did not come from `iter(loader)`, and at its end."""
        try:
            (group, corr), worker = getattr(self, "headway_ids", UNKNOWN), getattr(self, "headway_worker", -1)
            emit(NEXT, start, duration, group, -1 if ended else self._num_yielded - 1, -1 if ended else worker, corr)
            if ended and probes.rereadings is not None:
                probes.rereadings.ended(group)
        except Exception as cause:
            probes.failed("DataLoader.__next__", cause)

    return __next__


def fetcher_init(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `_BaseDatasetFetcher.__init__`: give it a meter, which knows whose fetcher it is."""
    lives = 0
    pid = os.getpid()

    @functools.wraps(original)
    def initialise(self: Any, dataset: Any, auto_collation: Any, collate_fn: Any, drop_last: Any) -> None:
        """Initialise the fetcher, then note in which life of this process's dataset it is."""
        nonlocal lives, pid
        original(self, dataset, auto_collation, collate_fn, drop_last)
        try:
            if pid != os.getpid():
                pid, lives = os.getpid(), 0
            self.headway_meter = Meter(probes, lives)
            lives += 1
        except Exception as cause:
            probes.failed("fetcher", cause)

    return initialise


def fetch(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap the `fetch` of a fetcher: dataset and collate of one batch."""
    emit, fetching, ident = probes.emit, probes.fetching, _thread.get_ident

    @functools.wraps(original)
    def fetch(self: Any, possibly_batched_index: Any) -> Any:
        """Fetch the batch and record it; at times its CPU time and its run delay too."""
        meter = self.__dict__.get("headway_meter")
        if meter is None:
            return original(self, possibly_batched_index)
        try:
            fetching[1], fetching[0] = meter.group, ident()
            if meter.due:
                return measured(self, possibly_batched_index, meter)
            begin = now()
            batch = original(self, possibly_batched_index)
            duration = now() - begin
        finally:
            fetching[0] = 0
        try:
            emit(LOAD, begin, duration, meter.life, meter.count, meter.worker, meter.bytes)
            meter.count = count = meter.count + 1
            meter.due = duration > LONG_LOAD_NS or not count % (EVERY if count < EARLY else LATER)
        except Exception as cause:
            probes.failed("input.load", cause)
        return batch

    def measured(self: Any, index: Any, meter: Meter) -> Any:
        """Fetch with a clock before the collate function, which is put back even when the dataset raises."""
        collate_fn = self.collate_fn
        try:
            kept = meter.first(self.dataset, collate_fn, index)
            self.collate_fn = meter.timed(collate_fn)
            meter.start(self.dataset, collate_fn)
            batch = original(self, index)
        finally:
            self.collate_fn = collate_fn
        meter.stop(batch)
        if kept is not None:
            meter.expect(kept, batch)
        return batch

    return fetch


class Meter:
    """Measures the loads of one fetcher; `due` says whether the next one is measured with CPU time and run delay."""

    __slots__ = ("_collate", "_cpu", "_delay", "_gc", "_probes", "_rng_probe", "_schedstat", "_start", "bytes",
                 "count", "due", "group", "life", "worker")  # fmt: skip

    def __init__(self, probes: Probes, life: int) -> None:
        from torch.utils.data import get_worker_info

        info, recorder = get_worker_info(), probes.recorder
        self._probes = probes
        if info is not None:
            recorder.set_worker(info.id)
        # A remedy's worker shows the script no worker information; it has said so itself.
        self.worker = recorder.worker if recorder.role == LOADER else -1
        self.life = life if self.worker >= 0 else -1
        """In a worker: n-th life of its dataset. In the main process: -1, the enclosing input.next says the loader."""
        self._schedstat = -1
        self.group = probes.opening[0]
        """Group of the loader; -1 when it is not known, as in workers that were not forked."""
        self._rng_probe: RngProbe | None = None
        self.count = self.bytes = 0
        self.due = True

    def timed(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return `collate_fn` with a reading of the CPU clock in front."""

        def collate(examples: Any) -> Any:
            self._collate = cpu_now()
            if self._rng_probe is not None:
                self._rng_probe.between()
            return collate_fn(examples)

        return collate

    def first(self, dataset: Any, collate_fn: Callable[[Any], Any], index: Any) -> FirstLoad | None:
        """Keep the first load of the main process, which is read again later; None for any other."""
        if self.count or self.worker >= 0 or self._probes.rereadings is None:
            return None
        try:
            kept: FirstLoad | None = self._probes.rereadings.keep(self.group, dataset, collate_fn, index)
            return kept
        except Exception as cause:
            self._probes.failed("input.again", cause)
            return None

    def expect(self, kept: FirstLoad, batch: Any) -> None:
        """Note what a later reading has to give; of a batch that nobody can look into, nothing."""
        try:
            kept.expected = checksum(batch)
        except Exception as cause:
            self._probes.failed("input.again", cause)
            kept.let_go()

    def start(self, *holders: Any) -> None:
        """Begin a measured load; `holders`, dataset and collate function, may have generators of their own."""
        self._rng_probe = None
        # Headway's loader seeds the generators for every example. Of several workers the first one reports.
        silent = self.worker > 0 or type(holders[0]).__module__.startswith("headway.data.")
        if self.group >= 0 and not silent and self._probes.num_rng_probes.get(self.group, 0) < MOST_RNG_PROBES:
            self._probe_generators(holders)
        self._collate, self._gc = -1, self._probes.garbage.so_far_ns()
        self._schedstat = open_schedstat()  # of the thread that loads this time
        self._delay = read_delay(self._schedstat)
        self._cpu = cpu_now()
        self._start = now()

    def stop(self, batch: Any) -> None:
        """End a measured load and write its two records."""
        try:
            begin, duration, cpu = self._start, now() - self._start, cpu_now()
            after = read_delay(self._schedstat)
            # The clocks are read one after the other: cut so that the parts never exceed the whole.
            spent = min(cpu - self._cpu, duration)
            delay = min(after - self._delay, duration - spent) if after >= 0 <= self._delay else -1
            collate = min(cpu - self._collate, spent) if self._collate >= 0 else 0
            garbage = min(self._probes.garbage.so_far_ns() - self._gc, spent)
            self.bytes = batch_bytes(batch)
            emit = self._probes.emit
            emit(LOAD, begin, duration, self.life, self.count, self.worker, self.bytes)
            emit(PARTS, begin, duration, spent, delay, collate, garbage)
            self.count += 1
            self.due = self.worker >= 0 or duration > LONG_LOAD_NS
            if self._rng_probe is not None:
                self.due = self._rng_probe.report(self._probes, self.group, self.worker) or self.due
        except Exception as cause:
            self._probes.failed("input.load", cause)

    def _probe_generators(self, holders: tuple[Any, ...]) -> None:
        """Note where the generators are before the load."""
        self._probes.num_rng_probes[self.group] = self._probes.num_rng_probes.get(self.group, 0) + 1
        try:
            self._rng_probe = RngProbe(holders)
        except Exception as cause:
            self._probes.failed("input.draws", cause)


class RngProbe:
    """Generators before the dataset is read, before its examples are collated, and afterwards."""

    def __init__(self, holders: tuple[Any, ...]) -> None:
        self._own = own_generators(*holders)
        self._before = fingerprints(self._own)
        self._between: dict[str, object] | None = None

    def between(self) -> None:
        """The examples have been read and are not collated yet."""
        self._between = fingerprints(self._own)

    def report(self, probes: Probes, group: int, worker: int) -> bool:
        """Add what was drawn to the loader's facts; returns whether the next load is to be looked at too.

        Of several workers the first one reports, in a file of its own: it cannot reach its rank's facts.
        """
        after = fingerprints(self._own)
        between = after if self._between is None else self._between
        facts = probes.loaders.setdefault(group, {})
        known = facts.get("draws") is not None
        told = False
        for key, names in (("draws", drawn(self._before, between)), ("collate_draws", drawn(between, after))):
            told = told or bool(set(names) - set(facts.get(key) or ()))
            facts[key] = sorted({*(facts.get(key) or ()), *names})
        if worker == 0 and probes.run and (told or not known):
            path = f"{probes.run}/loaders/r{probes.recorder.rank}-g{group}.json"
            if told or not os.path.exists(path):
                write_json(path, {group: {key: facts[key] for key in ("draws", "collate_draws")}})
        return probes.num_rng_probes[group] < MOST_RNG_PROBES


class LoaderGroups:
    """Gives each loader a small number, in order of first use: the same on all ranks that run the same script.

    A loader made anew for each epoch, with the same facts as one that is gone, keeps that one's number; how much data
    it has is no such fact.
    """

    def __init__(self, probes: Probes) -> None:
        self.probes = probes
        self._loaders: list[tuple[weakref.ref[Any], dict[str, Any]]] = []
        self._is_dataset: list[Callable[[Any], bool]] = []  # of each group: is this the dataset that was read last?

    def of(self, loader: Any) -> int:
        """Return the loader's group, and write its facts when it is new."""
        for group, (reference, old) in enumerate(self._loaders):
            if reference() is loader:
                self.probes.loaders[group]["persistent"] = old["persistent"]
                return group
        # Where it is iterated for the first time: a loader of a trainer's own has no line of the script that made it.
        place = self.probes.constructed.get(loader, {"constructed": "", "library": ""})
        facts = {**loader_facts(loader), "line": calling_line(sys._getframe(1)), **place}
        size = {key: facts[key] for key in ("dataset_size", "smallest_dataset")}  # a replay buffer grows
        for group, (reference, old) in enumerate(self._loaders):
            if reference() is None and {**old, **size} == facts:
                self._loaders[group] = (weakref.ref(loader), facts)
                self.probes.loaders[group]["loaders"] += 1
                self.probes.loaders[group]["persistent"] = False  # until this one is read again: the workers are new
                self._note_size(self.probes.loaders[group], facts["dataset_size"])
                if not self._is_dataset[group](loader.dataset):
                    self._is_dataset[group] = _recognised(loader.dataset)
                    self.probes.loaders[group]["datasets"] += 1
                return group
        self._loaders.append((weakref.ref(loader), dict(facts)))
        self._is_dataset.append(_recognised(loader.dataset))
        group = len(self._loaders) - 1
        self.probes.loaders[group] = facts
        self.probes.write_tables()
        try:
            rehearsals.begin(self.probes, group, loader)
        except Exception as cause:
            self.probes.failed("loader rehearsal", cause)
        return group

    @staticmethod
    def _note_size(known: dict[str, Any], size: int | None) -> None:
        """Widen the sizes in a loader's facts to that of its next dataset; one of unknown size makes them unknown."""
        if size is None or known["dataset_size"] is None:
            known["dataset_size"] = known["smallest_dataset"] = None
            return
        known["dataset_size"] = max(size, known["dataset_size"])
        known["smallest_dataset"] = min(size, known["smallest_dataset"])


def _recognised(thing: Any) -> Callable[[Any], bool]:
    """Return what says whether something is this very thing, without keeping it alive."""
    try:
        reference = weakref.ref(thing)
    except TypeError:  # a list: one that is made in its place later counts as the same
        number = id(thing)
        return lambda other: id(other) == number
    return lambda other: reference() is other


def loader_facts(loader: Any) -> dict[str, Any]:
    """Return what is known of a `DataLoader`: the keys of run.json's `loaders`."""
    from torch.utils.data import IterableDataset

    streams = isinstance(loader.dataset, IterableDataset)
    size = None
    with suppress_own():  # a dataset without a length, or one whose length fails: a fact less
        size = None if streams else len(loader.dataset)
    return {
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
        "persistent": bool(loader.persistent_workers),
        "pin_memory": bool(loader.pin_memory),
        "batch_size": loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
        "dataset_size": size,
        "smallest_dataset": size,
        "sampler": type(sampler_of(loader)).__name__,
        "dataset": type(loader.dataset).__name__,
        "datasets": 1,
        "loaders": 1,
        "streams": streams,
        "repeats": None if streams else False,
        "own": is_own(loader),
        "draws": None,
        "collate_draws": None,
        "changes": None,
        "changes_unchecked": "",
        "worker_init_fn": name_of(loader.worker_init_fn),
        "steered": None if streams else steered(loader),
        "reason_untunable": UNASKED if streams else None,
    }


def name_of(function: Any) -> str | None:
    """Return module:name of a function, of an object that is called the name of its class; None for None.

    What `functools.partial` wraps gives the name.

    >>> name_of(name_of)
    'headway.runtime.calls.probe_input:name_of'
    """
    if function is None:
        return None
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def is_own(loader: Any) -> bool:
    """Whether a loader is headway's: remedies leave it alone, its user has set what they would.

    >>> is_own(object())
    False
    """
    return any(base.__module__.startswith("headway.data.") for base in type(loader).__mro__)
