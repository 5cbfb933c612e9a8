"""Remedy: threads of the rank make the batches of an unmodified script's loader, in the same order, bit for bit.

The loader stays the script's own and torch's; only the iterator that it asks
for is ours (`threads.InThreads`), which follows the script's sampler and draws
from its generators what torch's iterator would have drawn, at the same
moments. A loader is left alone, and the reason named, unless a trial in a
forked child finds that its examples are pure, that two threads make the same
batch as torch does, and that they do not mostly wait for the interpreter lock.

`rehearse` asks what the remedies of the data room would say of a loader while it is recorded: then no plan proposes
more. The functions that decide are those that decide when a remedy is applied, so the two agree. Random draws that
workers make from the generators that torch seeds are left out here: recorded facts name them, and the user may allow
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from headway.core.machine.interruptions import pass_on
from headway.core.units import NS_PER_S
from headway.data.bytes import account
from headway.data.bytes.torch_examples import equal
from headway.data.bytes.torch_keyed import KeyedDataset, Keys
from headway.data.guard.cache_trial import uncacheable
from headway.data.guard.decisions import NOT_TRIED, Decisions, budget_of, look_s
from headway.data.guard.files_read import FILE, FileStat, changed, files_read, note_looks
from headway.data.guard.outcome import OfDataset, OutcomeWriter, Withdrawal, impure, withdrawal_of
from headway.data.guard.picture import BatchEntries, Picture, outside
from headway.data.guard.process_state import LISTENS, Looks, listens, modes, modes_of_threads
from headway.data.guard.trial import EXAMPLES, TriedBatch, in_child, run_delay_ns, unfit, waited_ns
from headway.data.guard.verification import Verification, looks_for, verification_of
from headway.data.guard.watch import VisibleError, listen, noting
from headway.data.loader.read_ahead import CHANGED, Indices, ScriptWalk, bound_to_the_loop, keys_of, pass_restorer
from headway.data.loader.threads import LOCK_WAIT, InThreads, Making, MapStyleWork, Task, ThreadPool
from headway.data.loader.views import View
from headway.data.loader.walks import lock_wait_fraction
from headway.data.remedies import ThreadsParameters
from headway.data.workers.apply import untunable
from headway.data.workers.hand_over import FORKED, AsWritten, InProcessTail, UnmadeError, failure, not_started
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy

SHARED = "it reads from {}, which threads would share: worker processes have one each"
"""Why a dataset that opens a file or a connection of its own, if only when it is first read, is left alone."""

FORGOTTEN = "reading it sets what its own workers, made anew for each pass, would forget"
SETS = "its first reading sets what threads would share; worker processes have one each"
"""Why a dataset that keeps something of a reading is left alone."""

VISIBLE = "reading a batch prints, logs, warns, changes files, or starts or asks another process"
"""Why a batch is made by the training thread."""


def threads(parameters: ThreadsParameters, context: Context) -> Applied | RefusedRemedy:
    """Install the remedy.

    Whether a given loader takes it is decided when that loader is first read, and reported then.
    """
    report = OutcomeWriter("data.threads", parameters, context)
    switch = LoaderSwitch(
        num_threads=parameters.num_workers,
        prefetch_factor=parameters.prefetch_factor,
        report=report,
        withdrawal=withdrawal_of(context, report),
        verification=verification_of(context),
        decisions=Decisions(budget_of(context)),
        blocked_datasets=frozenset(parameters.blocked_datasets),
    )
    context.patch(
        "torch.utils.data.dataloader:DataLoader._get_iterator", switch.around_get_iterator, restoring=pass_restorer
    )
    listen(context.patch)
    note_looks(context.patch)
    return Applied("data.threads", parameters.to_json())


class ScriptThreads(InThreads):
    """The iterator of a script's own loader."""

    walk: ScriptWalk  # type: ignore[assignment]  # of the same shape

    def __init__(
        self, loader: DataLoader[Any], num_threads: int, prefetch_factor: int, left: Callable[[str], None],
        looks: Looks,
    ) -> None:  # fmt: skip
        """`left` is called, with the reason, when a pass leaves the threads; `looks` are the loader's."""
        self._as_torch = loader.num_workers > 0
        self._read = (loader.dataset, loader.collate_fn)
        walk = Picture(self._read)
        self._seen, self._left, self._aligned = outside(self._read, walk), left, BatchEntries(loader.dataset, walk)
        del walk  # it keeps objects of the script's alive
        self._looks = looks
        looks.begin()
        self._entries: dict[int, list[object]] = {}
        """Identity of a batch in the making -> what it is read from in large containers."""
        self._single: Any = None
        self._loader = ref(loader)
        self._sizes = {"num_workers": num_threads, "prefetch_factor": prefetch_factor}
        super().__init__(self._view(loader), work_of(loader), None)
        self._read_ahead()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._seen, self._single = outside(self._read), None
        self._entries.clear()
        self._looks.begin()
        super()._reset(self._view(loader), first_iter)
        self._read_ahead()

    def __next__(self) -> Any:
        return _BaseDataLoaderIter.__next__(self)  # nothing of a walk of headway's own

    def _next_data(self) -> Any:
        if self._single is None:
            cause: Exception | None = None
            try:
                data = self._made_ahead()
            except StopIteration:
                raise
            except Exception as error:
                if error in self.walk.of_script or error in self.of_script:
                    raise
                cause = error
            if self._single is None:
                if cause is None:
                    return data
                self._leave(failure(cause))
        # Outside of the handler: the script's own exceptions have no context.
        return self._single._next_data()

    def _made_ahead(self) -> Any:
        """Return a batch that threads have made, or None where the pass has left them."""
        if not self._as_torch and (reason := self._reason_to_leave()):
            self._leave(reason)
            return None
        try:
            return super()._next_data()
        except StopIteration:
            if not (self._as_torch or self._looks.are_alike_now(self._read, self._is_as_read)):
                self._left(self._looks.reason(CHANGED))
            raise
        except UnmadeError as unmade:
            self._leave(unmade.reason)
            return None

    def _begin(self) -> bool:
        is_begun = super()._begin()
        self.walk.asked = None
        if is_begun and not self._as_torch:
            self._entries[id(self._ahead[-1])] = self._aligned.of(self._ahead[-1].keys)
        return is_begun

    def _result(self, task: Task) -> Any:
        if self._entries.pop(id(task), []) != (self._aligned.of(task.keys) if not self._as_torch else []):
            raise UnmadeError(CHANGED)
        if not self._as_torch and (path := changed(task.files)) is not None:
            raise UnmadeError(OfDataset(FILE.format(path)))
        if task.failed:
            is_visible = task.failed == VisibleError.__name__
            raise UnmadeError(VISIBLE if is_visible else f"a batch raised {task.failed}")
        data = super()._result(task)
        self._read_ahead()
        return data

    def _reason_to_leave(self) -> str:
        """Say why threads would read other batches than this process now, or ''."""
        if not self._pool.is_here:
            return FORKED
        if listens():
            return LISTENS
        if modes() != modes_of_threads() or self.walk.is_resized:
            return CHANGED
        return "" if self._looks.are_alike(self._read, self._is_as_read) else self._looks.reason(CHANGED)

    def _is_as_read(self) -> bool:
        """Say whether the loader still goes by what threads read it by."""
        return self._seen == outside(self._read)

    def _leave(self, reason: str) -> None:
        """Read the rest of the pass as the script made the loader: what was read ahead is what the dataset was."""
        loader, rest = self._loader(), self._rest()
        if self._as_torch and loader is not None:
            self._single = AsWritten(loader, rest)
        else:
            self._single = InProcessTail(self, rest, pin=self._pin_memory)
        if self._pool.is_here:
            self._left(reason)
            self._close()

    def _rest(self) -> Iterator[Any]:
        """Return the indices of the batches that the loop has not got."""
        tasks = [*([] if self.under_way is None else [self.under_way]), *self._ahead]
        keys = [list(task.keys) if self._auto_collation else task.keys[0] for task in tasks]
        if self.walk.asked is not None and self.walk.asked[0] not in [task.keys.batch for task in tasks]:
            keys.append(self.walk.asked[1])
        return self.walk.rest(keys, self._sampler_iter)

    def _view(self, loader: DataLoader[Any]) -> View:
        walk = ScriptWalk(loader)
        return View(loader, **self._sizes, _walk=walk, _index_sampler=Indices(walk))

    def _read_ahead(self) -> None:
        """Read the sampler now where torch would: for worker processes, as soon as it can."""
        while self._as_torch and len(self._ahead) < self._window and self._begin():
            pass


