"""The client of a data server: the iterator of `DataLoader(server=...)`, and where its loop stands.

Batches are torch tensors over a slot of memory that the server filled; the
slot is the server's again when the last tensor over it is gone. A loop that
keeps many batches gets copies instead. Examples for a collate function of the
user's are views of a slot in the same way. What the loop took is known here
and nowhere else, so a server that is killed costs nothing: one that was
started automatically is started again, at most three times, and goes on with
what is still needed; otherwise the loop ends with one clear error.
"""

from __future__ import annotations

import builtins
import os
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch._utils import KeyErrorMessage
from torch.utils.data._utils.pin_memory import pin_memory

from headway.core import errors
from headway.core.rng import derived_seed
from headway.core.wire.channel import ChannelClosed
from headway.data.bytes import account
from headway.data.bytes.packing import unpack
from headway.data.bytes.torch_keyed import WORD, Draws, generators_kept
from headway.data.loader.audit import AuditSum
from headway.data.loader.views import Empty, InProcess, View, Walked, check_process
from headway.data.loader.walks import State, Taken
from headway.data.pipeline.torch_loader import PipelineDataset
from headway.data.service.batches import Ints, JobProgress
from headway.data.service.messages import Filled, Over
from headway.data.service.torch_links import DataServerClient
from headway.data.service.torch_preparers import base_of, restored
from headway.runtime.in_rank.guard import OfScript


class LeaveFn(Protocol):
    """Goes on with a pass that a server can serve no more."""

    def __call__(self, cause: Exception, indices: Iterator[Any]) -> Any:
        """Return what has a method `_next_data` that reads the batches of `indices`."""
        ...


@dataclass(slots=True, kw_only=True)
class ServedWalk(Taken):
    """A pass in a server's order: the state is the epoch and one bit per item, good for any rank of any world."""

    progress: JobProgress

    def state(self) -> State:
        """Return epoch and what is left of it; the end of an epoch is the start of the next."""
        if self.finished:
            return {"epoch": self.epoch + 1}
        state = self.progress.state_dict()
        return {"epoch": state["epoch"], "remaining": state["remaining"]}

    def begin(self, items: Any, rank: int) -> None:
        """Note the beginning where passes are recorded."""

        def facts() -> State:
            whole = AuditSum.of(np.asarray(items, np.int64))
            shared = {"kind": "served", "expected": [whole.count, whole.low, whole.high], "rank": rank}
            return {**shared, "tail": self.progress.tail, "global_batch": self.progress.global_batch}

        self._begin(facts, 0)
        base = self.progress.base()
        if self.deliveries is not None and base is not None and rank == 0:  # once, for all ranks
            self.deliveries.add(AuditSum.of(np.setdiff1d(items, base)))

    def got(self, items: Any, everybody: Any) -> None:
        """Note that the loop takes a batch."""
        if self.deliveries is not None:
            self.deliveries.handed(AuditSum.of(items))
        self.progress.took(everybody)
        self.taken += 1


def walk(loader: Any, epoch: int, loaded: State) -> ServedWalk:
    """Return where the next iterator of `loader` begins: a whole epoch, or what a state says is left of one."""
    world = loader._place()[1]
    items = base_of(loader.dataset)[1]
    progress = JobProgress(
        range(len(loader.dataset)) if items is None else items,
        global_batch=(loader.batch_size or 1) * world, tail=loader._tail,
    )  # fmt: skip
    if "remaining" in loaded:
        progress.load_state_dict({"version": 1, "epoch": epoch, "remaining": loaded["remaining"]})
    progress.epoch = epoch
    return ServedWalk(epoch=epoch, progress=progress)


def iterator(loader: Any, view: View) -> Served | InProcess:
    """Return an iterator of `loader` over batches that a server makes.

    Raises what a server that cannot be had raises: `InputError`, `HeadwayError`, `DataShareError`; torch's
    `RuntimeError` when it is not there within the loader's `timeout`.
    """
    if not len(loader.dataset):  # there is nothing to serve, and no order of it
        return InProcess(View(view, _index_sampler=_Nothing(0), num_workers=0, timeout=0))
    links = [link for link in vars(loader).get("_links", []) if link.fits(loader)]
    busy = [link for link in links if link.busy]
    link = next((link for link in links if not link.busy), None) or DataServerClient(loader)
    vars(loader)["_links"] = [*busy, link]  # one that is left over leaves its job
    return Served(View(view, _index_sampler=_Nothing(len(loader)), num_workers=0), link)


