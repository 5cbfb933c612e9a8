"""DS-Analyzer's three timed phases, measured on request: synthetic data, cold data, cached data.

Use it to check what `headway.data.stalls` says from one ordinary run, or where
there is no run. The same batches pass twice through a copy of the loader:
first cold (after `make_cold`, which may drop them from the page cache), then
cached; between the two, nothing else reads. Synthetic data is one batch that
stays where it is. Times are seconds per step; the device is synchronised at
the end of each step if `synchronize` says how.

    report = measure(loader, train_step, make_cold=lambda: forget(paths), synchronize=torch.cuda.synchronize)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Subset

from headway.core.errors import InputError
from headway.data.stalls import WARMUP_STEPS, StallReport, from_phases


def measure(
    loader: DataLoader[Any],
    step: Callable[[Any], object],
    *,
    num_steps: int = 50,
    warmup: int = WARMUP_STEPS,
    make_cold: Callable[[], object] | None = None,
    synchronize: Callable[[], object] | None = None,
) -> StallReport:
    """Train `num_steps` batches three times and split the step into compute, fetch and prep.

    `step` trains on one batch. Without `make_cold` the data is as cold as it
    happens to be. The dataset's own caches are its own affair: they count as
    cold once and as cached afterwards. Raises `InputError` for an
    IterableDataset, a dataset smaller than a batch, and fewer steps than
    `warmup`.
    """
    batches = _first_batches(loader, num_steps, warmup)
    end = synchronize or _nothing
    if make_cold is not None:
        make_cold()
    cold_s = _timed(batches, step, end)
    cached_s = _timed(batches, step, end)
    resident = next(iter(batches))
    ingest_s = _timed([resident] * len(cached_s), step, end)
    return from_phases(ingest_s, cached_s, cold_s, warmup=warmup)


def forget(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Drop files from the page cache; needs no privilege, but pages that are not yet written stay."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _first_batches(loader: DataLoader[Any], num_steps: int, warmup: int) -> DataLoader[Any]:
    """Return a loader with the same settings over the first examples, in order: each pass reads the same ones."""
    size = loader.batch_size
    if isinstance(loader.dataset, IterableDataset) or size is None:
        raise InputError(
            "the loader has an IterableDataset or batches of its own, so no two phases would read the same examples. "
            "Pass a loader with a map-style dataset and a batch_size."
        )
    length = len(loader.dataset)  # type: ignore[arg-type]  # map-style datasets that samplers accept have a length
    if length < size:
        raise InputError(f"the dataset has {length} examples, fewer than one batch of {size}. Use a smaller batch.")
    steps = min(num_steps, length // size)
    if steps <= warmup:
        raise InputError(f"{steps} steps can be timed, of which {warmup} are warm-up. Use more examples or more steps.")
    return DataLoader(
        Subset(loader.dataset, range(steps * size)),
        batch_size=size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        prefetch_factor=loader.prefetch_factor,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )


def _timed(batches: Iterable[Any], step: Callable[[Any], object], end: Callable[[], object]) -> list[float]:
    """Return seconds per step, the wait for the batch included."""
    times, before = [], perf_counter()
    for batch in batches:
        step(batch)
        end()
        now = perf_counter()
        times.append(now - before)
        before = now
    return times


def _nothing() -> None:
    """Synchronise nothing: the host is the device."""
