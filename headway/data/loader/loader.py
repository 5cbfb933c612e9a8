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

import os
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Union, cast

import torch
import torch.distributed as dist
import torch.utils.data
from torch.utils.data import IterableDataset

from headway.core.errors import InputError
from headway.core.files.private import runtime_directory
from headway.core.rng import derived_seed
from headway.core.tables import pick
from headway.data.bytes import account
from headway.data.bytes.order import TAILS, Sequence, in_order, permute
from headway.data.bytes.torch_examples import BatchMemory
from headway.data.bytes.torch_keyed import WORD, KeyedDataset, WorkerStart
from headway.data.loader.loader_cache import ExampleCache
from headway.data.loader.sampler_state import put_back
from headway.data.loader.threads import WORKERS, BatchWork, InThreads, MapStyleWork, reason_against
from headway.data.loader.views import InProcess, InWorkers, KeysOf, View, has_state, stream_iterator
from headway.data.loader.walks import OrderWalk, SamplerWalk, State, StreamWalk, between_passes

VERSION = 1
"""Of the state; a later one reads all before it."""

if TYPE_CHECKING:
    from headway.data.service.torch_served import ServedWalk

Walk = Union[OrderWalk, SamplerWalk, StreamWalk, "ServedWalk"]


class DatasetChangedError(InputError):
    """A state belongs to another dataset than the one it is loaded for."""


