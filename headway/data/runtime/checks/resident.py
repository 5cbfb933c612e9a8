"""Loaders that hand out their first batch again and again, where the script wants it: input that costs nothing.

The first batch is a real one, so that shapes and types are the script's own.
Once the script has moved a tensor of it to a device, the moved one is handed
out. Tensors that the script changed in place are put back before the next
time; containers are made anew each time. Parts inside objects of other
classes are handed out as they are, and moved again by the script.

>>> in_batch({"x": torch.zeros(2), "y": [torch.ones(1), 7]}, lambda tensor: tuple(tensor.shape))
{'x': (2,), 'y': [(1,), 7]}
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader

Paused = Callable[[], AbstractContextManager[None]]
"""Makes a block that is left out of the step times."""


def in_batch(batch: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return `batch` in new containers (mappings, lists, tuples), each tensor replaced by `change(tensor)`."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, MutableMapping):
        result = copy.copy(batch)
        for key, value in batch.items():
            result[key] = in_batch(value, change)
        return result
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(in_batch(value, change) for value in batch))
    if type(batch) in (list, tuple):
        return type(batch)(in_batch(value, change) for value in batch)
    return batch


@dataclass(slots=True)
class _BatchTensor:
    """One tensor of a batch."""

    tensor: torch.Tensor
    """What is handed out, as an alias."""

    untouched: torch.Tensor
    """A copy that nobody sees."""

    version: int
    """Count of in-place changes of `tensor` when it was last equal to `untouched`."""

    alias: torch.Tensor | None = None
    """What the script holds since the last time."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _BatchTensor:
        """Keep `tensor`."""
        tensor = tensor.detach()
        return cls(tensor, tensor.clone(), _version(tensor))

    def hand_out(self) -> torch.Tensor:
        """Return the tensor with its first content: its own object, on the same memory."""
        if _version(self.tensor) != self.version:
            with torch.no_grad():
                self.tensor.copy_(self.untouched)
            self.version = _version(self.tensor)
        self.alias = self.tensor.detach()
        return self.alias


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class ResidentBatch:
    """A batch that can be handed out any number of times."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._parts: list[_BatchTensor] = []
        in_batch(batch, lambda tensor: self._parts.append(_BatchTensor.of(tensor)))

    def hand_out(self) -> Any:
        """Return the batch, equal to what it was the first time."""
        parts = iter(self._parts)
        return in_batch(self._batch, lambda _: next(parts).hand_out())

    def moved(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        """Keep `result` in the place of `tensor`, if the script got that from here."""
        for index, part in enumerate(self._parts):
            if part.alias is tensor:
                self._parts[index] = _BatchTensor.of(result)


@dataclass(slots=True)
class ResidentLoaders:
    """The loaders of one rank."""

    epoch_batches: Mapping[int, int]
    """Group of a loader -> batches of one pass."""

    paused: Paused
    """Around what headway does itself."""

    handed: Callable[[int], None]
    """Called with the group of a loader that handed out a batch."""

    kept: WeakKeyDictionary[DataLoader[Any], tuple[int, ResidentBatch | None]] = field(
        default_factory=WeakKeyDictionary
    )
    """Loader -> its group and its batch, None when it has none."""

    def around_iter(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `DataLoader.__iter__`: the first time, read a batch; each time, return an iterator over that one."""

        def __iter__(loader: DataLoader[Any]) -> Any:  # noqa: N807 - it stands in for the method of that name
            if loader not in self.kept:
                with self.paused():
                    iterator = original(loader)
                    group = group_of(iterator)
                    batch = next(iterator, None)
                    self.kept[loader] = group, None if batch is None else ResidentBatch(batch)
            group, resident = self.kept[loader]
            return ResidentIterator(resident, group, self._length(loader, group), self)

        return __iter__

    def around_move(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Wrap `Tensor.to` and `Tensor.cuda`: a part of a batch that is moved to a device stays there."""

        @functools.wraps(original)
        def move(tensor: torch.Tensor, *where: Any, **options: Any) -> torch.Tensor:
            result = original(tensor, *where, **options)
            if result.device != tensor.device:
                with self.paused():
                    for _, resident in self.kept.values():
                        if resident is not None:
                            resident.moved(tensor, result)
            return result

        return move

    def _length(self, loader: DataLoader[Any], group: int) -> int | None:
        """Return the batches of a pass as the other phases saw it, else as the loader says; None = no end known."""
        if group in self.epoch_batches:
            return self.epoch_batches[group]
        try:
            return len(loader)
        except (TypeError, NotImplementedError):
            return None


def group_of(iterator: Any) -> int:
    """Return the number of the iterator's loader, the same on all ranks; -1 if it was not recorded."""
    return int(getattr(iterator, "headway_ids", (-1, 0))[0])


class ResidentIterator:
    """One pass over a loader, in which all batches are the same."""

    def __init__(
        self, resident: ResidentBatch | None, group: int, length: int | None, loaders: ResidentLoaders
    ) -> None:
        self.headway_ids = (group, 0)
        self._resident, self._length, self._loaders = resident, length, loaders
        self._num_yielded = 0

    def __iter__(self) -> Iterator[Any]:
        """Return self, as the iterator of a loader does."""
        return self

    def __len__(self) -> int:
        """Return the batches of a pass; raises `TypeError` when that is not known, as a loader's iterator does."""
        if self._length is None:
            raise TypeError("this loader has no length. Count its batches instead.")
        return self._length

    def __next__(self) -> Any:
        """Return the batch."""
        if self._resident is None or self._num_yielded == self._length:
            raise StopIteration
        self._num_yielded += 1
        self._loaders.handed(self.headway_ids[0])
        return self._resident.hand_out()
