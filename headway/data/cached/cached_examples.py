"""A view of a dataset for one reader: from a cache where it can, else from the dataset, and then kept.

What fails in it is no business of the loop's: the examples that are missing are read from the dataset, those that were
read from it already are handed out, and the cache is of no use any more (`scrutiny`). What the dataset raises goes on
as it is.

Where a cache keeps examples, encoded, by their index; and what each was read from.

>>> store = ExampleStore(2, 1000, counted=True)
>>> store.keep(1, ["seven"], ExampleOrigin({}, [])), decode(store.get(1)), store.get(0)
(None, ['seven'], None)
>>> dict(zip(COUNTS, store.counts))
{'hits': 1, 'misses': 1, 'bytes': 5, 'refused': 0}
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from headway.core.machine.arena import Arena
from headway.core.machine.interruptions import suppress_own
from headway.data.bytes.scrutiny import CHANGED, DREW, FAILED, Scrutiny
from headway.data.bytes.torch_examples import aliased, decode, encode, equal, is_plain_data
from headway.data.guard.files_read import FileStat, changed, files_read, written_since
from headway.data.guard.outcome import speak
from headway.data.guard.picture import BatchEntries, data_of
from headway.data.guard.watch import GeneratorWatch, noting
from headway.runtime.in_rank.guard import OfScript


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


COUNTS = ("hits", "misses", "bytes", "refused")
"""What a store counts that has a budget: readings that found their example, and that did not; data kept; missed
examples that found no room."""

FRAMING_BYTES = 4096
"""Room for what an example's encoding adds to its data, per example; memory is taken only where it is used."""


class ExampleStore:
    """Examples, encoded, by their index, in memory that threads and forked workers share; nothing is evicted."""

    def __init__(self, num_examples: int, num_bytes: int, *, counted: bool = False) -> None:
        """Have room for `num_bytes` of encoded examples; where it is `counted`, of their data."""
        self.budget_bytes = num_bytes if counted else None
        framing = num_examples * FRAMING_BYTES if counted else 0
        self.arena = Arena(num_examples, num_bytes + framing, extra_bytes=8 * len(COUNTS))
        self.counts = self.arena.extra.cast("q")
        """[4] COUNTS, over all threads and processes."""

    def get(self, index: int) -> memoryview | None:
        """Return the encoding of example `index`, None when it is not here."""
        found = self.arena.get(index)
        if self.budget_bytes is not None:
            with self.arena:
                self.counts[found is None] += 1
        return found

    def keep(self, index: int, example: Any, origin: ExampleOrigin) -> None:
        """Keep an example that was read from `origin`, while there is room; raises what `encode` raises."""
        if self.budget_bytes is None:
            self.arena.put(index, _packed(example, origin))
            return
        size, payload = data_bytes(example), None
        if self.counts[2] + size <= self.budget_bytes:  # else it is refused below, without being encoded
            payload = _packed(example, origin)
            size = size or len(payload)
        with self.arena:
            if self.arena.get(index) is not None:
                return  # another worker was faster
            fits = payload is not None and self.counts[2] + size <= self.budget_bytes
            fits = fits and self.arena.put(index, payload or b"")
            self.counts[2] += size if fits else 0
            self.counts[3] += not fits