class DataLoader(torch.utils.data.DataLoader[Any]):
    """Loads batches as `torch.utils.data.DataLoader` does, in an order that survives interruptions.

    `batch_size` is per rank. `rank` and `world_size` default to
    torch.distributed's at the moment of `iter`, so a script needs no
    DistributedSampler. `tail` says what becomes of items that do not fill a
    global batch (`headway.data.bytes.order.TAILS`); `drop_last=True` is "drop".
    Each `iter` begins the next epoch, or goes on where `load_state_dict` was told to.

    `workers` says what the `num_workers` are (`threads.WORKERS`). Threads need
    a dataset that several of them may read at once, and that draws, if it
    draws, from `headway.data.generator()`. `cache_bytes` keeps examples of a
    pure dataset in memory, up to that much data, from their first reading on
    and never evicted (CoorDL's static cache); `cache` counts. `server` has
    them made once for all jobs of this host: "auto", a socket's path, or a
    `DataServer`; it owns order and draws, which `seed` does not repeat.

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
        server: Any = None,
        cache_bytes: int = 0,
        tail: Literal["short", "drop", "pad"] = "short",
        workers: Literal["processes", "threads", "auto"] = "processes",
    ) -> None:
        """Raise what torch raises, and `InputError` on bad values of our own, and on those that do not go together."""
        pick(WORKERS, workers, "kind of workers")
        # Before torch's own, which asks for them to warn of too many processes.
        self._workers, self._server, self._used = workers, server, "none"
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
        self._next_epoch, self._pid = 0, os.getpid()
        self._loaded: State | None = None
        self._walk: Walk | None = None
        self._place()
        self._check_together(sampler, batch_sampler, cache_bytes)
        self._cache = ExampleCache(cache_bytes) if cache_bytes else None
        self._watched = False
        """Whether a first batch was seen to draw from no generator that threads share."""
        self._memory = BatchMemory()
        self._chosen: str | None = None
        """What "auto" chose."""

    def __iter__(self) -> Any:
        """Begin the next epoch, or go on from the loaded state."""
        self._ended()  # a loop that was broken off
        if self._pid != os.getpid():  # a kept iterator belongs to the process of which this one is a fork
            self._iterator, self._pid = None, os.getpid()
        self._walk = self._begun()
        self._next_epoch, self._loaded = self._walk.epoch + 1, None
        return super().__iter__()

    def __len__(self) -> int:
        """Return the batches of a whole epoch on this rank."""
        if not self._owns_order:
            return super().__len__()
        return self._sequence().num_batches(self._place()[0])

    @property
    def cache(self) -> ExampleCache | None:
        """What `cache_bytes` keeps: hits, misses, bytes, refused; None without."""
        return self._cache

    @property
    def workers_used(self) -> str:
        """What the latest iterator loads with: "processes", "threads", "server", or "none" (the caller's thread)."""
        return self._used

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
        if not self.in_order and self.num_workers and self.workers_used != "threads":
            raise InputError(
                "in_order=False delivers batches in no repeatable order, so there is no exact state. Leave it True."
            )
        if self._streams and not has_state(self.dataset):
            raise InputError(
                f"{type(self.dataset).__name__} is an IterableDataset without state_dict() and load_state_dict(), so "
                "its position cannot be saved. Give it both, or use a map-style dataset."
            )
        if self._loaded is not None:
            where = self._loaded
        elif self._streams:
            where = self._place_in_stream()
        elif self._walk is not None:
            where = self._walk.state()
        elif self._owns_order or self._server is not None:
            where = {"epoch": self._next_epoch, **dict.fromkeys(self._place_keys(), 0)}
        else:
            where = between_passes(self._index_sampler, self._next_epoch)
        return {**self._identity(), **where}

    def _place_in_stream(self) -> State:
        """Return where a loop over an iterable dataset is.

        What the next workers begin with, and a pass without workers, is the dataset of this process: its state is part.
        """
        walk, dataset = self._walk, cast(Any, self.dataset)
        if walk is None:
            return {"epoch": self._next_epoch, "batches": 0, "dataset_state": dataset.state_dict()}
        assert isinstance(walk, StreamWalk)
        where = walk.state(persistent=self.persistent_workers)
        is_here = bool(self.num_workers) or walk.finished or not walk.states
        return {**where, "dataset_state": dataset.state_dict()} if is_here else where

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
        missing = {"epoch", *self._place_keys()} - set(state)
        if missing:
            raise InputError(f"the state lacks {', '.join(sorted(missing))}. Pass what state_dict() gave, whole.")
        if "position" in self._place_keys() and not 0 <= state["position"] <= self._num_items():
            raise InputError(f"position {state['position']} lies outside a dataset of {self._num_items()} items.")
        self._seed = state["seed"]
        self._loaded = {key: value for key, value in state.items() if key not in ours}
        self._next_epoch = state["epoch"]
        if "between" in state:
            put_back(self._index_sampler, state["between"])
        if "dataset_state" in state:
            cast(Any, self.dataset).load_state_dict(state["dataset_state"])
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

    def _place_keys(self) -> tuple[str, ...]:
        """Return what says, besides the epoch, where a loop is; a served loader's walk says it in its own way."""
        return () if self._server is not None else ("position",) if self._owns_order else ("batches",)

    def _identity(self) -> State:
        """Return what a state must agree with: how batches are made, not where the loop is."""
        kind = "order" if self._owns_order else "stream" if self._streams else "sampler"
        same: State = {"version": VERSION, "kind": kind, "seed": self._seed, "dataset": fingerprint(self.dataset)}
        if self._server is not None:
            return {**same, "kind": "server", "shuffle": self._shuffle}
        if self._owns_order:
            return {**same, "shuffle": self._shuffle, "global_batch": self._sequence().global_batch}
        size = self.num_workers if self._streams else self._place()[1]
        return {**same, "num_workers" if self._streams else "world_size": size}

    def _begun(self) -> Walk:
        """Return the walk of the next iterator."""
        loaded = self._loaded or {}
        epoch = self._next_epoch
        if self._server is not None:
            from headway.data.service import torch_served as served

            return served.walk(self, epoch, loaded)
        if self._owns_order:
            size = self._num_items()
            order = permute(size, self._seed, epoch) if self._shuffle else in_order(size)
            return OrderWalk(epoch, self._seed, self._sequence(loaded.get("position", 0)), order, self._place()[0])
        if self._streams:
            kept = self._walk if self.persistent_workers and isinstance(self._walk, StreamWalk) else None
            before = {"workers": kept.states} if kept is not None and kept.finished and not loaded else loaded
            return StreamWalk(epoch, self.num_workers, before=before)
        before = dict(loaded.get("sampler", {}))
        return SamplerWalk(
            epoch, self._index_sampler, self._auto_collation, self._seed, skip=loaded.get("batches", 0), before=before,
            digest=loaded.get("digest"),
        )  # fmt: skip

    def _get_iterator(self) -> Any:
        self._used = "none" if self._server is None else "server"
        view = View(self, generator=torch.Generator().manual_seed(derived_seed(self._seed, "workers") & WORD))
        if self._server is not None:
            from headway.data.service import torch_served as served

            assert isinstance(self._walk, served.ServedWalk)
            return served.iterator(self, view)
        if self.num_workers:
            self._used = "processes"
        if self._streams:
            return stream_iterator(self)
        keyed, keys = self._keyed(), KeysOf(self)
        vars(view).update(dataset=keyed, _index_sampler=keys, worker_init_fn=WorkerStart(self.worker_init_fn))
        if self.num_workers == 0:
            return InProcess(view)
        self._used = self._kind(keys)
        if self._used == "threads":
            return self._in_threads(view, keyed)
        self.check_worker_number_rationality()
        return InWorkers(view)

    def _keyed(self, *, fresh: bool = False) -> Any:
        """Return what torch's fetchers, and threads, read in place of the dataset; `fresh`: past the cache."""
        cached = None if self._cache is None or fresh else self._cache.in_front(self)
        return KeyedDataset(self.dataset, self._place()[0], cached)

    def _work(self, keyed: Any) -> tuple[BatchWork, list[Any], Any]:
        """Return how threads make batches, what may hold generators of its own, and the dataset if it is a user's."""
        work = MapStyleWork(keyed, self.collate_fn, batched=self._auto_collation, memory=self._memory)
        return work, [self.dataset, self.collate_fn], self.dataset

    def _in_threads(self, view: View, keyed: Any) -> InThreads:
        work, holders, _ = self._work(keyed)
        iterator = InThreads(view, work, None if self._watched else holders)
        self._watched = True
        return iterator

    def _kind(self, keys: KeysOf) -> str:
        """Return "threads" or "processes": as asked, or as the first examples say, once."""
        if self._workers != "auto":
            return self._workers
        if self._chosen is None:
            work, _, dataset = self._work(self._keyed(fresh=True))
            first = keys.first()
            reason = self._only_processes() or (reason_against(work, first, dataset) if first else None)
            self._chosen = "processes" if reason else "threads"
            account.told("workers", {"dataset": type(self.dataset).__name__, "used": self._chosen, "reason": reason})
        return self._chosen

    def _only_processes(self) -> str | None:
        """Say which argument only worker processes can do justice to, None when there is none."""
        if self._streams:
            return "an iterable dataset is read by one thread at a time"
        if self.worker_init_fn is not None:
            return "worker_init_fn prepares a process"
        return "multiprocessing_context starts processes" if self.multiprocessing_context is not None else None

    def _check_together(self, sampler: Any, batch_sampler: Any, cache_bytes: int) -> None:
        """Raise `InputError` on arguments that do not go together."""
        reason = self._only_processes() if self._workers == "threads" else None
        if reason is not None:
            raise InputError(f"{reason}, which threads do not have. Leave it out, or pass workers='processes'.")
        if cache_bytes < 0:
            raise InputError(f"cache_bytes is {cache_bytes}; a cache holds 0 or more. Raise it.")
        if cache_bytes and self._streams:
            raise InputError("cache_bytes needs a map-style dataset: a stream's examples have no index. Leave it out.")
        if self._server is None:
            return
        from headway.data.service.stock import DataServer

        if not isinstance(self._server, (str, os.PathLike, DataServer)):
            raise InputError(f"server is {self._server!r}; pass 'auto', the path of a socket, or DataServer(...).")
        if sampler is not None or batch_sampler is not None:
            raise InputError("with server= the server owns the order. Leave sampler and batch_sampler out.")
        if self._streams:
            raise InputError("server= needs a map-style dataset: nobody can share the place in a stream. Leave it out.")
        if cache_bytes:
            raise InputError("with server= the server keeps examples. Pass DataServer(cache_bytes=...) instead.")
        if self._server == "auto" or (isinstance(self._server, DataServer) and self._server.path is None):
            runtime_directory()  # asked now: at the first batch the job has been set up for nothing

    def check_worker_number_rationality(self) -> None:
        """Warn of more worker processes than cores, as torch does; threads may be more."""
        if "processes" in (self._workers, self._used):
            super().check_worker_number_rationality()

    def _ended(self) -> None:
        """Report what the cache did: a loop came to its end."""
        if self._cache is not None:
            self._cache.report()


def fingerprint(dataset: Any) -> str:
    """Return what tells a dataset from another: its own `fingerprint` (value or method) or type, and its length."""
    own = own_fingerprint(dataset)
    name = f"{type(dataset).__module__}.{type(dataset).__qualname__}" if own is None else str(own)
    # A class of the script itself is `__main__.X` or `module.X`, depending on how the script was started.
    name = name.removeprefix("__main__.")
    return f"{name}[{len(dataset)}]" if hasattr(dataset, "__len__") else name


def own_fingerprint(dataset: Any) -> Any:
    """Return what a dataset says of itself by a `fingerprint` or `_fingerprint` (value or method), else None."""
    own = getattr(dataset, "fingerprint", None) or getattr(dataset, "_fingerprint", None)
    return own() if callable(own) else own


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
