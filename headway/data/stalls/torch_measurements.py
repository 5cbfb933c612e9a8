"""DS-Analyzer's three phases, measured inside a rank: the input cold, cached, and not needed at all.

Each phase is a run of the same script over the same number of steps, changed
by one measurement of `catalog.MEASUREMENTS`:

- cold: the page cache of every file that the dataset opens is dropped first,
  once per pass over the data (`posix_fadvise`, per file, no root);
- warm: the batches to come are read once before the first of them is handed
  out, then again and timed: raw data come from memory, examples are made anew;
- synthetic: each loader hands out its first batch again and again, on the
  device once the script has moved it there.

A phase ends with SystemExit(0) out of optimizer step number `steps`, the same
on all ranks, so that the script's own clean-up runs. What was measured is in
RUN/phase/r<rank>-<pid>.json. What headway itself does in the training thread
(filling, dropping) is taken out of the step times. Times are seconds.

What a phase cannot do: files that C code opens and closes within one example,
and pages that some process has mapped, stay cached; a source that waits by
itself (a sleep, a network) is as slow warm as cold; a stream that goes on
where it stopped is not read a second time.

>>> watch = Stopwatch("warm", steps=3, warmup=1, write=lambda result: None)
>>> [watch.stepped(0), watch.stepped(1), watch.stepped(0), len(watch.step_s)]
[1, 1, 1, 2]
"""

from __future__ import annotations

import atexit
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader

from headway.data.bytes.account import usage
from headway.data.remedies import PhaseParameters
from headway.data.stalls.torch_resident import ColdFiles, ResidentLoaders, group_of
from headway.runtime.host.device import synchronize
from headway.runtime.in_rank.remedy import Applied, Context
from headway.runtime.recorder.probes import write_json

FOLDER = "phase"
"""Folder of a run folder that receives the measurements."""

_LOADER = "torch.utils.data.dataloader:"
_FETCH = "torch.utils.data._utils.fetch:"


def cold(parameters: PhaseParameters, context: Context) -> Applied:
    """Measure with a cold page cache."""
    watch = Stopwatch.begin("cold", parameters, context)
    files = ColdFiles(context.run, context.probes.fetching, watch.paused)
    watch.facts |= {"files_dropped": files.num_dropped, "dropping_s": files.dropping_s}
    sys.addaudithook(files.opened)
    context.patch(_FETCH + "_BaseDatasetFetcher.__init__", files.around_fetcher)
    for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        context.patch(f"{_FETCH}{name}.fetch", files.around_fetch)
    context.patch(_LOADER + "DataLoader.__iter__", watch.around_iter)
    context.patch(_LOADER + "_BaseDataLoaderIter.__next__", watch.around_next)
    return Applied("measure.cold", parameters.to_json())


def warm(parameters: PhaseParameters, context: Context) -> Applied:
    """Measure with raw data in memory."""
    watch = Stopwatch.begin("warm", parameters, context)
    filling = Filling(watch, {int(group): count for group, count in parameters.batches.items()})
    context.patch(_LOADER + "_BaseDataLoaderIter._next_index", filling.around_next_index)
    context.patch(_LOADER + "DataLoader.__iter__", filling.around_iter)
    context.patch(_LOADER + "DataLoader.__iter__", watch.around_iter)
    context.patch(_LOADER + "_BaseDataLoaderIter.__next__", watch.around_next)
    return Applied("measure.warm", parameters.to_json())


def synthetic(parameters: PhaseParameters, context: Context) -> Applied:
    """Measure with batches that are there already."""
    watch = Stopwatch.begin("synthetic", parameters, context)
    lengths = {int(group): count for group, count in parameters.epoch_batches.items()}
    loaders = ResidentLoaders(lengths, watch.paused, watch.handed)
    context.patch(_LOADER + "DataLoader.__iter__", loaders.around_iter)
    context.patch(_LOADER + "DataLoader.__iter__", watch.around_iter)
    context.patch("torch._tensor:Tensor.to", loaders.around_move)
    context.patch("torch._tensor:Tensor.cuda", loaders.around_move)
    return Applied("measure.synthetic", parameters.to_json())


