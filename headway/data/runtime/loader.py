"""The drop-in loader: torch's DataLoader, with an order of its own and an exact, constant-size state.

Use it in place of `torch.utils.data.DataLoader`: the same arguments in the
same order, `isinstance` holds, and deleting the import goes back. Without a
sampler it owns the order, which is a pure function of (seed, epoch) and is
dealt to ranks step by step; so `state_dict()` of any rank restores every rank
of any other world size, to the batch, for any number of workers. What the
dataset draws at random is keyed by example (`keyed`). The position counts
batches that the loop took, not batches that were read ahead.

The iterator is CheckFreq's (FAST 2021, the data half), made elastic.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.data
from torch.utils.data import IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from headway.core.errors import InputError
from headway.core.rng import derived_seed
from headway.core.tables import pick
from headway.data.order import TAILS, Sequence, in_order, permute
from headway.data.runtime.keyed import WORD, KeyedDataset, WorkerStart, generators_kept
from headway.data.runtime.streams import has_state, stream_iterator
from headway.data.runtime.views import View
from headway.data.runtime.walks import OrderWalk, SamplerWalk, State, StreamWalk

VERSION = 1
"""Of the state; a later one reads all before it."""

Walk = OrderWalk | SamplerWalk | StreamWalk


class DatasetChangedError(InputError):
    """A state belongs to another dataset than the one it is loaded for."""


class DataLoader(torch.utils.data.DataLoader[Any]):
    """Loads batches as `torch.utils.data.DataLoader` does, in an order that survives interruptions.

    `batch_size` is per rank. `rank` and `world_size` default to
    torch.distributed's at the moment of `iter`, so a script needs no
    DistributedSampler. `tail` says what becomes of items that do not fill a
    global batch (`headway.data.order.TAILS`); `drop_last=True` is "drop".
    Each `iter` begins the next epoch, or goes on where `load_state_dict` was told to.

    >>> from torch.utils.data import TensorDataset
    >>> loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2, shuffle=True, seed=3)
    >>> batches = iter(loader)
    >>> first, state, rest = next(batches), loader.state_dict(), [b[0].tolist() for b in batches]
    >>> again = DataLoader(TensorDataset(torch.arange(6)), batch_size=2, shuffle=True)
    >>> again.load_state_dict(state)
    >>> [b[0].tolist() for b in again] == rest
    True
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        tail: str = "short",
    ) -> None:
        """Raise what torch raises, and `InputError` on a bad seed, rank, world size or tail."""
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, drop_last,
            timeout, worker_init_fn, multiprocessing_context, generator, prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers, pin_memory_device=pin_memory_device, in_order=in_order,
        )  # fmt: skip
        pick(TAILS, tail, "tail")
        derived_seed(seed)
        self._streams = isinstance(dataset, IterableDataset)
        self._owns_order = not self._streams and sampler is None and batch_sampler is None
        self._shuffle = bool(shuffle)
        self._tail = "drop" if drop_last else tail
        self._seed = seed if generator is None else derived_seed(seed, generator.initial_seed()) & WORD
        self._rank, self._world_size = rank, world_size
        self._next_epoch = 0
        self._loaded: State | None = None
        self._walk: Walk | None = None
        self._place()

    def __iter__(self) -> Any:
        """Begin the next epoch, or go on from the loaded state."""
        self._walk = self._begun()
        self._next_epoch, self._loaded = self._walk.epoch + 1, None
        return super().__iter__()

    def __len__(self) -> int:
        """Return the batches of a whole epoch on this rank."""
        if not self._owns_order:
            return super().__len__()
        return self._sequence().num_batches(self._place()[0])

    def set_epoch(self, epoch: int) -> None:
        """Do nothing, and say so once: the loader counts its epochs, and its state holds them."""
        if not self.__dict__.get("_told"):
            self._told = True
            warnings.warn(
                f"set_epoch({epoch}) has no effect: this loader counts its epochs itself, and each `iter` begins one.",
                stacklevel=2,
            )

    def state_dict(self) -> State:
        """Return where the loop is: after the batches that it took, whatever was read ahead. Costs microseconds.

        With several iterators at once it is that of the latest. Raises
        `InputError` where no exact state exists: an iterable dataset without
        `state_dict`, batches that arrive out of order.
        """
        if not self.in_order and self.num_workers:
            raise InputError(
                "in_order=False delivers batches in no repeatable order, so there is no exact state. Leave it True."
            )
        if self._streams and not has_state(self.dataset):
            raise InputError(
                f"{type(self.dataset).__name__} is an IterableDataset without state_dict() and load_state_dict(), so "
                "nobody knows where it is. Give it both, or use a map-style dataset."
            )
        if self._loaded is not None:
            where = self._loaded
        elif self._walk is not None:
            where = self._walk.state()
        else:
            where = {"epoch": self._next_epoch, **({"position": 0} if self._owns_order else {"batches": 0})}
        return {**self._identity(), **where}

    def load_state_dict(
        self, state: Mapping[str, Any], *, allow_batch_change: bool = False, allow_dataset_change: bool = False
    ) -> None:
        """Go on from `state` at the next `iter`; it may come from another rank, world size and number of workers.

        Raises `InputError` on a state that this loader cannot continue: of a
        later version, another way of loading, another global batch (unless
        `allow_batch_change`), another order; `DatasetChangedError` on another
        dataset (unless `allow_dataset_change`).
        """
        if not isinstance(state, Mapping) or not isinstance(state.get("version"), int):
            raise InputError(
                "this is no state of a headway DataLoader: it has no version. Pass what state_dict() gave."
            )
        if state["version"] > VERSION:
            raise InputError(
                f"the state has version {state['version']}, this headway reads up to {VERSION}. Update it."
            )
        ours = self._identity()
        _check_dataset(state, ours, allowed=allow_dataset_change)
        _check_identity(state, ours, allow_batch_change=allow_batch_change)
        missing = {"epoch", "position" if self._owns_order else "batches"} - set(state)
        if missing:
            raise InputError(f"the state lacks {', '.join(sorted(missing))}. Pass what state_dict() gave, whole.")
        if self._owns_order and not 0 <= state["position"] <= self._num_items():
            raise InputError(f"position {state['position']} lies outside a dataset of {self._num_items()} items.")
        self._seed = state["seed"]
        self._loaded = {key: value for key, value in state.items() if key not in ours}
        self._next_epoch = state["epoch"]
        if self._streams:
            self._iterator = None  # workers that are kept would go on from their own copies of the dataset

    def _place(self) -> tuple[int, int]:
        """Return (rank, world size). Raises `InputError` on one that cannot be."""
        ready = dist.is_available() and dist.is_initialized()
        rank = self._rank if self._rank is not None else dist.get_rank() if ready else 0
        world = self._world_size if self._world_size is not None else dist.get_world_size() if ready else 1
        if world < 1 or not 0 <= rank < world:
            raise InputError(f"rank is {rank} of {world}; ranks go from 0 to world_size - 1. Pass both, or neither.")
        return rank, world

    def _num_items(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # a map-style dataset has a length

    def _sequence(self, start: int = 0) -> Sequence:
        world = self._place()[1]
        return Sequence(self._num_items(), self.batch_size or 1, world, tail=self._tail, start=start)

    def _identity(self) -> State:
        """Return what a state must agree with: how batches are made, not where the loop is."""
        kind = "order" if self._owns_order else "stream" if self._streams else "sampler"
        same: State = {"version": VERSION, "kind": kind, "seed": self._seed, "dataset": fingerprint(self.dataset)}
        if self._owns_order:
            return {**same, "shuffle": self._shuffle, "global_batch": self._sequence().global_batch}
        size = self.num_workers if self._streams else self._place()[1]
        return {**same, "num_workers" if self._streams else "world_size": size}

    def _begun(self) -> Walk:
        """Return the walk of the next iterator."""
        loaded = self._loaded or {}
        epoch = self._next_epoch
        if self._owns_order:
            size = self._num_items()
            order = permute(size, self._seed, epoch) if self._shuffle else in_order(size)
            return OrderWalk(epoch, self._seed, self._sequence(loaded.get("position", 0)), order, self._place()[0])
        if self._streams:
            return StreamWalk(epoch, self.num_workers, before=loaded)
        before = dict(loaded.get("sampler", {}))
        return SamplerWalk(
            epoch, self._index_sampler, self._auto_collation, self._seed, skip=loaded.get("batches", 0), before=before
        )

    def _get_iterator(self) -> Any:
        if self._streams:
            return stream_iterator(self)
        view = View(
            self,
            dataset=KeyedDataset(self.dataset, self._place()[0]),
            _index_sampler=KeysOf(self),
            worker_init_fn=WorkerStart(self.worker_init_fn),
            generator=torch.Generator().manual_seed(derived_seed(self._seed, "workers") & WORD),
        )
        if self.num_workers == 0:
            return InProcess(view)
        self.check_worker_number_rationality()
        return InWorkers(view)


class KeysOf:
    """The index sampler of a loader's present walk; torch asks it for an iterator at each pass."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader._walk.keys())

    def __len__(self) -> int:
        return len(self._loader)


class InProcess(_SingleProcessDataLoaderIter):
    """Loads in the caller's process and thread, and leaves the caller's random generators alone."""

    def __init__(self, view: View) -> None:
        self.walk = view._walk
        super().__init__(view)

    def _next_data(self) -> Any:
        index = self._next_index()  # type: ignore[no-untyped-call]  # torch has no types for its iterators
        self.walk.taken += 1
        # A batch that raises was taken too: the caller's next `next` gets the one after it, as with workers.
        with generators_kept():
            data = self._dataset_fetcher.fetch(index)
        if self._pin_memory:
            data = pin_memory(data, self._pin_memory_device)  # type: ignore[no-untyped-call]  # nor for this
        return data

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            self.walk.finished = True
            raise


class InWorkers(_MultiProcessingDataLoaderIter):
    """Loads in worker processes; the walk counts what came out of them in order."""

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self.walk = loader._walk
        super()._reset(loader, first_iter)

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            self.walk.finished = True
            raise
        finally:
            self.walk.taken = self._rcvd_idx


def fingerprint(dataset: Any) -> str:
    """Return what tells a dataset from another: its own `fingerprint` (value or method) or type, and its length."""
    own = getattr(dataset, "fingerprint", None) or getattr(dataset, "_fingerprint", None)
    own = own() if callable(own) else own
    name = f"{type(dataset).__module__}.{type(dataset).__qualname__}" if own is None else str(own)
    # A class of the script itself is `__main__.X` or `module.X`, depending on how the script was started.
    name = name.removeprefix("__main__.")
    return f"{name}[{len(dataset)}]" if hasattr(dataset, "__len__") else name


def _check_dataset(state: Mapping[str, Any], ours: State, *, allowed: bool) -> None:
    if state.get("dataset") != ours["dataset"] and not allowed:
        raise DatasetChangedError(
            f"the state was taken over {state.get('dataset')}, the loader reads {ours['dataset']}. Load it into a "
            "loader of the same dataset, or pass allow_dataset_change=True and accept items twice or never."
        )


def _check_identity(state: Mapping[str, Any], ours: State, *, allow_batch_change: bool) -> None:
    fixes = {
        "kind": "Give the loader the kind of sampler that it had (none, one, or an iterable dataset)",
        "shuffle": "Pass the shuffle that it had",
        "global_batch": "Keep batch_size x world_size, or pass allow_batch_change=True",
        "world_size": "A user's sampler divides the data itself: keep the world size, or leave the sampler out",
        "num_workers": "An iterable dataset keeps its state in its workers: keep their number",
    }
    for key, fix in fixes.items():
        if key in ours and state.get(key) != ours[key] and not (key == "global_batch" and allow_batch_change):
            raise InputError(f"the state has {key} {state.get(key)!r}, the loader {ours[key]!r}. {fix}.")
