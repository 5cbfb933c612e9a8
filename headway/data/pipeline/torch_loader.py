"""Runs a pipeline: batches made by threads, or by worker processes where the interpreter lock is the limit.

The loader is `headway.data.DataLoader` with the dataset replaced: order,
ranks and state are its own. Examples are written straight into the batch's
array, by whatever thread made them.
"""

from __future__ import annotations

import copy
import multiprocessing
import threading
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
import torch

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.data.bytes.torch_examples import BatchMemory
from headway.data.bytes.torch_keyed import Draws, Keys
from headway.data.loader.loader import DataLoader
from headway.data.loader.threads import BatchWork
from headway.data.loader.views import Empty
from headway.data.pipeline.chain import DROPPED, Chain

ON_ERROR = {"raise": "the loop gets the exception", "skip": "the example is left out, and counted"}


class PipelineDataset:
    """What stands in for the dataset: makes whole batches for `Keys` in any process, or parts of them in threads."""

    def __init__(
        self, chain: Chain, name: str, on_error: str, collate: Callable[[list[Any]], Any] | None, rank: int = 0
    ) -> None:
        self.chain, self._name, self.on_error, self.collate, self.rank = chain, name, on_error, collate, rank
        self.images = any(stage.kind == "decode" for stage in chain.stages)
        self.memory = BatchMemory()
        self.counts = multiprocessing.Array("q", 2)
        """Examples skipped after an error, dropped by a filter; shared with worker processes."""

    def __len__(self) -> int:
        return len(self.chain.source)

    def fingerprint(self) -> str:
        """Return what tells this data from other data."""
        return self._name

    def __getitems__(self, keys: Keys) -> Any:
        """Return the batch for `keys`, made in this thread; here the global generators are keyed too."""
        assembly = self.begin(keys)
        for place, seed in enumerate(assembly.seeds):
            with Draws(seed, shared=True):
                self.fill(assembly, keys, place)
        with Draws(keys.batch_seed("collate", self.rank), shared=True):
            return self.collated(assembly)

    def begin(self, keys: Keys) -> Assembly:
        """Return the batch in the making."""
        return Assembly(keys, self.memory, apart=self.collate is not None)

    def parts(self, keys: Keys) -> int:
        """Return the examples, each of which may be made apart."""
        return len(keys)

    def fill(self, making: Assembly, keys: Keys, part: int) -> None:
        """Make one example of a batch. Its operators have generators of their own."""
        here = making.place(part)
        try:
            value = self.chain.run(keys[part], making.seeds[part], here)
        except Exception:
            if self.on_error == "raise":
                raise
            self._count(0)
            return
        if value is DROPPED:
            self._count(1)
        else:
            making.put(part, value, there=value is here)

    def finish(self, making: Assembly, keys: Keys) -> Any:
        """Return the finished batch."""
        with Draws(keys.batch_seed("collate", self.rank)):
            return self.collated(making)

    def count_missing(self, number: int) -> None:
        """Count examples that a data server left out: where nothing is filtered, they were skipped after an error."""
        filtered = any(stage.kind == "filter" for stage in self.chain.stages)
        for _ in range(number):
            self._count(1 if filtered else 0)

    def _count(self, which: int) -> None:
        with self.counts.get_lock():
            self.counts[which] += 1

    def collated(self, assembly: Assembly) -> Any:
        """Return the finished batch: {"data", "ids", labels...}, or what the user's collate function makes of it."""
        kept = [place for place, here in enumerate(assembly.here) if here]
        if not kept:
            return Empty.BATCH
        if self.collate is not None:
            return self.collate([assembly.values[place] for place in kept])
        ids = [assembly.keys[place] for place in kept]
        batch = {"data": self._data(assembly, kept), "ids": torch.tensor(ids, dtype=torch.int64)}
        return batch | labels(self.chain.source, ids)

    def _data(self, assembly: Assembly, kept: list[int]) -> Any:
        if assembly.array is None:
            values = [assembly.values[place] for place in kept]
            return as_numbers(values) if values else torch.tensor(values)
        array = assembly.array if len(kept) == len(assembly.here) else assembly.array[kept]
        data = torch.from_numpy(array)
        # Pixels stay where they are, [B, H, W, C] in memory: torch calls that channels_last.
        return data.permute(0, 3, 1, 2) if self.images and data.dim() == 4 else data


