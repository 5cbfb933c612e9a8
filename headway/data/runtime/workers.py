"""Remedy: load batches in worker processes, more of them, further ahead, kept between epochs.

The loader is the user's own; only its settings change, at the moment an
iterator is asked for, and again at each later one while that still pays. It is
left alone where more workers could change what the script computes: each
reason is named.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.multiprocessing
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from headway.data.runtime.outcome import Report, reporter
from headway.data.runtime.purity import picture
from headway.data.runtime.trial import EXAMPLES, unfit
from headway.runtime.probe_input import is_own
from headway.runtime.remedy import Applied, Context, Refused

MOST_LOADERS = 64
"""A script that makes more loaders than this gets no workers for the rest: trying each of them costs a fork."""

SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""Samplers whose order depends on nothing that training changes, so that reading them ahead is safe."""


def workers(parameters: Mapping[str, Any], context: Context) -> Applied | Refused:
    """Install the remedy. Parameters: num_workers, prefetch_factor, persistent_workers, pin_memory, max_workers.

    Whether a given loader takes it is decided when that loader is first read, and reported then. One whose dataset
    draws random numbers takes it only where the user allowed results that are equivalent, but not equal.
    """
    tuner = LoaderTuner(
        num_workers=int(parameters.get("num_workers", 2)),
        prefetch_factor=int(parameters.get("prefetch_factor", 2)),
        persistent_workers=bool(parameters.get("persistent_workers", True)),
        pin_memory=bool(parameters.get("pin_memory", False)) and torch.cuda.is_available(),
        max_workers=int(parameters.get("max_workers", parameters.get("num_workers", 2))),
        may_draw=context.allow == "result-equivalent",
        report=reporter("data.workers", parameters, context),
    )
    module = "torch.utils.data.dataloader"
    context.patch(f"{module}:DataLoader.__iter__", tuner.around_iter)
    context.patch(f"{module}:_MultiProcessingDataLoaderIter._reset", tuner.around_reset)
    context.patch(f"{module}:_MultiProcessingDataLoaderIter._next_data", tuner.around_next)
    context.undos.append(tuner.release)
    return Applied("data.workers", dict(parameters))