@dataclass(frozen=True, slots=True)
class MakingOfFiles(Making):
    """A batch in the making, and the files that its examples were read from."""

    files: dict[str, FileStat] = field(default_factory=dict)


class Unseen(MapStyleWork):
    """The work of a dataset that is read by the training thread in the script: what others could see fails."""

    def begin(self, keys: Keys) -> MakingOfFiles:
        """Return room for the examples, their seeds and their files."""
        making = super().begin(keys)
        return MakingOfFiles(making.examples, making.seeds, making.rows)

    def fill(self, making: Making, keys: Keys, part: int) -> None:
        """Read one example, or all."""
        with self._noting(making):
            super().fill(making, keys, part)

    def finish(self, making: Making, keys: Keys) -> Any:
        """Return what the collate function makes of the examples."""
        with self._noting(making):
            return super().finish(making, keys)

    @contextmanager
    def _noting(self, making: Making) -> Iterator[None]:
        with noting(ahead=True) as acts, files_read().noting() as files:
            yield
        if acts:  # and the script caught what was raised
            raise VisibleError(acts[0])
        if isinstance(making, MakingOfFiles):
            for path, facts in files.items():
                making.files.setdefault(path, facts)


def work_of(loader: DataLoader[Any]) -> MapStyleWork:
    """Return how threads make the batches of `loader`."""
    kind = MapStyleWork if loader.num_workers else Unseen  # worker processes print when they like
    return kind(KeyedDataset(loader.dataset, 0), loader.collate_fn, batched=loader._auto_collation)