class _Nothing:
    """An index sampler of a length, for torch's base class: indices are the server's business."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def loader(self) -> None:
        """Name no loader to report to: see `headway.data.loader.views.Walked`."""

    def follow(self, walk: ServedWalk) -> None:
        """Stay as it is: every pass over nothing is the same."""


class Served(Walked):
    """An iterator over batches that a server makes; torch's own base class, so that recorders see each `next`."""

    walk: ServedWalk  # type: ignore[assignment]  # of the same shape

    def __init__(self, view: View, link: DataServerClient) -> None:
        super().__init__(view)
        self._link, self._pid = link, os.getpid()
        self._collate, self._batched, self._seed = view.collate_fn, view._auto_collation, view._seed
        self._shuffle = view._shuffle
        self._pipeline = view.dataset if isinstance(view.dataset, PipelineDataset) else None
        self.leave: LeaveFn | None = None
        """Who reads the rest of a pass should this fail; None: the loop is told."""
        self._of_script = OfScript()
        self._single: Any = None
        link.user = weakref.ref(self)
        self._begin()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin the next pass: a loader with persistent workers keeps its iterator."""
        super()._reset(loader, first_iter)
        self._single = None
        self._begin()

    def _begin(self) -> None:
        self.walk.begin(self._link.items, self._link.rank)
        self._lost(None)

    def _next_data(self) -> Any:
        if self._single is None:
            cause: Exception | None = None
            num_taken = len(self.walk.progress.history)
            try:
                return self._served()
            except StopIteration:
                raise
            except Exception as error:
                if self.leave is None or error in self._of_script:
                    raise
                cause = error
            self._single = self.leave(cause, self._rest(num_taken))
        return self._single._next_data()  # outside of the handler: the script's own exceptions have no context

    @property
    def is_alone(self) -> bool:
        """Whether its job has one rank."""
        return bool(self._link.world_size == 1)

    def _rest(self, num_taken: int) -> Iterator[Any]:
        """Yield the indices of the batches that the loop has not got, which has got `num_taken`; of a job of one rank.

        What is left of a shuffled pass is shuffled again: the server's order of it is not known here.
        """
        progress, taken = self.walk.progress, self.walk.progress.history[num_taken:]
        left = progress.remaining()
        if self._shuffle:
            left = np.random.default_rng(derived_seed(self._seed, "rest", self.walk.epoch)).permutation(left)
        size = progress.global_batch
        whole = len(left) // size * size if progress.tail == "drop" else len(left)
        for batch in (*taken, *(left[start : start + size] for start in range(0, whole, size))):
            yield batch.tolist() if self._batched else int(batch[0])

    def _served(self) -> Any:
        check_process(self._pid)
        if self.walk.finished:
            raise StopIteration
        filled = self._received()
        if isinstance(filled, Over):
            self._link.count(filled)
            raise StopIteration
        if filled.error is not None:
            assert filled.everybody is not None, "a batch that failed names its items"
            self._took(filled, filled.everybody)
            raise _failure(filled.error)
        memory = self._link.held.memory(filled)
        everybody, data = unpack(memory.data, marked=restored)
        items = self._took(filled, everybody.copy())
        data = Empty.BATCH if filled.num_missing == len(items) else self._made(data, filled.collated)
        ended = time.perf_counter_ns()
        account.loaded(
            ended - filled.fetch_ns - filled.prep_ns, ended, batch=self._num_yielded, items=len(items),
            fetch_ns=filled.fetch_ns, prep_ns=filled.prep_ns, bytes=memory.nbytes, workers=self._link.threads,
        )  # fmt: skip
        if self._pin_memory:
            data = pin_memory(data, self._pin_memory_device)  # type: ignore[no-untyped-call]  # nor for this
        return data

    def _received(self) -> Filled | Over:
        """Return the next batch or end of this pass; what came of an earlier one is dropped."""
        while True:
            try:
                return self._link.receive()
            except ChannelClosed as error:
                self._lost(error)

    def _lost(self, error: ChannelClosed | None) -> None:
        """Begin the pass, or go on with it after the server was lost, until a server holds."""
        while True:
            try:
                if error is None:
                    self._link.begin(self.walk.progress)
                else:
                    self._link.again(error, self.walk.progress)
                return
            except ChannelClosed as another:
                error = another

    def _took(self, filled: Filled, everybody: Ints) -> Ints:
        """Note that the loop takes a batch; return this rank's items of it."""
        items = everybody[self._link.rank :: self._link.world_size]
        self.walk.got(items, everybody)
        if self._pipeline is not None and filled.num_missing:
            self._pipeline.count_missing(filled.num_missing)
        return items

    def _made(self, data: Any, collated: bool) -> Any:
        """Return the batch as the loop gets it; a collate function of the user's draws under the batch's own seed."""
        if collated:
            return data
        collate = self._collate if self._pipeline is None else self._pipeline.collate
        if collate is None:
            return data
        batch = len(self.walk.progress.history)
        seed = derived_seed(self._seed, "collate", self.walk.epoch, batch, self._link.rank) & WORD
        with generators_kept(), Draws(seed, shared=True), self._of_script:
            return collate(data if self._batched else data[0])


def _failure(text: str) -> Exception:
    """Return the error of an example as the loop raises it: of its own class where that is headway's or a builtin."""
    kind, _, told = text.partition("\n")
    known = getattr(errors, kind, None) or getattr(builtins, kind, None)
    message: Any = f"Caught {kind} in the data server.\nOriginal {told}"
    # Of an exit and the like remains what they say; a StopIteration would end the epoch as if it were over.
    if not isinstance(known, type) or not issubclass(known, Exception) or issubclass(known, StopIteration):
        return RuntimeError(message)
    try:
        return known(KeyErrorMessage(message) if known is KeyError else message)
    except TypeError:  # one that wants other arguments
        return RuntimeError(message)