def untunable(loader: DataLoader[Any], batches_ahead: int = 0, *, may_draw: bool = False) -> str | None:
    """Say why this loader must keep its settings, or None; `batches_ahead` will lie in shared memory at a time.

    `may_draw`: its dataset may draw random numbers, and will draw others in workers.
    """
    if torch.multiprocessing.current_process().daemon:
        return "this process is a daemon, which may have no children"
    context = loader.multiprocessing_context or torch.multiprocessing.get_context()
    if loader.num_workers == 0 and context.get_start_method() != "fork":
        return f"its workers would start by {context.get_start_method()}, which not every script allows"
    reason = bound_to_the_loop(loader)
    if reason is not None:
        return reason
    if loader.num_workers == 0 and loader.worker_init_fn is not None:
        return "its worker_init_fn has never run, and would with workers"
    finding, tried_bytes = unfit(loader, may_draw=may_draw)
    if finding:
        return f"its dataset is not pure: {finding}"
    needed = 2 * batches_ahead * tried_bytes * max(1, (loader.batch_size or 1) // EXAMPLES)
    return None if needed <= shared_memory_bytes() else f"/dev/shm has no room for {needed} bytes of batches"


def bound_to_the_loop(loader: DataLoader[Any]) -> str | None:
    """Say why the batches of this loader may not be read ahead of training, by whomever; None when they may."""
    if is_own(loader):
        return "it is headway's own loader: give it num_workers, workers and cache_bytes where the script makes it"
    if isinstance(loader.dataset, IterableDataset):
        return "its dataset is an IterableDataset: every worker would yield all of it"
    if type(loader.sampler) not in SAMPLERS or (
        loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
    ):
        return "its sampler is its own class: workers would read it ahead of training"
    sampler = loader.sampler
    if type(sampler) is RandomSampler and sampler.generator is not None and _draws_all_along(sampler):
        return "its sampler draws from the script's own generator all along, and would with workers sooner"
    return "its dataset is empty" if len(loader.dataset) == 0 else None  # type: ignore[arg-type]  # map-style here


def _draws_all_along(sampler: RandomSampler) -> bool:
    """Whether the sampler goes on drawing after its first index."""
    return sampler.replacement or sampler.num_samples > len(sampler.data_source)


def num_free(loader: DataLoader[Any]) -> int:
    """Return for how many batches the sampler may be asked at any time; for the rest, not before torch would ask.

    A sampler may draw once more at its end, which it meets with the last batch, or the one after that: where it draws
    from a generator of the script's own, and the loop breaks off before, nobody else may have it draw.
    """
    tells = getattr(loader.sampler, "generator", None) is not None
    return len(loader) - 1 if tells else len(loader) + 1


class Bounded:
    """The index sampler of a loader, which is asked for its last batch when the loader as it was made would ask."""

    def __init__(self, loader: DataLoader[Any], window: int) -> None:
        """Read `loader`, whose own workers (none: 0) would have `window` batches under way."""
        self._sampler, self._window, self.free = loader._index_sampler, window, num_free(loader)
        """Batches that it may be asked for at any time."""
        self._indices: Iterator[Any] = iter(())
        self._asked = self.begun = 0
        """Batches that it was asked for; batches that the loop has asked for."""
        self.owes = False
        """Whether a worker got none because it was too early."""

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Bounded:
        self._indices, self._asked, self.begun, self.owes = iter(self._sampler), 0, 0, False
        return self

    def __next__(self) -> Any:
        self.owes = self._asked >= max(self.free, self.begun + self._window)
        if self.owes:
            raise StopIteration
        self._asked += 1
        return next(self._indices)


class PassDraws:
    """The random numbers that the start of a pass draws, put off until its first batch is asked for.

    A loader without workers draws a seed when its iterator is made, and its sampler draws with the first batch; with
    workers both happen at once. A script that draws in between, or starts two loaders side by side, would tell.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Note where the generators are before the iterator is made."""
        self.loader = loader
        own = (loader.generator, getattr(loader.sampler, "generator", None))
        self._generators = [torch.default_generator, *(g for g in dict.fromkeys(own) if g is not None)]
        self._before, self._after = self._states(), self._states()

    def later(self) -> None:
        """Go back to where a loader without workers would be now: after the seed."""
        self._after = self._states()
        self.restore()
        torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
        self._before = self._states()

    def now(self) -> bool:
        """Go on to where the iterator was when it had been made; False when somebody has drawn since."""
        same = all(map(torch.equal, self._states(), self._before))
        if same:
            self._set(self._after)
        return same

    def restore(self) -> None:
        """Go back to where the generators were at first."""
        self._set(self._before)

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def shared_memory_bytes() -> int:
    """Return the free bytes of /dev/shm, through which workers hand over their batches; 0 where there is none."""
    try:
        facts = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return facts.f_bavail * facts.f_frsize


@dataclass(slots=True)
class _Tuning:
    """What is known of one loader that takes the remedy."""

    num_workers: int
    """Workers of the iterators made from now on."""
    persistent_is_ours: bool
    """Whether workers are kept between epochs only because of us."""
    wait_ns: int = 0
    """Time the training thread waited for batches since the iterator was made."""
    started_ns: int = 0
    """When that iterator was made."""
    batch_ns: float = 0.0
    """Time per batch of the epoch before, 0 while there was none."""
    num_batches: int = 0
    """Batches handed out since the iterator was made."""
    settled: bool = False
    """Whether the search for a better number of workers is over."""
    ended: bool = False
    """Whether that iterator has handed out all of its batches."""
    as_made: tuple[int, int | None, bool] = (0, None, False)
    """num_workers, prefetch_factor and pin_memory of the script."""
    seen: object = None
    """Picture of dataset and collate function when the present workers were started."""


@dataclass(slots=True)
class LoaderTuner:
    """Sets and re-tunes loaders. One per rank."""

    num_workers: int
    """Workers to begin with."""
    prefetch_factor: int
    """Batches in flight per worker."""
    persistent_workers: bool
    """Whether to keep workers between epochs once their number is settled."""
    pin_memory: bool
    """Whether to stage batches in pinned memory."""
    max_workers: int
    """Where the search for a better number ends."""
    may_draw: bool
    """Whether datasets that draw random numbers may be read by workers, which draw others."""
    report: Report
    """Called when something about a loader was decided."""
    num_tried: int = 0
    """Loaders decided on so far."""
    tunings: WeakKeyDictionary[DataLoader[Any], _Tuning | None] = field(default_factory=WeakKeyDictionary)
    """Loader -> its tuning, None when it is left alone."""
    iterators: WeakSet[Any] = field(default_factory=WeakSet)
    """Iterators whose samplers are bounded."""

    def around_iter(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `DataLoader.__iter__`: set the loader up before its iterator is made."""

        def __iter__(loader: DataLoader[Any]) -> Any:  # noqa: N807 - it stands in for the method of that name
            tuning = self._before_iterator(loader)
            if tuning is None or tuning.as_made[0]:
                return original(loader)
            draws = PassDraws(loader)
            iterator = original(loader)
            draws.later()
            iterator._headway_draws = draws
            return iterator

        return __iter__

    def around_reset(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap the reset of a kept iterator: draw the seed that a fresh iterator would have drawn.

        Without it the script's generator would be one draw behind from the second epoch on, and the order of
        the data would differ from that of the unchanged script.
        """

        def _reset(iterator: Any, loader: DataLoader[Any], first_iter: bool = False) -> None:
            tuning = self.tunings.get(loader)
            if tuning is not None and tuning.persistent_is_ours and not first_iter:
                drawn = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
                iterator._base_seed = int(drawn.item())
            if tuning is not None:
                iterator._headway_tuning = tuning
                made_workers, made_prefetch, _ = tuning.as_made
                iterator._index_sampler = Bounded(loader, made_workers * (made_prefetch or 2))
                self.iterators.add(iterator)
            original(iterator, loader, first_iter)

        return _reset

    def around_next(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `_next_data` of iterators with workers: add up how long training waits."""

        def _next_data(iterator: Any) -> Any:
            before_ns = perf_counter_ns()
            tuning = getattr(iterator, "_headway_tuning", None)
            draws = iterator.__dict__.pop("_headway_draws", None)
            if draws is not None and not draws.now():
                self._start_over(iterator, draws.loader)
            single = iterator.__dict__.get("_headway_single")
            if single is not None:
                return single._next_data()
            if tuning is not None:
                iterator._index_sampler.begun += 1
                if iterator._index_sampler.owes:
                    iterator._try_put_index()
            try:
                batch = original(iterator)
            except StopIteration:
                if tuning is not None:
                    tuning.ended = True
                raise
            if tuning is not None:
                tuning.wait_ns += perf_counter_ns() - before_ns
                tuning.num_batches += 1
            return batch

        return _next_data

    def release(self) -> None:
        """Let iterators that go on when the remedy is undone read their samplers as torch does."""
        for iterator in list(self.iterators):
            iterator._index_sampler.free = sys.maxsize
            if iterator._index_sampler.owes and not iterator._shutdown:
                iterator._try_put_index()

    def _before_iterator(self, loader: DataLoader[Any]) -> _Tuning | None:
        """Decide on a loader the first time, re-tune it the next times; return its tuning, None = it is left alone.

        A failure leaves its settings as they are.
        """
        try:
            if loader not in self.tunings:
                self._decide(loader)
            elif (tuning := self.tunings[loader]) is not None:
                self._retune(loader, tuning)
                self._renew(loader, tuning)
                tuning.wait_ns = tuning.num_batches = 0
                tuning.started_ns = perf_counter_ns()
            return self.tunings[loader]
        except Exception as failure:
            self.report({"reason_not_applied": f"{type(failure).__name__}: {failure}"})
            return None

    def _renew(self, loader: DataLoader[Any], tuning: _Tuning) -> None:
        """Let kept workers go where fresh ones would do something else.

        They hold the dataset as it was when they started; and a pass that has not ended may still be going on, which
        starting the next one on the same workers would cut off.
        """
        seen = picture((loader.dataset, loader.collate_fn))
        if tuning.persistent_is_ours and (seen != tuning.seen or not tuning.ended):
            loader._iterator = None
        tuning.seen, tuning.ended = seen, False

    def _start_over(self, iterator: Any, loader: DataLoader[Any]) -> None:
        """Let this pass, which has not handed out a batch, and all later ones run as the script made the loader.

        Without workers, the sampler would have drawn its order now, and not when the iterator was made.
        """
        tuning = self.tunings[loader]
        self.tunings[loader] = loader._iterator = None
        if tuning is not None:
            loader.num_workers, loader.prefetch_factor, loader.pin_memory = tuning.as_made
        object.__setattr__(loader, "persistent_workers", False)
        iterator._shutdown_workers()
        draws = PassDraws(loader)
        iterator._headway_single = loader._get_iterator()
        draws.restore()  # it draws a seed, as the iterator in its place has done
        reason = "the script draws random numbers between iter(loader) and the first batch"
        self.report({"dataset": type(loader.dataset).__name__, "reason_not_applied": reason})

    def _decide(self, loader: DataLoader[Any]) -> None:
        """Apply the plan to a loader not seen before, or leave it alone and say why."""
        facts = {"dataset": type(loader.dataset).__name__, "before": loader.num_workers}
        self.tunings[loader] = None
        self.num_tried += 1
        if self.num_tried > MOST_LOADERS:
            self.report({"reason_not_applied": f"the script makes more than {MOST_LOADERS} loaders"})
            return
        reason = untunable(loader, self.max_workers * self.prefetch_factor, may_draw=self.may_draw)
        if reason is not None:
            self.report({**facts, "reason_not_applied": reason})
            return
        # More workers than batches would start, and have nothing to do.
        count = max(loader.num_workers, min(self.num_workers, len(loader)))
        ours = self.persistent_workers and not loader.persistent_workers and count > 0
        tuning = _Tuning(count, ours, started_ns=perf_counter_ns(), settled=self.max_workers <= count)
        tuning.as_made = (loader.num_workers, loader.prefetch_factor, loader.pin_memory)
        tuning.seen = picture((loader.dataset, loader.collate_fn))
        self.tunings[loader] = tuning
        self._set(loader, count)
        self.report({**facts, "num_workers": count})

    def _set(self, loader: DataLoader[Any], count: int) -> None:
        """Write the settings; what the loader's own setter forbids after construction goes past it."""
        loader.num_workers = count
        if count:
            loader.prefetch_factor = max(self.prefetch_factor, loader.prefetch_factor or 2)
        loader.pin_memory = loader.pin_memory or self.pin_memory
        object.__setattr__(
            loader, "persistent_workers", loader.persistent_workers or (self.persistent_workers and count > 0)
        )

    def _retune(self, loader: DataLoader[Any], tuning: _Tuning) -> None:
        """Between epochs: while training still waits, try twice the workers; keep them only if batches came faster."""
        elapsed_ns = perf_counter_ns() - tuning.started_ns
        if tuning.settled or not tuning.num_batches:
            return
        batch_ns = elapsed_ns / tuning.num_batches
        if tuning.batch_ns and batch_ns > 0.95 * tuning.batch_ns:
            count, tuning.settled = max(1, tuning.num_workers // 2), True
        elif tuning.wait_ns < 0.05 * elapsed_ns:
            tuning.settled = True
            return
        else:
            count = min(self.max_workers, 2 * tuning.num_workers)
            tuning.settled = count == tuning.num_workers
        tuning.batch_ns = batch_ns
        if count == tuning.num_workers:
            return
        tuning.num_workers = count
        loader._iterator = None  # the kept workers end here; the next iterator starts `count` of them
        self._set(loader, count)
        self.report({"dataset": type(loader.dataset).__name__, "num_workers": count, "retuned": True})