def barred(loader: DataLoader[Any]) -> str | None:
    """Say why threads may not even be tried, or None."""
    reason = bound_to_the_loop(loader)
    if reason is None and loader.num_workers and loader.worker_init_fn is not None:  # without workers it never runs
        reason = "its worker_init_fn prepares a process, and threads have none of their own"
    return reason


def different(loader: DataLoader[Any]) -> str | None:
    """Say why batches that threads make would be others, or None: found by making a small one.

    Threads share the dataset of the training process for all passes; worker processes begin each with a fresh copy.
    """
    read = loader.dataset, loader.collate_fn
    finding = unfit(loader)[0]
    if finding:
        return impure(finding, loader.dataset)

    def tried() -> tuple[str | None, int]:
        before = Picture(read).state
        batches, work, keys = _tried(loader)
        pool, task = ThreadPool(EXAMPLES), Task(work, keys)
        pool.help(task)
        task.wait(None)
        made = task.result()
        pool.close()
        same = equal(made, batches[0])
        if handle := Picture(read).handle:  # one thread's seek would fall between another's seek and read
            return SHARED.format(handle), 0
        if Picture(read).state != before:
            return FORGOTTEN if loader.num_workers else SETS, 0
        return (None if same else "threads make another batch of its examples than torch does"), 0

    return in_child(tried)[0]


def slow(loader: DataLoader[Any]) -> str | None:
    """Say that two threads would mostly wait for the interpreter's lock, or None: measured in a child."""

    def tried() -> tuple[str | None, int]:
        _, work, keys = _tried(loader)
        waited = lock_wait_fraction(work, keys)
        if waited <= LOCK_WAIT:
            return None, 0
        return f"two threads wait {waited:.0%} of their time for the interpreter lock: worker processes suit it", 0

    return in_child(tried)[0]


def _tried(loader: DataLoader[Any]) -> tuple[TriedBatch, MapStyleWork, Keys]:
    """Return a small batch, how threads make it, and its keys."""
    batches = TriedBatch(loader)
    # An unbatched loader reads one example; the others, as many as the batch that was tried in a worker.
    return batches, work_of(loader), keys_of(batches.indices or [0], 0)


