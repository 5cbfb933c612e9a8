"""Remedy: threads of the rank make the batches of an unmodified script's loader, in the same order, bit for bit.

The loader stays the script's own and torch's; only the iterator that it asks
for is ours (`threads.InThreads`), which follows the script's sampler and draws
from its generators what torch's iterator would have drawn, at the same
moments. A loader is left alone, and the reason named, unless a trial in a
forked child finds that its examples are pure, that two threads make the same
batch as torch does, and that they do not mostly wait for the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader

from headway.data.runtime import account
from headway.data.runtime.examples import equal
from headway.data.runtime.keyed import KeyedDataset, Keys
from headway.data.runtime.outcome import Report, reporter
from headway.data.runtime.purity import picture
from headway.data.runtime.threads import LOCK_WAIT, Examples, InThreads, Pool, Task, lock_wait_fraction
from headway.data.runtime.trial import EXAMPLES, TriedBatch, in_child, unfit
from headway.data.runtime.views import View
from headway.data.runtime.workers import MOST_LOADERS, bound_to_the_loop, num_free
from headway.runtime.remedy import Applied, Context, Refused


def threads(parameters: Mapping[str, Any], context: Context) -> Applied | Refused:
    """Install the remedy. Parameters: num_workers (threads), prefetch_factor (batches under way per thread).

    Whether a given loader takes it is decided when that loader is first read, and reported then.
    """
    switch = Switch(
        num_threads=int(parameters.get("num_workers", 2)),
        prefetch_factor=int(parameters.get("prefetch_factor", 2)),
        report=reporter("data.threads", parameters, context),
    )
    context.patch("torch.utils.data.dataloader:DataLoader._get_iterator", switch.around_get_iterator)
    return Applied("data.threads", dict(parameters))


class ScriptWalk:
    """A pass in the order of the script's sampler, read as far ahead as threads need."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        # Not the loader itself: one that keeps its iterator could never go if that kept it.
        self._indices, self._batched, self.num_batches = loader._index_sampler, loader._auto_collation, len(loader)
        self.taken, self.finished = 0, False
        self._window = loader.num_workers * (loader.prefetch_factor or 2)
        self._free = num_free(loader)

    def keys(self) -> Iterator[Keys]:
        """Return an iterator over the indices of the batches; it may say that it is at its end and go on later."""
        return ScriptKeys(self, iter(self._indices), batched=self._batched)

    def may_ask(self, batch: int) -> bool:
        """Whether the sampler may be asked for batch number `batch`: always, or not before torch would ask."""
        return batch < self._free or self.taken >= (max(batch + 1 - self._window, 0) if self._window else batch)


class ScriptKeys:
    """The keys of a script's batches."""

    def __init__(self, walk: ScriptWalk, indices: Iterator[Any], *, batched: bool) -> None:
        self._walk, self._indices, self._batched, self._batch = walk, indices, batched, 0

    def __iter__(self) -> ScriptKeys:
        return self

    def __next__(self) -> Keys:
        if not self._walk.may_ask(self._batch):
            raise StopIteration
        items = next(self._indices)
        self._batch += 1
        return keys_of(list(items) if self._batched else [items], self._batch - 1)


def keys_of(items: list[Any], batch: int) -> Keys:
    """Return the keys of batch number `batch`; nothing that it draws depends on them."""
    return Keys(items, [0] * len(items), seed=0, epoch=0, batch=batch)


class Indices:
    """What `InThreads` reads its batches' keys from."""

    def __init__(self, walk: ScriptWalk) -> None:
        self._walk = walk

    def __iter__(self) -> Iterator[Keys]:
        return self._walk.keys()

    def __len__(self) -> int:
        return self._walk.num_batches

    def follow(self, walk: ScriptWalk) -> None:
        """Go on with the next pass."""
        self._walk = walk

    def loader(self) -> None:
        """Return no loader that would want to know of the end of a pass: the script's does not."""


