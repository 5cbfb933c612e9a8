"""What may be read ahead of training, and when: a sampler is asked when torch would ask it, or when nobody can tell.

`bound_to_the_loop` says which loaders may be read ahead at all. `JustInTimeSampler` asks for the last batches, and
`DeferredSeed` for the numbers that the start of a pass draws, at the moments of the loader as the script made it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from headway.core.machine.interruptions import pass_on
from headway.data.bytes.torch_keyed import Keys
from headway.data.guard.content_digest import portrait
from headway.data.guard.outcome import OfDataset
from headway.data.guard.picture import picture
from headway.runtime.calls.probe_input import is_own
from headway.runtime.host.host_memory import address_limit
from headway.runtime.in_rank.guard import OfScript
from headway.runtime.script.draws import order_generators, restorer, sampler_of, samplers_within, steered

CHANGED = OfDataset(
    "the script changes its dataset during a pass: from there on it is read as the script made the loader"
)
"""Why a remedy that was in force is taken away."""

SOURCES = ("data_source", "dataset")
"""Attributes in which torch's samplers keep what they only read the length of."""


def bound_to_the_loop(loader: DataLoader[Any]) -> str | None:
    """Say why the batches of this loader may not be read ahead of training, by whomever; None when they may."""
    if is_own(loader):
        return "it is headway's own loader: give it num_workers, workers and cache_bytes where the script makes it"
    if isinstance(loader.dataset, IterableDataset):
        return "its dataset is an IterableDataset: every worker would yield all of it"
    reason = address_limit() or steered(loader)
    if reason is not None:
        return reason
    return "its dataset is empty" if len(loader.dataset) == 0 else None  # type: ignore[arg-type]  # map-style here


def num_free(loader: DataLoader[Any]) -> int:
    """Return for how many batches the sampler may be asked at any time; for the rest, not before torch would ask.

    At its end a sampler asks once more how long its dataset is, which may have grown, and may draw once more: where it
    draws from a generator of the script's own, and the loop breaks off before, nobody else may have it draw. A short
    last batch is known by the end; full ones are not.
    """
    tells = getattr(sampler_of(loader), "generator", None) is not None
    size = loader.batch_size
    full = loader.batch_sampler is None or (
        size is not None and (loader.drop_last or len(loader.sampler) % size == 0)  # type: ignore[arg-type]  # torch's have one
    )
    return len(loader) if full and not tells else len(loader) - 1


def pass_restorer(loader: DataLoader[Any]) -> Callable[[], None]:
    """Return a function that puts the generators which the start of a pass draws from back to where they are now."""
    return restorer([torch.default_generator, *order_generators(loader)])


def batch_size_of(sampler: Any) -> int | None:
    """Return the batch size that one of torch's batch samplers goes by at each batch; None for others."""
    return sampler.batch_size if type(sampler) is BatchSampler and not sampler.drop_last else None


def in_batches(indices: Iterator[Any], sampler: Any) -> Iterator[Any]:
    """Yield the indices of the batches in `indices`, each of the size that the sampler has when it is asked for."""
    if batch_size_of(sampler) is None:
        yield from indices
        return
    each = chain.from_iterable(indices)
    while batch := [*islice(each, sampler.batch_size)]:
        yield batch


class JustInTimeSampler:
    """The index sampler of a loader, which is asked for its last batch when the loader as it was made would ask."""

    def __init__(self, loader: DataLoader[Any], window: int) -> None:
        """Read `loader`, whose own workers (none: 0) would have `window` batches under way."""
        self._sampler, self._window, self.free = loader._index_sampler, window, num_free(loader)
        """Batches that it may be asked for at any time."""
        self._indices: Iterator[Any] = iter(())
        self._size = batch_size_of(self._sampler)
        self.under_way: deque[Any] = deque()
        """Indices of the batches that were asked for and not handed out, oldest first."""
        self.of_script = OfScript()
        """Knows what the sampler has raised."""
        self._asked = self.begun = 0
        """Batches that it was asked for; batches that the loop has asked for."""
        self.owes = False
        """Whether a worker got none because it was too early."""

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> JustInTimeSampler:
        self._indices, self._asked, self.begun, self.owes = iter(self._sampler), 0, 0, False
        self.under_way.clear()
        return self

    def rest(self) -> Iterator[Any]:
        """Return the indices of the batches that were not handed out yet, in order."""
        return in_batches(chain(tuple(self.under_way), self._indices), self._sampler)

    @property
    def is_resized(self) -> bool:
        """Whether the script has set another batch size since the pass began."""
        return batch_size_of(self._sampler) != self._size

    def __next__(self) -> Any:
        self.owes = self._asked >= max(self.free, self.begun + self._window)
        if self.owes:
            raise StopIteration
        self._asked += 1
        with self.of_script:
            self.under_way.append(next(self._indices))
        return self.under_way[-1]