@dataclass(slots=True)
class Stopwatch:
    """Times the steps of one rank, and ends the script after the last of them."""

    phase: str
    """'cold', 'warm' or 'synthetic'."""

    steps: int
    """Steps to take."""

    warmup: int
    """First steps, which do not count. The device is waited for at their end and at the end of all."""

    write: Callable[[Mapping[str, Any]], None]
    """Takes the result: when all steps are done, or when the script ends before."""

    facts: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """More for the result: key -> function that returns the value."""

    step_s: list[float] = field(default_factory=list)
    """[steps so far] Seconds of each step; the first one begins when the first iterator is there."""

    batches: Counter[int] = field(default_factory=Counter)
    """Group of a loader -> batches that it handed out."""

    epoch_batches: dict[int, int] = field(default_factory=dict)
    """Group of a loader -> batches of one whole pass, as far as known."""

    used: list[dict[str, float]] = field(default_factory=list)
    """What the rank and its workers had used at the end of the warm-up, and at the end."""

    counts: Counter[int] = field(default_factory=Counter)
    """Optimizer -> its steps."""

    pauses: int = 0
    """Blocks of `paused` that are open."""

    paused_ns: int = 0
    """Time spent in such blocks."""

    last_ns: int = field(default_factory=perf_counter_ns)
    """End of the step before, less `paused_ns`."""

    @classmethod
    def begin(cls, phase: str, parameters: PhaseParameters, context: Context) -> Stopwatch:
        """Make the stopwatch of this process, and let it hear of optimizer steps."""
        owner, probes = os.getpid(), context.probes

        def write(result: Mapping[str, Any]) -> None:
            """Write the result of a rank; a forked child inherits the stopwatch, and has none of its own."""
            if os.getpid() == owner and probes.leads:
                write_json(f"{context.run}/{FOLDER}/r{context.rank}-{owner}.json", result)

        watch = cls(phase, parameters.steps, parameters.warmup, write)
        context.listen(watch.stepped)
        atexit.register(watch.finish)
        return watch

    def stepped(self, optimizer: int) -> int:
        """Note the end of a step: the first optimizer to step once more than any before ends it; see `Context.listen`.

        Raises `SystemExit` at the end of the last step, and at whatever steps the script still takes after that.
        """
        self.counts[optimizer] += 1
        if self.counts[optimizer] <= len(self.step_s):
            return 1
        if len(self.step_s) + 1 in (self.warmup, self.steps):
            synchronize()
        end_ns = perf_counter_ns() - self.paused_ns
        self.step_s.append((end_ns - self.last_ns) / 1e9)
        self.last_ns = end_ns
        if len(self.step_s) in (self.warmup, self.steps):
            with self.paused():
                self.used.append(usage())
        if len(self.step_s) >= self.steps:
            self.finish()
            raise SystemExit(0)
        return 1

    def finish(self) -> None:
        """Write the result."""
        self.write({
            "phase": self.phase,
            "complete": len(self.step_s) >= self.steps,
            "step_s": self.step_s,
            "batches": dict(self.batches),
            "epoch_batches": self.epoch_batches,
            "used": self.used,
            **{key: value() for key, value in self.facts.items()},
        })  # fmt: skip

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave a block of the training thread out of the step times."""
        start_ns = perf_counter_ns()
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1
            if not self.pauses:
                self.paused_ns += perf_counter_ns() - start_ns

    def handed(self, group: int) -> None:
        """Count a batch that the script received."""
        if not self.pauses:
            self.batches[group] += 1

    def around_iter(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `DataLoader.__iter__`: the length of a pass if the loader knows it, and when the first step begins."""

        def __iter__(loader: DataLoader[Any]) -> Any:  # noqa: N807 - it stands in for the method of that name
            iterator = original(loader)
            group = group_of(iterator)
            if group not in self.batches:
                self.batches[group] = 0
                with suppress(TypeError, NotImplementedError):  # the length of a stream is known at its end, if ever
                    self.epoch_batches[group] = len(loader)
            if not self.step_s:
                self.last_ns = perf_counter_ns() - self.paused_ns
            return iterator

        return __iter__

    def around_next(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `__next__` of loaders' iterators: batches handed out, and the length of a pass that ended."""

        def __next__(iterator: Any) -> Any:  # noqa: N807 - it stands in for the method of that name
            try:
                batch = original(iterator)
            except StopIteration:
                self.epoch_batches[group_of(iterator)] = iterator._num_yielded
                raise
            self.handed(group_of(iterator))
            return batch

        return __next__


@dataclass(slots=True)
class _Order:
    """Batches of indices that one iterator was given."""

    recorded: list[Any] = field(default_factory=list)
    replayed: Iterator[Any] | None = None
    """Recorded batches to give out instead of the sampler's; None = record."""


@dataclass(slots=True)
class Filling:
    """Reads what a loader is about to hand out, so that its raw data are in memory; then has it read the same again."""

    watch: Stopwatch
    """Leaves the filling out of the step times."""

    batches: dict[int, int]
    """Group of a loader -> batches to read."""

    filled: set[int] = field(default_factory=set)
    """Groups that were filled."""

    orders: WeakKeyDictionary[Any, _Order] = field(default_factory=WeakKeyDictionary)
    """Iterator -> its order, while that matters."""

    creating: _Order | None = None
    """The order of the iterator that is being made: workers ask for indices before there is an object."""

    def around_next_index(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `_next_index`: record, or replace what the sampler says; it goes on, so a pass keeps its length."""

        def _next_index(iterator: Any) -> Any:
            index = original(iterator)
            order = self.creating or self.orders.get(iterator)
            if order is None:
                return index
            if order.replayed is not None:
                return next(order.replayed, index)
            order.recorded.append(index)
            return index

        return _next_index

    def around_iter(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `DataLoader.__iter__`: at the first one, read ahead, let go, and begin again."""

        def make(loader: DataLoader[Any], order: _Order) -> Any:
            before, self.creating = self.creating, order
            try:
                return original(loader)
            finally:
                self.creating = before

        def __iter__(loader: DataLoader[Any]) -> Any:  # noqa: N807 - it stands in for the method of that name
            with self.watch.paused():
                order = _Order()
                iterator = make(loader, order)
                group = group_of(iterator)
                if group in self.filled:
                    self.orders.pop(iterator, None)
                    return iterator
                self.filled.add(group)
                self.orders[iterator] = order
                _read(iterator, self.batches.get(group, 0))
                del iterator  # ends workers that are not kept; kept ones start the pass again
                again = _Order(replayed=iter(order.recorded))
                iterator = make(loader, again)
                self.orders[iterator] = again
                return iterator

        return __iter__


def _read(iterator: Any, count: int) -> None:
    """Read up to `count` batches and drop them."""
    for _ in range(count):
        try:
            next(iterator)
        except StopIteration:
            return