class ScriptThreads(InThreads):
    """The iterator of a script's own loader."""

    def __init__(self, loader: DataLoader[Any], num_threads: int, prefetch_factor: int) -> None:
        self._as_torch = loader.num_workers > 0
        self._sizes = {"num_workers": num_threads, "prefetch_factor": prefetch_factor}
        super().__init__(self._view(loader), work_of(loader), None)
        self._read_ahead()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(self._view(loader), first_iter)
        self._read_ahead()

    def _next_data(self) -> Any:
        data = super()._next_data()
        self._read_ahead()
        return data

    def _view(self, loader: DataLoader[Any]) -> View:
        walk = ScriptWalk(loader)
        return View(loader, **self._sizes, _walk=walk, _index_sampler=Indices(walk))

    def _read_ahead(self) -> None:
        """Read the sampler now where torch would: for worker processes, as soon as it can."""
        while self._as_torch and len(self._ahead) < self._window and self._begin():
            pass


def work_of(loader: DataLoader[Any]) -> Examples:
    """Return how threads make the batches of `loader`."""
    return Examples(KeyedDataset(loader.dataset, 0), loader.collate_fn, batched=loader._auto_collation)


def unthreadable(loader: DataLoader[Any]) -> str | None:
    """Say why threads may not make this loader's batches, or None."""
    reason = bound_to_the_loop(loader)
    if reason is not None:
        return reason
    if loader.worker_init_fn is not None:
        return "its worker_init_fn prepares a process, and threads have none of their own"
    finding, _ = unfit(loader)
    if finding:
        return f"its dataset is not pure: {finding}"
    return in_child(lambda: (_try(loader), 0))[0]


def _try(loader: DataLoader[Any]) -> str | None:
    """Make a small batch by two threads and as torch does, and see how much of their time threads wait for the lock."""
    batches, work = TriedBatch(loader), work_of(loader)
    # An unbatched loader reads one example; the others, as many as the batch that was tried in a worker.
    keys = keys_of(batches.indices or [0], 0)
    pool, task = Pool(EXAMPLES), Task(work, keys)
    pool.help(task)
    task.wait(None)
    made = task.result()
    pool.close()
    if not equal(made, batches[0]):
        return "threads make another batch of its examples than torch does"
    waited = lock_wait_fraction(work, keys)
    if waited > LOCK_WAIT:
        return f"two threads wait {waited:.0%} of their time for the interpreter lock: worker processes suit it"
    return None


@dataclass(slots=True)
class Switch:
    """Decides loader by loader. One per rank."""

    num_threads: int
    """Threads per iterator."""
    prefetch_factor: int
    """Batches under way per thread."""
    report: Report
    """Called when something about a loader was decided."""
    num_tried: int = 0
    """Loaders decided on so far."""
    decided: WeakKeyDictionary[DataLoader[Any], tuple[bool, object]] = field(default_factory=WeakKeyDictionary)
    """Loader -> whether threads read it, and the picture of dataset and collate function that this rests on."""

    def around_get_iterator(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `DataLoader._get_iterator`: make ours for the loaders that may have it."""

        def _get_iterator(loader: DataLoader[Any]) -> Any:
            if not self._takes(loader):
                return original(loader)
            count = min(self.num_threads, max(len(loader), 1))
            account.describe(num_workers=count, workers="threads")
            return ScriptThreads(loader, count, self.prefetch_factor)

        return _get_iterator

    def _takes(self, loader: DataLoader[Any]) -> bool:
        """Decide on a loader that is new, or whose dataset has changed since. A failure leaves it alone."""
        try:
            seen = picture((loader.dataset, loader.collate_fn))
            if loader not in self.decided or (self.decided[loader][0] and self.decided[loader][1] != seen):
                self.num_tried += loader not in self.decided
                self.decided[loader] = self._decide(loader), seen
            return self.decided[loader][0]
        except Exception as failure:
            self.report({"reason_not_applied": f"{type(failure).__name__}: {failure}"})
            return False

    def _decide(self, loader: DataLoader[Any]) -> bool:
        if self.num_tried > MOST_LOADERS:
            self.report({"reason_not_applied": f"the script makes more than {MOST_LOADERS} loaders"})
            return False
        facts = {"dataset": type(loader.dataset).__name__, "before": loader.num_workers}
        reason = unthreadable(loader)
        self.report({**facts, **({"reason_not_applied": reason} if reason else {"num_workers": self.num_threads})})
        return reason is None