def as_numbers(values: list[Any]) -> Any:
    """Return numbers as the tensor that torch makes of them, anything else as it is."""
    return torch.tensor(values) if values and all(isinstance(value, (int, float)) for value in values) else values


def labels(source: Any, ids: Iterable[int]) -> dict[str, Any]:
    """Return what the source knows of items besides their data, by its name."""
    rows = [source.meta(int(index)) for index in ids] if hasattr(source, "meta") else []
    return {name: as_numbers([row[name] for row in rows]) for name in (rows[0] if rows else ())}


class Assembly:
    """A batch in the making: arrays of one shape go straight into one array, anything else into a list."""

    def __init__(self, keys: Keys, memory: BatchMemory, *, apart: bool = False) -> None:
        self.keys, self.seeds = keys, keys.item_seeds()
        self.here = [False] * len(keys)
        self.values: list[Any] = [None] * len(keys)
        self.array: np.ndarray[Any, np.dtype[Any]] | None = None
        self.lock = threading.Lock()
        self._memory, self._apart = memory, apart

    def place(self, place: int) -> np.ndarray[Any, np.dtype[Any]] | None:
        """Return where one example is going to lie; None while that is not known."""
        return None if self.array is None else self.array[place]

    def put(self, place: int, value: Any, *, there: bool = False) -> None:
        """Write one example, unless it was made `there`. Raises `InputError` when it is not of the first one's form."""
        if isinstance(value, torch.Tensor):
            value = value.numpy()
        if self._apart or not isinstance(value, np.ndarray) or value.dtype.hasobject:
            self.values[place] = value
        else:
            with self.lock:
                if self.array is None:
                    self.array = self._memory.array((len(self.keys), *value.shape), value.dtype)
            if value.shape != self.array.shape[1:] or value.dtype != self.array.dtype:
                raise InputError(
                    f"example {self.keys[place]} is {value.dtype}{list(value.shape)}, the batch {self.array.dtype}"
                    f"{list(self.array.shape[1:])}. Resize or crop to one size, or pass a collate_fn."
                )
            if not there:
                self.array[place] = value
        self.here[place] = True


class PipelineLoader(DataLoader):
    """Loads the batches of a `Pipeline`; made by `Pipeline.loader`.

    A batch is a dict: `data` (images: [B, C, H, W], channels_last), `ids`
    int64[B], and what the source knows besides. `skipped` and `dropped` count
    the examples that errors and filters took; a batch that lost them all is
    left out.
    """

    def __init__(
        self,
        chain: Chain,
        *,
        name: str,
        workers: Literal["processes", "threads", "auto"] = "auto",
        on_error: str = "raise",
        **options: Any,
    ) -> None:
        """Raise `InputError` on an unknown `workers` or `on_error`, and what `DataLoader` raises."""
        pick(ON_ERROR, on_error, "answer to errors")
        if options.get("batch_size", 1) is None and options.get("batch_sampler") is None:
            raise InputError("batch_size=None is not for pipelines, which make batches. Pass 1 or more.")
        if options.get("cache_bytes"):
            raise InputError("cache_bytes is not for pipelines. Put .cache(num_bytes) behind an operator.")
        batches = PipelineDataset(chain, name, on_error, options.pop("collate_fn", None))
        super().__init__(batches, collate_fn=_as_it_is, workers=workers, **options)

    @property
    def skipped(self) -> int:
        """Examples left out after an error."""
        return int(self.dataset.counts[0])  # type: ignore[attr-defined]  # the dataset is ours

    @property
    def dropped(self) -> int:
        """Examples that a filter took."""
        return int(self.dataset.counts[1])  # type: ignore[attr-defined]  # the dataset is ours

    def _keyed(self, *, fresh: bool = False) -> Any:
        self.dataset.rank = self._place()[0]  # type: ignore[attr-defined]  # the same
        if not fresh:
            return self.dataset
        trial = copy.copy(self.dataset)
        trial.counts = multiprocessing.Array("q", 2)  # type: ignore[attr-defined]  # what a measurement leaves out is no loss
        return trial

    def _work(self, keyed: Any) -> tuple[BatchWork, list[Any], Any]:
        own = [stage.function for stage in keyed.chain.stages]
        return keyed, [keyed.collate, *own], None


def _as_it_is(batch: Any) -> Any:
    """Collate nothing: batches are made whole (a named function, so that worker processes can be spawned)."""
    return batch