def data_bytes(value: Any) -> int:
    """Return the bytes of tensors, arrays, bytes and text in a nested example; numbers are free.

    >>> data_bytes({"image": np.zeros((4, 4), np.uint8), "label": 3, "name": "cat"})
    19
    """
    size = getattr(value, "nbytes", None)
    if isinstance(size, (int, np.integer)):
        return int(size)
    if isinstance(value, (bytes, bytearray, str)):
        return len(value)
    if isinstance(value, dict):
        return sum(map(data_bytes, value.values()))
    return sum(map(data_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _packed(example: Any, origin: ExampleOrigin) -> bytes:
    return encode(Sourced(example, origin) if origin else example)


def unpacked(
    payload: memoryview, aligned: BatchEntries, index: int, entries: list[object] | None = None
) -> tuple[Any, bool]:
    """Return example `index` as it was kept, and whether what it was read from is another since.

    `entries` is what `aligned` says of it now, where that is known.
    """
    kept = decode(payload)
    if type(kept) is not Sourced:
        return kept, False
    if not kept.origin.entries:
        return kept.example, changed(kept.origin.files) is not None
    is_edited = (aligned.of([index]) if entries is None else entries) != kept.origin.entries
    return kept.example, is_edited or changed(kept.origin.files) is not None


class _Examples(list[Any]):
    """What a dataset gives that reads many at once."""


@dataclass(slots=True)
class _Readings:
    """What one batch read from the dataset."""

    entries: dict[object, list[object]]
    """Index -> what stands for its entries, of all of the batch: looked at before anything is read."""
    data: object = None
    """What the dataset went by before the first of them; None before it."""
    pending: list[tuple[int, Any, ExampleOrigin]] = field(default_factory=list)
    """What may be kept, if reading has changed nothing."""


class CachedExamples:
    """A view of a dataset for one reader: from the cache where it can, else from the dataset, and then kept.

    What may be kept, and what is compared with the dataset although it was found, `scrutiny` says.
    """

    def __init__(
        self, dataset: Any, kept: ExampleStore, scrutiny: Scrutiny, after_first: Callable[[], object] = lambda: None,
        is_of_now: Callable[[], bool] = lambda: True, before: Callable[[], object] = lambda: None, *,
        any_type: bool = False,
    ) -> None:  # fmt: skip
        """Begin; `after_first` is called when this reader has read its first example from the dataset.

        `before` returns `data_of` the dataset where `is_of_now` has looked at it for this batch, else None.
        `is_of_now` is asked before each batch: False leaves the cache out of it. Examples that hold more than arrays,
        tensors, numbers and text are kept where they may be of `any_type`.
        """
        self._any_type = any_type
        self._dataset, self._kept, self._scrutiny = dataset, kept, scrutiny
        self._is_of_now, self._before = is_of_now, before
        self._watch, self._after_first = GeneratorWatch(dataset), after_first
        self._has_read = self._has_found = False
        self._files, self._aligned = files_read(), BatchEntries(dataset)
        self._of_script = OfScript()
        self._batch: _Readings | None = None
        """What the batch under way has read, where `batch` has looked for all of it."""
        self._fresh: dict[int, Any] = {}
        """Identity of an index -> what the dataset has given for it, in the batch under way."""

    def __getitem__(self, index: Any) -> Any:
        """Return example `index`: always a copy of its own."""
        self._fresh.clear()
        try:
            examples = self._one_by_one([index])
        except Exception as error:
            if error in self._of_script:
                raise
            examples = None
            self._failed(error)
        # Outside of the handler: the dataset's own exceptions have no context.
        return self._directly([index], many=None)[0] if examples is None else examples[0]

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """Return many; a dataset that reads many at once is asked once, for those that are missing."""
        self._fresh.clear()
        many = getattr(self._dataset, "__getitems__", None)
        try:
            examples = self._many(many, indices)
        except Exception as error:
            if error in self._of_script:
                raise
            examples = None
            self._failed(error)
        return self._directly(indices, many) if examples is None else examples

    @contextlib.contextmanager
    def batch(self, indices: Sequence[object]) -> Iterator[None]:
        """Look at the dataset once for a batch whose examples are read one by one in the block."""
        try:
            self._batch = self._begun(indices) if self._is_of_now() else None
        except Exception as error:
            self._failed(error)
        try:
            yield
            read = self._batch
        finally:
            self._batch = None
        try:
            if read is not None:
                self._keep_all(read)
        except Exception as error:
            self._failed(error)

    def _failed(self, cause: Exception) -> None:
        """Use the cache no more."""
        with suppress_own():
            self._scrutiny.cause = f": {type(cause).__name__}: {cause}"
            self._scrutiny.end(FAILED)
            speak(self._dataset, self._scrutiny)

    def _directly(self, indices: Sequence[Any], many: Callable[[Any], Any] | None) -> Any:
        """Return examples from the dataset, but for those that it has just given."""
        missing = [index for index in indices if id(index) not in self._fresh] if self._fresh else indices
        if many and missing is indices:
            return many(indices)
        read = iter(many(missing) if many and missing else [self._dataset[index] for index in missing])
        return [self._fresh[id(index)] if id(index) in self._fresh else next(read) for index in indices]

    def _one_by_one(self, indices: Sequence[Any]) -> list[Any] | None:
        if self._batch is not None and not self._scrutiny.over:
            return [self._one(index, self._batch)[0] for index in indices]
        if not self._is_of_now():
            return None
        readings = self._begun(indices)
        pairs = [self._one(index, readings) for index in indices]
        self._keep_all(readings)
        return [example for example, _ in pairs]

    def _many(self, many: Callable[[list[Any]], Any] | None, indices: Sequence[Any]) -> Any:
        """Return examples, or None where the dataset is to be asked as if there was no cache."""
        if not self._is_of_now() or (many and (type(indices) is not list or self._scrutiny.over)):
            return None
        readings = self._begun(indices)
        if many:
            pairs = self._together(many, list(indices), readings)
        else:
            pairs = [self._one(index, readings) for index in indices]
        self._keep_all(readings)
        if self._scrutiny.over:  # found just now: what this batch has of the cache may be out of date too
            alone = partial(_only, many) if many else self._dataset.__getitem__
            with self._of_script:
                return [alone(index) if old else example for index, (example, old) in zip(indices, pairs, strict=True)]
        return [example for example, _ in pairs]

    def _begun(self, indices: Sequence[object]) -> _Readings:
        """Look at the entries of a batch, all at once: one by one that took longer than many an example."""
        slots = [index for index in indices if self._is_slot(index)]
        return _Readings(dict(zip(slots, self._aligned.each(slots), strict=True)))

    def _one(self, index: Any, readings: _Readings) -> tuple[Any, bool]:
        """Return an example, and whether it comes from the cache and was not compared."""
        found = self._find(index)
        if found is not None:
            return self._handed(index, found, partial(self._given, index), readings)
        example, drew, files = self._read(partial(self._given, index), readings, [index])
        self._keep(index, example, drew, files, readings)
        return example, False

    def _together(
        self, many: Callable[[list[Any]], Any], indices: list[Any], readings: _Readings
    ) -> list[tuple[Any, bool]]:
        """Return the examples of a batch; where reading the missing ones drew, none of them is kept."""
        found = [self._find(index) for index in indices]
        missing = [index for index, payload in zip(indices, found, strict=True) if payload is None]
        drew: bool | None = None
        fresh: Iterator[Any] = iter(())
        files: Mapping[str, FileStat] = {}
        if missing:
            examples, drew, files = self._read(partial(self._given_many, many, missing), readings, missing)
            # Of several examples nobody knows which one drew.
            fresh, drew = iter(examples), None if drew and len(missing) > 1 else drew
        pairs = []
        for index, payload in zip(indices, found, strict=True):
            if payload is not None:
                pairs.append(self._handed(index, payload, partial(self._given, index, many), readings))
                continue
            example = next(fresh)
            self._keep(index, example, drew, files, readings)
            pairs.append((example, False))
        return pairs

    def _given(self, index: Any, many: Callable[[list[Any]], Any] | None = None) -> Any:
        """Read an example, and note that this was done."""
        with self._of_script:
            example = _only(many, index) if many else self._dataset[index]
        self._note([index], [example])
        return example

    def _given_many(self, many: Callable[[list[Any]], Any], indices: list[Any]) -> Any:
        """Read examples together, and note that this was done."""
        with self._of_script:
            examples = _Examples(many(indices))
        self._note(indices, examples)
        return examples

    def _note(self, indices: list[Any], examples: list[Any]) -> None:
        self._fresh.update(zip(map(id, indices), examples, strict=False))

    def _find(self, index: Any) -> memoryview | None:
        return self._kept.get(index) if self._is_slot(index) else None

    def _handed(self, index: int, found: memoryview, read: Callable[[], Any], readings: _Readings) -> tuple[Any, bool]:
        """Return the example found, or, where a comparison is due, what the dataset gives."""
        first, self._has_found = not self._has_found, True
        # What was read for this batch may have changed entries since they were looked at.
        entries = None if readings.data is not None else readings.entries.get(index)
        kept, is_old = unpacked(found, self._aligned, index, entries)
        if not is_old and (self._scrutiny.over or not self._scrutiny.is_due(len(found), first=first)):
            return kept, True
        example, drew, _ = self._read(read, readings, [index])
        if drew:
            self._scrutiny.end(DREW, index)
        elif not is_old and not equal(kept, example):
            self._scrutiny.end(CHANGED, index)
        speak(self._dataset, self._scrutiny)
        return example, False

    def _read(
        self, read: Callable[[], Any], readings: _Readings, indices: list[Any]
    ) -> tuple[Any, bool | None, Mapping[str, FileStat]]:
        """Read from the dataset; return what came, whether that drew, or did what others see, and from which files.

        Of one index that is an example, of several a list of them.
        """
        if self._scrutiny.over:
            return read(), None, {}
        if readings.data is None:
            readings.data = self._before() or data_of(self._dataset)
        with noting() as acts, self._files.noting() as files:
            reading = self._watch.around(read)
        made, drew = [reading.value], reading.drew
        del reading
        together = isinstance(made[0], _Examples)
        self._note(indices, made[0] if together else made)
        if drew is False and not is_plain_data([*made[0]] if together else made) and not self._any_type:
            drew = None  # a copy may not be the same
        if not self._has_read:
            self._has_read = True
            self._after_first()
        return made[0], True if acts else drew, files

    def _is_slot(self, index: Any) -> bool:
        return type(index) is int and 0 <= index < self._kept.arena.num_slots and not self._scrutiny.over

    def _keep(
        self, index: Any, example: Any, drew: bool | None, files: Mapping[str, FileStat], readings: _Readings
    ) -> None:
        may = self._is_slot(index) and self._scrutiny.may_keep(index, drew=drew) and not aliased(example)
        # Of a file that was written just now, another write might leave no trace.
        if may and written_since(files, time.time_ns()) is None:
            # Of before the reading: an entry that reading changes is another the next time, and the example read anew.
            readings.pending.append((index, example, ExampleOrigin(files, readings.entries[index])))
        speak(self._dataset, self._scrutiny)

    def _keep_all(self, readings: _Readings) -> None:
        """Keep what was read for this batch, where that changed nothing the dataset goes by: a hit would leave it out.

        One look for all of them. A file opened lazily, at the first reading, is such a change, and costs no more than
        that batch.
        """
        if readings.pending and readings.data == data_of(self._dataset):
            for index, example, origin in readings.pending:
                with suppress_own():  # an example that cannot be kept is read anew each time
                    self._kept.keep(index, example, origin)


def _only(many: Callable[[list[Any]], list[Any]], index: Any) -> Any:
    return many([index])[0]
