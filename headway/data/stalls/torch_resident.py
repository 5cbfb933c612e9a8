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

import contextlib
import copy
import functools
import mmap
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, get_worker_info

from headway.core.machine.host import mapped_memory

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


# Makes the files of a dataset cold: their pages leave the page cache before they are read.
#
# A file is dropped once per pass over the data and process: when Python code
# inside the dataset opens it, and, for what is open or mapped already (C
# libraries, memory maps), when a pass begins and after its first batch. Pages of
# files that were changed lately are written back first. Files that are open for writing, programs and
# libraries are left alone. Needs no rights but to read the file.

SLOTS = 512
"""Loader workers that can count at a time, each in a place of its own."""

WRITTEN_BACK_S = 60.0
"""A file changed longer ago has no dirty pages: the kernel writes them back after 30 s. A sync takes up to 5 ms."""


class ColdFiles:
    """The files of this process's dataset; forked loader workers inherit it and count in shared memory."""

    def __init__(
        self,
        run: str,
        fetching: list[int],
        paused: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._run, self._fetching, self._paused = os.path.join(os.path.abspath(run), ""), fetching, paused
        self._counts = mmap.mmap(-1, 16 * SLOTS)
        self._done: set[str] = set()
        self._dropping = False
        self._others = open_files()
        """What was open before the script began: the locale, the launcher's pipes."""

    def num_dropped(self) -> int:
        """Return how many files were dropped so far, all workers together; one counts again in each pass."""
        return sum(struct.unpack(f"{2 * SLOTS}q", self._counts[:])[::2])

    def dropping_s(self) -> float:
        """Return the seconds that the busiest loader worker spent on dropping, which nobody takes out of the steps."""
        busiest_ns: int = max(struct.unpack(f"{2 * SLOTS}q", self._counts[:])[3::2])
        return busiest_ns / 1e9

    def opened(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Drop a file that the dataset opens to read: an audit hook, called before the file is opened."""
        if event != "open" or not self._fetching[0] or self._dropping:
            return
        path, _, flags = arguments
        if isinstance(path, (str, bytes)) and not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_DIRECTORY):
            name = os.fsdecode(path)
            if not name.endswith(".pyc"):  # the first batch may import modules, which are no data
                self._drop_all([name])

    def around_fetcher(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap the fetcher's constructor, where a pass begins in the process that reads."""

        @functools.wraps(original)
        def __init__(fetcher: Any, *arguments: Any) -> None:  # noqa: N807 - it stands in for the method of that name
            original(fetcher, *arguments)
            self._done.clear()
            self._drop_all(open_files() - self._others)
            fetcher.headway_fetched = False

        return __init__

    def around_fetch(self, original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Wrap `fetch`: after the first batch, drop what the dataset opened for it and holds open."""

        @functools.wraps(original)
        def fetch(fetcher: Any, index: Any) -> Any:
            batch = original(fetcher, index)
            if not fetcher.headway_fetched:
                fetcher.headway_fetched = True
                self._drop_all(open_files() - self._others)
            return batch

        return fetch

    def _drop_all(self, paths: list[str] | set[str]) -> None:
        self._dropping = True  # dropping opens files too
        try:
            with self._paused():
                for path in paths:
                    if path not in self._done and not os.path.abspath(path).startswith(self._run):
                        self._done.add(path)
                        start_ns = perf_counter_ns()
                        self._count(drop(path), start_ns)
        finally:
            self._dropping = False

    def _count(self, dropped: bool, start_ns: int) -> None:
        info = get_worker_info()  # the first place is the main process's, worker w has place w + 1
        place = 16 * (0 if info is None else 1 + info.id % (SLOTS - 1))
        files, spent_ns = struct.unpack_from("2q", self._counts, place)
        struct.pack_into("2q", self._counts, place, files + dropped, spent_ns + perf_counter_ns() - start_ns)


def drop(path: str) -> bool:
    """Drop the clean pages of a regular file from the page cache; False for anything else, or one we may not read.

    >>> drop("/dev/null"), drop(__file__)
    (False, True)
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return False
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or not facts.st_size:
            return False
        if time.time() - facts.st_mtime < WRITTEN_BACK_S:
            os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def open_files() -> set[str]:
    """Return the regular files that this process holds open, or has mapped, to read and not to run."""
    return set(_open()) | _mapped()


def _open() -> Iterator[str]:
    """Yield the paths behind descriptors that are open for reading only."""
    for number in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
            with open(f"/proc/self/fdinfo/{number}", encoding="ascii") as file:
                flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
        except (OSError, StopIteration):  # closed meanwhile: the descriptor of the listing itself
            continue
        if path.startswith("/") and not flags & (os.O_WRONLY | os.O_RDWR) and os.path.isfile(path):
            yield path


def _mapped() -> set[str]:
    """Return the paths of mappings of which no part can be run and none is written back."""
    rows = [row for row in mapped_memory() if row.path.startswith("/")]
    kept = {row.path for row in rows if "x" in row.access or row.access[1::2] == "ws"}
    return {path for path in {row.path for row in rows} - kept if os.path.isfile(path)}
