"""The batches of a pass as threads read them: the order of the script's sampler, and which batch is whose."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch.utils.data import DataLoader

from headway.data.runtime.examples.keyed import Keys
from headway.data.runtime.following.read_ahead import batch_size_of, in_batches, num_free
from headway.runtime.in_rank.guard import OfScript


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