@dataclass(slots=True)
class LoaderSwitch:
    """Decides loader by loader. One per rank."""

    num_threads: int
    """Threads per iterator."""
    prefetch_factor: int
    """Batches under way per thread."""
    report: OutcomeWriter
    """Called when something about a loader was decided."""
    withdrawal: Withdrawal
    """Whether steps are slower than recorded, and loaders are to be left alone."""
    verification: Verification | None = None
    """Compares batches with the script's own; None where nobody asked for it."""
    decisions: Decisions = field(default_factory=Decisions)
    """What was tried, by the facts of loaders."""
    blocked_datasets: frozenset[str] = frozenset()
    """Classes of datasets of which the plan knows that their loads block, and do not compute."""
    decided: WeakKeyDictionary[DataLoader[Any], tuple[bool, object]] = field(default_factory=WeakKeyDictionary)
    """Loader -> whether threads read it, and the picture of dataset and collate function that this rests on."""
    looks: WeakKeyDictionary[object, Looks] = field(default_factory=WeakKeyDictionary)
    """Loader -> when it is looked whether the script has changed what its batches are read from."""

    def __post_init__(self) -> None:
        self.withdrawal.leave = self._leave_all

    def around_get_iterator(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `DataLoader._get_iterator`: make ours for the loaders that may have it."""

        def _get_iterator(loader: DataLoader[Any]) -> Any:
            with self.withdrawal.making():
                is_heard = not loader.num_workers and listens()
                is_ours = not self.withdrawal.is_off and not is_heard and self._takes(loader)
                return made(loader) if is_ours else original(loader)

        def made(loader: DataLoader[Any]) -> Any:
            self.withdrawal.has_remedy = True
            count = min(self.num_threads, max(len(loader), 1))
            account.describe(num_workers=count, workers="threads")
            left = partial(self._left, ref(loader), self.report.names(loader))
            restore = pass_restorer(loader)

            def ours() -> Any:
                """Return an iterator of ours; where it cannot be started, for want of threads, the script's own."""
                try:
                    looks = self.looks.setdefault(loader, looks_for(self.verification))
                    return ScriptThreads(loader, count, self.prefetch_factor, left, looks)
                except Exception as failure:
                    pass_on(failure)
                    restore()
                    left(not_started("threads", failure))
                    return original(loader)

            if self.verification is None:
                return ours()
            return self.verification.following(loader, ours, self.report, self._leave, own_workers=loader.num_workers)

        return _get_iterator

    def _leave_all(self) -> bool:
        """Let all loaders ask for a new iterator at their next pass; one that is kept would be asked for no more."""
        for loader, (taken, _) in self.decided.items():
            if taken:
                loader._iterator = None
        return False

    def _leave(self, loader: DataLoader[Any], reason: str) -> None:
        """Let the next pass over a loader be the script's own."""
        self.decided[loader] = False, None
        loader._iterator = None

    def _takes(self, loader: DataLoader[Any]) -> bool:
        """Decide on a loader that is new, or whose dataset has changed since. A failure leaves it alone."""
        try:
            seen = Picture((loader.dataset, loader.collate_fn)).state
            if loader in self.decided and (self.decided[loader][1] == seen or not self.decided[loader][0]):
                return self.decided[loader][0]
            reason = self._decide(loader)
            if reason != NOT_TRIED:  # else a later pass may try
                self.decided[loader] = reason is None, seen
            return reason is None
        except Exception as failure:
            pass_on(failure)
            self.report({"reason_not_applied": f"{type(failure).__name__}: {failure}"})
            return False

    def _left(self, loader: ref[DataLoader[Any]], names: Mapping[str, str], reason: str) -> None:
        """Leave a loader alone from the next pass on: threads could not go on with this one."""
        found = loader()
        if found is not None:
            self._leave(found, reason)
        self.report({**names, "reason_not_applied": reason, "had_it": True})

    def _decide(self, loader: DataLoader[Any]) -> str | None:
        facts = {**self.report.names(loader), "before": loader.num_workers}
        reason = barred(loader) or self.decisions.result(loader, lambda: different(loader)) or self._slow(loader)
        self.report({**facts, **({"reason_not_applied": reason} if reason else {"num_workers": self.num_threads})})
        return reason

    def _slow(self, loader: DataLoader[Any]) -> str | None:
        """Say why threads would not pay, or None: as recorded, or tried. A wrong record costs time, and no result."""
        if type(loader.dataset).__name__ in self.blocked_datasets:
            return None
        return self.decisions.speed(loader, lambda: slow(loader))


def rehearse(loader: DataLoader[Any]) -> dict[str, str | float]:
    """Return the fields of `trace.events.loader_facts.Rehearsal`; takes 0.1 to 0.5 s, in forked children mostly."""
    processes, processes_s = _timed(lambda: untunable(loader, may_draw=True))
    threads, threads_s = _timed(lambda: barred(loader) or different(loader))
    cache, cache_s = _timed(lambda: uncacheable(loader)[0])
    return {
        "processes": processes or "", "processes_s": processes_s, "threads": threads or "", "threads_s": threads_s,
        "cache": cache or "", "cache_s": cache_s, "look_s": look_s((loader.dataset, loader.collate_fn)),
    }  # fmt: skip


def _timed(decide: Callable[[], str | None]) -> tuple[str | None, float]:
    """Return what `decide` says, and its seconds without what it waited for a core beside training."""
    begin, waited = perf_counter(), waited_ns[0] + run_delay_ns()
    found = decide()
    delay_s = (waited_ns[0] + run_delay_ns() - waited) / NS_PER_S
    return found, max(perf_counter() - begin - delay_s, 0.0)
