"""Where a cache keeps examples, encoded, by their index; and what each was read from.

>>> shelf = Shelf(Arena(2, 1000))
>>> shelf.keep(1, [7], ExampleOrigin({}, [])), decode(shelf.get(1)), shelf.get(0)
(None, [7], None)
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from headway.core.machine.arena import Arena
from headway.data.bytes.torch_examples import decode, encode
from headway.data.guard.batch_entries import BatchEntries
from headway.data.guard.files_read import FileStat, changed

_WRITING = threading.Lock()
"""Held while an example is kept: an arena keeps processes apart, not the threads of one."""


class ExampleStore(Protocol):
    """Where examples are kept, encoded, by their index."""

    @property
    def num_slots(self) -> int:
        """One more than the largest index."""
        ...

    def get(self, index: int) -> memoryview | None:
        """Return the encoded example, None when it is not here."""
        ...

    def keep(self, index: int, example: Any, origin: ExampleOrigin) -> None:
        """Keep an example that was read from `origin`, if there is room; raises what `encode` raises."""
        ...


@dataclass(frozen=True, slots=True)
class ExampleOrigin:
    """What an example that is kept was read from: once that is another, it is out of date."""

    files: Mapping[str, FileStat]
    """The files that Python opened for it, as they were."""
    entries: list[object]
    """What stands for its entries in large containers (`aligned`)."""

    def __bool__(self) -> bool:
        """Tell whether there is anything to compare."""
        return bool(self.files or self.entries)


@dataclass(frozen=True, slots=True)
class Sourced:
    """An example as it is kept, with what it was read from."""

    example: Any
    origin: ExampleOrigin


@dataclass(frozen=True, slots=True)
class Shelf:
    """An arena of examples."""

    arena: Arena

    @property
    def num_slots(self) -> int:
        """Examples that it may hold."""
        return self.arena.num_slots

    def get(self, index: int) -> memoryview | None:
        """Return the encoded example, None when it is not here."""
        return self.arena.get(index)

    def keep(self, index: int, example: Any, origin: ExampleOrigin) -> None:
        """Keep an example that was read from `origin`, if there is room and nobody else is writing."""
        if not _WRITING.acquire(blocking=False):
            return  # another thread writes, or wrote when this process was forked: the next reading may keep it
        try:
            self.arena.put(index, packed(example, origin))
        finally:
            _WRITING.release()


def packed(example: Any, origin: ExampleOrigin) -> bytes:
    """Return an example as bytes, with what it was read from; raises what `encode` raises."""
    return encode(Sourced(example, origin) if origin else example)


def unpacked(payload: memoryview, aligned: BatchEntries, index: int) -> tuple[Any, bool]:
    """Return example `index` as it was kept, and whether what it was read from is another since."""
    kept = decode(payload)
    if type(kept) is not Sourced:
        return kept, False
    is_edited = bool(kept.origin.entries) and aligned.of([index]) != kept.origin.entries
    return kept.example, is_edited or changed(kept.origin.files) is not None
