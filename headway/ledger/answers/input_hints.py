"""What a user can do about a loader that training waits for: one row per cause and state of the loader.

The first row of a cause whose condition holds gives the fix in words and the edit of the script, as a line to copy.

>>> hint_of("input.fetch", LoaderState(workers=0, cores=8)).fix(LoaderState(workers=0, cores=8))[:24]
'read in worker processes'
>>> state = LoaderState(workers=10, cores=2)
>>> hint_of("input.transfer", state).edit(state)
'DataLoader(..., num_workers=2, persistent_workers=True)'
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headway.core.units import plural
from headway.ledger.answers.evidence import TRY


@dataclass(frozen=True, slots=True)
class LoaderState:
    """What decides between the hints for one loader."""

    workers: int | None = 0
    """Its workers per rank, None when that is not known."""

    cores: int = 0
    """Cores of a rank, 0 = not known."""

    refusal: str = ""
    """Why workers may not make its batches; '' = they may."""

    is_stream: bool = False
    """Whether its dataset is an IterableDataset, of which one worker reads all, and several all of it each."""

    is_served: bool = False
    """Whether a data server makes its batches."""

    on_host: bool = True
    """Whether the job computes on the host alone."""

    is_persistent: bool = False
    """Whether its workers are kept between epochs."""

    pins: bool = False
    """Whether its batches are pinned."""

    is_small: bool = False
    """Whether its batches are of kilobytes."""

    threads: int = 0
    """Threads that a rank computes with, 0 = not known."""

    waits_for_cores: bool = False
    """Whether the batches that were awaited waited for a core most of the time."""

    @property
    def is_full(self) -> bool:
        """Whether its workers have all cores, or could not get one."""
        return self.waits_for_cores or bool(self.cores and self.workers and self.workers >= self.cores)

    @property
    def is_shared(self) -> bool:
        """Whether workers would take turns with threads that compute, which wait for each other in each operator."""
        return self.on_host and 1 < self.cores <= self.threads

    @property
    def words(self) -> dict[str, str]:
        """What a hint may name."""
        workers = self.workers or 0
        more = 2 * workers or max(1, min(4, self.cores or 4))
        return {
            "workers": str(self.workers or "now"), "twice": str(2 * (self.workers or 2)), "more": str(more),
            "cores": plural(self.cores, "core") if self.cores else "few cores", "each": str(self.cores),
            "half": str(self.cores // 2), "threads": str(self.cores - self.cores // 2),
            "refusal": self.refusal, "TRY": TRY,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hint:
    """One row: for a cause, in a state of the loader."""

    cause: str
    """Name of the cause."""

    when: str
    """The state in words."""

    holds: Callable[[LoaderState], bool]
    """Whether a loader is in it."""

    say: str
    """The fix, with the words of `LoaderState.words` in braces."""

    script: str = ""
    """The edit, likewise; '' where there is none of one line."""

    def fix(self, state: LoaderState) -> str:
        """Return the fix for a loader."""
        return self.say.format(**state.words)

    def edit(self, state: LoaderState) -> str:
        """Return the line to copy, '' without one."""
        return self.script.format(**state.words)


def _always(_: LoaderState) -> bool:
    return True


MORE_AT_SERVER = "more threads or a cache in the data server: DataServer(threads=..., cache_bytes=...)"
MORE = "DataLoader(..., num_workers={more}, persistent_workers=True)"
KEEP = "DataLoader(..., persistent_workers=True)"
ONE = "DataLoader(..., num_workers=1)"
FEWER = "DataLoader(..., num_workers={each}, persistent_workers=True)"

HINTS: tuple[Hint, ...] = (
    Hint("input.fetch", "a data server makes its batches", lambda s: s.is_served, MORE_AT_SERVER),
    Hint("input.fetch", "it is a stream without a worker", lambda s: s.is_stream and s.workers == 0 and not s.is_served,
         "read the stream in one worker process; several would each yield all of it, unless it asks get_worker_info(); "
         "persistent_workers=True only where the loop sets nothing on its dataset between passes",
         ONE),
    Hint("input.fetch", "workers are refused", lambda s: bool(s.refusal),
         "make the load itself faster: workers are refused ({refusal})"),
    Hint("input.fetch", "it has no workers", lambda s: s.workers == 0,
         "read in worker processes: DataLoader(num_workers=4){TRY}workers=4, or --set cache_fraction=1", MORE),
    Hint("input.fetch", "its workers are not known", lambda s: s.workers is None,
         "more workers than {workers}, or a cache{TRY}workers={twice}, or --set cache_fraction=1"),
    Hint("input.fetch", "it has workers", _always,
         "more workers than {workers}, or a cache{TRY}workers={twice}, or --set cache_fraction=1", MORE),
    Hint("input.prep", "a data server makes its batches", lambda s: s.is_served, MORE_AT_SERVER),
    Hint("input.prep", "it is a stream without a worker", lambda s: s.is_stream and s.workers == 0 and not s.is_served,
         "prepare it in one worker process; several would each yield all of it, unless it asks get_worker_info(); "
         "persistent_workers=True only where the loop sets nothing on its dataset between passes",
         ONE),
    Hint("input.prep", "workers are refused", lambda s: bool(s.refusal),
         "make the transforms themselves faster: workers are refused ({refusal})"),
    Hint("input.prep", "it has no workers, and the threads that compute have all cores",
         lambda s: s.workers == 0 and s.is_shared,
         "prepare in worker processes, and compute on fewer threads so that those have cores: num_workers={half} and "
         "torch.set_num_threads({threads}), by which sums are rounded in another order",
         "DataLoader(..., num_workers={half}, persistent_workers=True)  # and torch.set_num_threads({threads})"),
    Hint("input.prep", "it has no workers", lambda s: s.workers == 0,
         "prepare in worker processes: DataLoader(num_workers=2){TRY}workers=2", MORE),
    Hint("input.prep", "no core is free", lambda s: s.is_full,
         "the host's cores are busy: make the transforms cheaper or cache their result"),
    Hint("input.prep", "its workers are not known", lambda s: s.workers is None,
         "more workers than {workers}{TRY}workers={twice}"),
    Hint("input.prep", "it has workers, and cores are free", _always,
         "more workers than {workers}{TRY}workers={twice}", MORE),
    Hint("input.start", "iterators without workers are made often", lambda s: not s.workers,
         "keep one iterator instead of making a loader for every few batches"),
    Hint("input.start", "its workers are kept and start slowly", lambda s: s.is_persistent,
         "its workers are kept between epochs already: fewer of them start sooner"),
    Hint("input.start", "its workers start in each epoch", _always,
         "keep the workers between epochs: one loader for all of them, and persistent_workers=True{TRY}persistent=true",
         KEEP),
    Hint("input.transfer", "it collates in the training process",
         lambda s: s.on_host and s.workers == 0 and not s.refusal,
         "collate in worker processes{TRY}workers=2", MORE),
    Hint("input.transfer", "workers are refused", lambda s: s.on_host and s.workers == 0,
         "make the collate function faster: workers are refused ({refusal})"),
    Hint("input.transfer", "its workers are more than twice the cores",  # fewer may wait for storage, not for a core
         lambda s: s.on_host and 0 < 2 * s.cores < (s.workers or 0),
         "fewer workers: {workers} of them take turns on {cores}", FEWER),
    Hint("input.transfer", "batches are small", lambda s: s.is_small,
         "larger batches: handing one over between processes costs about a millisecond, whatever its size"),
    Hint("input.transfer", "batches are large", lambda s: s.on_host,
         "hand over less: smaller dtypes, fewer and larger tensors per batch"),
    Hint("input.transfer", "batches are copied to a device from pageable memory", lambda s: not s.pins,
         "hand over less: smaller dtypes, pin_memory=True and non_blocking copies on a device",
         "DataLoader(..., pin_memory=True)  # and batch.to(device, non_blocking=True)"),
    Hint("input.transfer", "batches are pinned", _always,
         "hand over less: smaller dtypes, and non_blocking copies on a device"),
    Hint("eval", "its evaluation's loader has no workers", lambda s: not s.workers,
         "give the loader of the evaluation workers, and keep them between evaluations",
         "DataLoader(..., num_workers=2, persistent_workers=True)"),
    Hint("eval", "its evaluation's workers start each time", lambda s: not s.is_persistent,
         "keep the workers of its loader between evaluations: one loader for all, and persistent_workers=True",
         "DataLoader(..., num_workers={workers}, persistent_workers=True)"),
    Hint("eval", "its evaluation's workers are kept", _always,
         "more workers than {workers} for its loader, or fewer examples"),
)  # fmt: skip
"""Cause and state of the loader -> what to do. Adding a hint is adding a row."""


def hint_of(cause: str, state: LoaderState) -> Hint:
    """Return the hint of a cause for a loader; each cause of `HINTS` has a last row that always holds."""
    return next(row for row in HINTS if row.cause == cause and row.holds(state))
