"""Remedy: load batches in worker processes, more of them, further ahead, kept between epochs.

The loader is the user's own, and keeps its settings; only the iterator that it
is asked for is ours (`worker_iterators`), at each pass while that still pays. It
is left alone where more workers could change what the script computes: each
reason is named.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter_ns
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from headway.core.machine.interruptions import pass_on
from headway.data.guard.decisions import NOT_TRIED, Decisions, budget_of, too_dear_to_look_at
from headway.data.guard.files_read import FileStat
from headway.data.guard.outcome import OutcomeWriter, Withdrawal, impure, withdrawal_of
from headway.data.guard.process_state import Looks, listens
from headway.data.guard.trial import EXAMPLES, beside_seeding, keeps, start_method, unfit
from headway.data.guard.verification import Verification, looks_for, verification_of
from headway.data.loader.read_ahead import bound_to_the_loop, pass_restorer
from headway.data.remedies import WorkersParameters
from headway.data.workers.hand_over import not_started
from headway.data.workers.worker_iterators import IteratorSettings, ScriptWorkers, Waited
from headway.runtime.host.device import in_use
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy

WAITS = "the script waits for any of its child processes, which workers would be"


def workers(parameters: WorkersParameters, context: Context) -> Applied | RefusedRemedy:
    """Install the remedy.

    Whether a given loader takes it is decided when that loader is first read, and reported then. One whose dataset
    draws random numbers takes it only where the user allowed results that are equivalent, but not equal.
    """
    report = OutcomeWriter("data.workers", parameters, context)
    tuner = LoaderTuner(
        num_workers=parameters.num_workers,
        prefetch_factor=parameters.prefetch_factor,
        persistent_workers=parameters.persistent_workers,
        pin_memory=parameters.pin_memory,
        max_workers=parameters.num_workers if parameters.max_workers is None else parameters.max_workers,
        may_draw=context.allow == "result-equivalent",
        report=report,
        withdrawal=withdrawal_of(context, report),
        verification=verification_of(context),
        decisions=Decisions(budget_of(context)),
    )
    module = "torch.utils.data.dataloader"
    context.patch(f"{module}:DataLoader.__iter__", tuner.around_iter, restoring=pass_restorer)
    context.patch(f"{module}:DataLoader._get_iterator", tuner.around_get_iterator, restoring=pass_restorer)
    for name in ("wait", "wait3", "waitpid", "wait4", "waitid"):
        context.patch(f"os:{name}", tuner.around_wait)
    context.undos.append(tuner.release)
    return Applied("data.workers", parameters.to_json())


def untunable(loader: DataLoader[Any], batches_ahead: int = 0, *, may_draw: bool = False) -> str | None:
    """Say why this loader must keep its settings, or None; `batches_ahead` will lie in shared memory at a time.

    `may_draw`: its dataset may draw random numbers, and will draw others in workers.
    """
    if torch.multiprocessing.current_process().daemon:
        return "this process is a daemon, which may have no children"
    if loader.num_workers == 0 and (method := start_method(loader)) != "fork":
        return f"its workers would start by {method}, which not every script allows"
    reason = bound_to_the_loop(loader)
    if reason is not None:
        return reason
    starts = loader.num_workers == 0 and loader.worker_init_fn is not None
    if starts and (finding := beside_seeding(loader)):
        return f"its worker_init_fn has never run, and would with workers: {finding}"
    if loader.num_workers == 0 and _hears_of_children():
        return "the script has the end of its child processes signalled in its own way, which workers would be"
    if loader.num_workers == 0 and loader.timeout:
        return "it has a timeout, which torch refuses without workers of its own"
    # Its seeds need not be those of torch, which differ from worker to worker: so it may draw nothing.
    finding, tried_bytes = unfit(loader, may_draw=may_draw and not starts, starts=starts)
    if finding:
        return impure(finding, loader.dataset)
    needed = 2 * batches_ahead * tried_bytes * max(1, (loader.batch_size or 1) // EXAMPLES)
    return None if needed <= shared_memory_bytes() else f"/dev/shm has no room for {needed} bytes of batches"


def _hears_of_children() -> bool:
    """Tell whether SIGCHLD has a handler that is not torch's, or is ignored: then nobody could wait for a worker."""
    handler = signal.getsignal(signal.SIGCHLD)
    of_torch = getattr(handler, "__module__", "") == signal_handling.__name__
    return handler not in (signal.SIG_DFL, None) and not of_torch


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
    looks: Looks
    """When it is looked whether the script has changed what batches are read from."""
    keeps: bool = True
    """Whether its workers may stay for the next pass."""
    batch_ns: float = 0.0
    """Time per batch of the epoch before, 0 while there was none."""
    settled: bool = False
    """Whether the search for a better number of workers is over."""
    waited: Waited = field(default_factory=Waited)
    """How long training has waited in the last pass."""
    kept: ScriptWorkers | None = None
    """The iterator whose workers the next pass may have."""
    is_read: bool = False
    """Whether this process has read the first examples."""
    opened: tuple[str, ...] = ()
    """Files that the first reading of a worker goes by: with one of them changed, other workers start."""