class DeferredSeed:
    """The random numbers that the start of a pass draws, put off until its first batch is asked for.

    A loader without workers draws a seed when its iterator is made, and its sampler draws with the first batch; with
    workers both happen at once. A script that draws in between, or starts two loaders side by side, would tell.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Note where the generators are before the iterator is made."""
        self.loader = loader
        self._generators = [torch.default_generator, *order_generators(loader)]
        self._before, self._after = self._states(), self._states()
        self._facts = self._read_with_the_first_batch()

    def later(self) -> None:
        """Go back to where a loader without workers would be now: after the seed."""
        self._after = self._states()
        self.restore()
        torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
        self._before = self._states()
        self._facts = self._read_with_the_first_batch()  # this process may have read its first examples since

    def now(self) -> bool:
        """Go on to where the iterator was when it had been made.

        False when the script has drawn since, or changed what a loader without workers would read only now.
        """
        same = all(map(torch.equal, self._states(), self._before))
        try:
            same = same and self._facts == self._read_with_the_first_batch()
        except Exception as cause:  # a container that another thread changes
            pass_on(cause)
            same = False
        if same:
            self._set(self._after)
        return same

    def may_be_repeated(self) -> bool:
        """Whether only generators have gone on since, and the order can be drawn anew from where they are now.

        A sampler of the script's own may count how often it was begun.
        """
        samplers = samplers_within(self.loader.sampler, self.loader.batch_sampler)
        return (
            all(type(each).__module__.startswith("torch.utils.data") for each in samplers)
            and self._facts == self._read_with_the_first_batch()
        )

    def restore(self) -> None:
        """Go back to where the generators were at first."""
        self._set(self._before)

    def _read_with_the_first_batch(self) -> tuple[object, str]:
        """Return a picture of the dataset, and a digest of what samplers hold: weights, indices, epoch, sizes."""
        samplers = samplers_within(self.loader.sampler, self.loader.batch_sampler)
        parts = [
            (name, len(value) if name in SOURCES else value)
            for sampler in samplers
            for name, value in getattr(sampler, "__dict__", {}).items()
            if name != "sampler"
        ]
        return picture((self.loader.dataset, self.loader.collate_fn)), portrait(parts)

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


# The batches of a pass as threads read them: the order of the script's sampler, and which batch is whose.


class ScriptWalk:
    """A pass in the order of the script's sampler, read as far ahead as threads need."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        # Not the loader itself: one that keeps its iterator could never go if that kept it.
        self._indices, self._batched, self.num_batches = loader._index_sampler, loader._auto_collation, len(loader)
        self.taken, self.finished, self._size = 0, False, batch_size_of(self._indices)
        self._window = loader.num_workers * (loader.prefetch_factor or 2)
        self._free = num_free(loader)
        self.of_script = OfScript()
        """Knows what the sampler has raised."""
        self.asked: tuple[int, Any] | None = None
        """Number and indices of a batch that is not in the hands of the threads yet."""

    def keys(self) -> Iterator[Keys]:
        """Return an iterator over the indices of the batches; it may say that it is at its end and go on later."""
        return ScriptKeys(self, iter(self._indices), batched=self._batched)

    @property
    def is_resized(self) -> bool:
        """Whether the script has set another batch size since the pass began."""
        return batch_size_of(self._indices) != self._size

    def rest(self, taken: list[Any], keys: ScriptKeys) -> Iterator[Any]:
        """Return the indices of the batches that are left: those in `taken`, then what the sampler has for `keys`."""
        return in_batches(chain(taken, keys._indices), self._indices)

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
        with self._walk.of_script:
            items = next(self._indices)
        self._walk.asked = self._batch, items
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