@dataclass(slots=True)
class LoaderTuner:
    """Makes and re-tunes the iterators of loaders. One per rank."""

    num_workers: int
    """Workers to begin with."""
    prefetch_factor: int
    """Batches in flight per worker."""
    persistent_workers: bool
    """Whether to keep workers between epochs."""
    pin_memory: bool
    """Whether to stage batches in pinned memory, once the script uses a device."""
    max_workers: int
    """Where the search for a better number ends."""
    may_draw: bool
    """Whether datasets that draw random numbers may be read by workers, which draw others."""
    report: OutcomeWriter
    """Called when something about a loader was decided."""
    withdrawal: Withdrawal
    """Whether steps are slower than recorded, and loaders are to be left alone."""
    verification: Verification | None = None
    """Compares batches with the script's own; None where nobody asked for it."""
    decisions: Decisions = field(default_factory=Decisions)
    """What was tried, by the facts of loaders."""
    tunings: WeakKeyDictionary[DataLoader[Any], _Tuning | None] = field(default_factory=WeakKeyDictionary)
    """Loader -> its tuning, None when it is left alone."""
    iterators: WeakSet[ScriptWorkers] = field(default_factory=WeakSet)
    """Iterators made."""
    asked: DataLoader[Any] | None = None
    """The loader whose next iterator is to be one of ours."""
    pid: int = field(default_factory=os.getpid)
    """The process whose loaders these are: a fork of it reads by itself."""

    def __post_init__(self) -> None:
        self.withdrawal.leave = self._leave_all

    def around_iter(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `DataLoader.__iter__`: make an iterator of ours for the loaders that take the remedy."""

        def __iter__(loader: DataLoader[Any]) -> Any:  # noqa: N807 - it stands in for the method of that name
            with self.withdrawal.making():
                return made(loader)

        def made(loader: DataLoader[Any]) -> Any:
            is_off = self.withdrawal.is_off or self.pid != os.getpid() or (not loader.num_workers and listens())
            tuning = None if is_off else self._before_iterator(loader)
            if tuning is None:
                return original(loader)
            self.withdrawal.has_remedy = True
            if self.verification is None:
                return ours(loader)
            return self.verification.following(
                loader, lambda: ours(loader), self.report, self._leave, own_workers=loader.num_workers,
                may_draw=self.may_draw,
            )  # fmt: skip

        def ours(loader: DataLoader[Any]) -> Any:
            """Have torch, and the probes around it, ask `_get_iterator` for the iterator, as ever."""
            self.asked = loader
            try:
                return original(loader)
            finally:
                self.asked = None

        return __iter__

    def around_get_iterator(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `DataLoader._get_iterator`: give an `iter(loader)` that takes the remedy an iterator of ours."""

        def _get_iterator(loader: DataLoader[Any]) -> Any:
            tuning = self.tunings.get(loader) if self.asked is loader else None
            self.asked = None
            return original(loader) if tuning is None else started(loader, tuning)

        def started(loader: DataLoader[Any], tuning: _Tuning) -> Any:
            """Return an iterator of ours; where it cannot be started, for want of processes, the script's own."""
            restore = pass_restorer(loader)
            try:
                return self._iterator(loader, tuning)
            except Exception as failure:
                pass_on(failure)
                restore()
                self._leaving(loader)(not_started("workers", failure))
                return original(loader)

        return _get_iterator

    def around_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of `os` that waits for child processes: for any of them, it must not find ours."""

        def wait(*arguments: Any, **named: Any) -> Any:
            # What `wait3` takes are options.
            is_one = (
                original.__name__ != "wait3"
                and bool(arguments)
                and (arguments[0] > 0 if original.__name__ != "waitid" else arguments[0] != os.P_ALL)
            )
            if not is_one and self.pid == os.getpid():
                self._give_up(WAITS)
            return original(*arguments, **named)

        return wait

    def _give_up(self, reason: str) -> None:
        """End all workers; what is under way is read in this process, as are all later passes."""
        for loader, tuning in list(self.tunings.items()):
            if tuning is not None and not loader.num_workers:
                self._leaving(loader)(reason)
                tuning.kept = None
        for iterator in list(self.iterators):
            iterator.leave(reason)

    def release(self) -> None:
        """Let iterators that go on when the remedy is undone read their samplers as torch does, and end the others."""
        for iterator in list(self.iterators):
            iterator.release()
        for tuning in self.tunings.values():
            if tuning is not None:
                tuning.kept = None

    def _iterator(self, loader: DataLoader[Any], tuning: _Tuning) -> ScriptWorkers:
        """Return the iterator of the next pass: the one that was kept, where it would make the same of it."""
        if loader.num_workers and loader.persistent_workers:  # torch keeps it, and draws no seed for a later pass
            return self._made(loader, tuning)
        iterator, tuning.kept = tuning.kept, None
        if iterator is not None and iterator.suits(loader):
            iterator.begin(loader)
        else:
            iterator = self._made(loader, tuning)
        tuning.waited = iterator.waited
        return iterator

    def _made(self, loader: DataLoader[Any], tuning: _Tuning) -> ScriptWorkers:
        settings = IteratorSettings(
            num_workers=tuning.num_workers,
            prefetch_factor=max(self.prefetch_factor, loader.prefetch_factor or 2),
            keep=(self.persistent_workers and tuning.keeps) or loader.persistent_workers,
            pin_memory=loader.pin_memory or (self.pin_memory and in_use()),
            may_draw=self.may_draw,
            opened=tuning.opened,
        )
        reads_first = not loader.num_workers and not tuning.is_read
        iterator = ScriptWorkers(
            loader,
            settings,
            partial(self._ended, ref(loader)),
            self._leaving(loader),
            tuning.looks,
            reads_first=reads_first,
        )
        tuning.is_read = True
        self.iterators.add(iterator)
        return iterator

    def _ended(self, loader: ref[DataLoader[Any]], iterator: ScriptWorkers) -> None:
        """Keep the workers of a pass that was read to its end."""
        found = loader()
        tuning = None if found is None else self.tunings.get(found)
        if tuning is not None and self.persistent_workers and tuning.keeps and not iterator.is_torchs:
            tuning.kept = iterator

    def _leaving(self, loader: DataLoader[Any]) -> Callable[[str], None]:
        """Return what leaves a loader to itself from the next pass on, for a reason why workers could not go on.

        Where the script keeps nothing but the iterator, the loader is gone by then.
        """
        known, names = ref(loader), self.report.names(loader)

        def leave(reason: str) -> None:
            found = known()
            if found is not None:
                self.tunings[found] = None
            self.report({**names, "reason_not_applied": reason, "had_it": True})

        return leave

    def _before_iterator(self, loader: DataLoader[Any]) -> _Tuning | None:
        """Decide on a loader the first time, re-tune it the next times; return its tuning, None = it is left alone.

        A failure leaves it alone.
        """
        try:
            if loader not in self.tunings:
                self._decide(loader)
            elif (tuning := self.tunings[loader]) is not None:
                self._retune(loader, tuning)
            return self.tunings.get(loader)
        except Exception as failure:
            pass_on(failure)
            self.report({"reason_not_applied": f"{type(failure).__name__}: {failure}"})
            return None

    def _leave_all(self) -> bool:
        """Leave all loaders to themselves, say whether in the middle of passes; they may be decided on anew."""
        for loader, tuning in list(self.tunings.items()):
            if tuning is not None:
                self._leave(loader, "")
                del self.tunings[loader]
        aside = [iterator.step_aside() for iterator in list(self.iterators)]
        return all(aside)

    def _leave(self, loader: DataLoader[Any], reason: str) -> None:
        """Leave a loader to itself from the next pass on."""
        if isinstance(loader._iterator, ScriptWorkers):
            loader._iterator = None
        self.tunings[loader] = None

    def _decide(self, loader: DataLoader[Any]) -> None:
        """Apply the plan to a loader not seen before, or leave it alone and say why."""
        facts = {**self.report.names(loader), "before": loader.num_workers}
        ahead = self.max_workers * self.prefetch_factor
        torchs = loader.num_workers > 0 and loader.persistent_workers
        fresh = loader.num_workers > 0 and not torchs  # the script's own workers begin each pass with nothing read
        only_kept = fresh and self.persistent_workers and self.max_workers <= loader.num_workers
        reason = bound_to_the_loop(loader) or too_dear_to_look_at((loader.dataset, loader.collate_fn), self.decisions)
        if reason is None and not only_kept:
            reason = self.decisions.result(loader, lambda: untunable(loader, ahead, may_draw=self.may_draw))
        ended: str | None = None
        opened: Mapping[str, FileStat] = {}
        if reason is None and fresh and self.persistent_workers:
            ended, opened = self.decisions.keeping(loader, lambda: keeps(loader, may_draw=self.may_draw))
        if only_kept and reason is None:
            reason = ended  # there is nothing to change but that they stay
        if reason != NOT_TRIED:  # else a later pass may try
            self.tunings[loader] = None
        if reason is not None:
            self.report({**facts, "reason_not_applied": reason})
            return
        # More workers than batches would start, and have nothing to do.
        count = max(loader.num_workers, min(self.num_workers, len(loader)))
        settled = torchs or self.max_workers <= count
        looks = looks_for(self.verification)
        self.tunings[loader] = _Tuning(count, looks, ended is None, settled=settled, opened=tuple(opened))
        self.report({**facts, "num_workers": count, **({"reason_not_kept": ended} if ended else {})})

    def _retune(self, loader: DataLoader[Any], tuning: _Tuning) -> None:
        """Between epochs: while training still waits, try twice the workers; keep them only if batches came faster."""
        waited = tuning.waited
        elapsed_ns = perf_counter_ns() - waited.started_ns
        if tuning.settled or not waited.num_batches:
            return
        batch_ns = elapsed_ns / waited.num_batches
        if tuning.batch_ns and batch_ns > 0.95 * tuning.batch_ns:
            count, tuning.settled = max(1, tuning.num_workers // 2), True
        elif waited.wait_ns < 0.05 * elapsed_ns:
            tuning.settled = True
            return
        else:
            count = max(tuning.num_workers, min(self.max_workers, 2 * tuning.num_workers, len(loader)))
            tuning.settled = count == tuning.num_workers
        tuning.batch_ns = batch_ns
        if count == tuning.num_workers:
            return
        tuning.num_workers, tuning.kept = count, None  # the kept workers end here; the next iterator starts `count`
        self.report({**self.report.names(loader), "num_workers": count, "retuned": True})
