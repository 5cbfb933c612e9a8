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
import contextlib
import itertools
import os
import secrets
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from torch._utils import KeyErrorMessage
from torch.utils.data import default_collate, default_convert
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter

from headway.core import errors
from headway.core.channel import Channel, ChannelClosed, connect
from headway.core.errors import BackgroundError, HeadwayError, InputError
from headway.core.ring import RingReader
from headway.core.rng import derived_seed
from headway.data.audit import AuditSum
from headway.data.batches import Ints
from headway.data.job_order import DataShareError
from headway.data.messages import (
    FROM_SERVER,
    PROTOCOL,
    Begin,
    Failed,
    Filled,
    Freed,
    Join,
    Over,
    Rings,
    Welcome,
    packed_items,
    unpacked_items,
)
from headway.data.packing import unpack
from headway.data.progress import Progress
from headway.data.runtime import account, serving
from headway.data.runtime.keyed import WORD, Draws, generators_kept
from headway.data.runtime.pipeline_loader import Batches
from headway.data.runtime.preparers import base_of, identity, restored
from headway.data.runtime.purity import picture
from headway.data.runtime.views import Empty, InProcess, View
from headway.data.runtime.walks import State, Taken
from headway.data.server import DataServer

NUM_HELD = 4
"""Batches that a loop may keep without copies."""

MOST_RESTARTS = 3
"""A server that dies more often than that is ill."""

ANSWER_S = 120.0
"""Longest that a server may take to look at its dataset and let a job in."""

_number = itertools.count()
"""Served loaders of this process: ranks of one job make theirs in the same order."""


@dataclass(slots=True, kw_only=True)
class ServedWalk(Taken):
    """A pass in a server's order: the state is the epoch and one bit per item, good for any rank of any world."""

    progress: Progress

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
            told = {"kind": "served", "expected": [whole.count, whole.low, whole.high], "rank": rank}
            return {**told, "tail": self.progress.tail, "global_batch": self.progress.global_batch}

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
    progress = Progress(
        range(len(loader.dataset)) if items is None else items,
        global_batch=(loader.batch_size or 1) * world, tail=loader._tail,
    )  # fmt: skip
    if "remaining" in loaded:
        progress.load_state_dict({"version": 1, "epoch": epoch, "remaining": loaded["remaining"]})
    progress.epoch = epoch
    return ServedWalk(epoch=epoch, progress=progress)


def iterator(loader: Any, view: View, place: ServedWalk) -> Served | InProcess:
    """Return an iterator of `loader` over batches that a server makes.

    Raises what a server that cannot be had raises: `InputError`, `HeadwayError`, `DataShareError`; torch's
    `RuntimeError` when it is not there within the loader's `timeout`.
    """
    if not len(loader.dataset):  # there is nothing to serve, and no order of it
        return InProcess(View(view, _index_sampler=_Nothing(0), num_workers=0, timeout=0))
    links = [link for link in vars(loader).get("_links", []) if link.fits(loader)]
    busy = [link for link in links if link.busy]
    link = next((link for link in links if not link.busy), None) or Link(loader)
    vars(loader)["_links"] = [*busy, link]  # one that is left over leaves its job
    return Served(View(view, _index_sampler=_Nothing(len(loader)), num_workers=0), link, place)


class _Nothing:
    """An index sampler of a length, for torch's base class: indices are the server's business."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def loader(self) -> None:
        """Name no loader to report to: see `headway.data.runtime.views.Walked`."""

    def follow(self, walk: ServedWalk) -> None:
        """Stay as it is: every pass over nothing is the same."""


class Link:
    """A loader's connection to its server: one rank of one job, which begins one pass after the other."""

    def __init__(self, loader: Any) -> None:
        """Connect as a job of its own: several iterators at once are several jobs."""
        if loader.worker_init_fn is not None:
            raise InputError("with server= the loader has no workers to prepare. Leave worker_init_fn out.")
        given = loader._server
        # With "auto", the workers that the loader was to have are the server's threads.
        auto = DataServer(threads=loader.num_workers) if given == "auto" else None
        self.options = given if isinstance(given, DataServer) else auto
        self._chosen = auto is None
        self._pid, self._picture = os.getpid(), picture(loader.dataset)
        self._dataset, items = base_of(loader.dataset)
        rank, world = loader._place()
        self.rank, self.world_size, self.items = rank, world, range(len(self._dataset)) if items is None else items
        self._path = Path(str(given)) if self.options is None else _path(self._dataset, self.options)
        self._join = Join(
            protocol=PROTOCOL, job=_job_name(self.options, world), rank=rank, world_size=world,
            batch_size=loader.batch_size or 1, shuffle=loader._shuffle, tail=loader._tail,
            fingerprint=identity(self._dataset), items=None if items is None else packed_items(items),
            collated=_collates_by_default(loader), num_held=NUM_HELD,
        )  # fmt: skip
        self._wait_s: float | None = loader.timeout or None
        self.restarts = 0
        """Servers that were lost."""
        self.user: weakref.ref[Served] | None = None
        self.held: _Held
        self._counted: dict[str, dict[str, int]] = {}
        self.threads = 1
        """Threads of the server: it may make so many batches at once."""
        self._num_begun = 0
        self._connect()

    @property
    def busy(self) -> bool:
        """Whether an iterator goes on with it."""
        user = self.user() if self.user is not None else None
        return user is not None and not user.walk.finished

    def fits(self, loader: Any) -> bool:
        """Whether this is still the connection of this loader, in this process, over this dataset."""
        world = loader._place()[1]
        same = (loader.batch_size or 1, world) == (self._join.batch_size, self._join.world_size)
        return same and self._pid == os.getpid() and self._picture == picture(loader.dataset)

    def begin(self, progress: Progress, *, again: bool = False) -> None:
        """Begin a pass; `again`: go on with it after a server was lost."""
        self._num_begun += 1
        base = progress.base()
        history = [packed_items(items) for items in progress.history] if again else None
        self._channel.send(
            Begin(self._num_begun, progress.epoch, None if base is None else packed_items(base), history)
        )

    def receive(self) -> Filled | Over:
        """Return the next batch or end. Raises `ChannelClosed`, what the server refused, and torch's on a timeout."""
        left_s = self._left_s()
        while True:
            try:
                message, fds = self._channel.receive(left_s())
            except TimeoutError:
                raise self._timed_out() from None
            if isinstance(message, Rings):
                self.held.readers[message.number] = RingReader(fds[0])
            for fd in fds:
                os.close(fd)
            if isinstance(message, Failed):
                raise _refusal(message)
            if isinstance(message, (Filled, Over)) and message.begun == self._num_begun:
                return message
            if isinstance(message, Filled) and message.slot >= 0:
                self.held.drop(message)

    def count(self, over: Over) -> None:
        """Note what the server did during a pass, for whomever, and how this job's order leaned towards its cache."""
        told = {"server": over.counts, "order": over.order}
        for what, now in told.items() if self.rank == 0 else ():  # what ranks count is added up: one of them tells
            before = self._counted.get(what, {})
            account.counted(what, **{name: value - before.get(name, 0) for name, value in now.items()})
            self._counted[what] = now

    def again(self, error: ChannelClosed, progress: Progress) -> None:
        """Begin anew with another server after one was lost. Raises `BackgroundError` where that is not ours to do."""
        where = "state_dict() still knows where the loop is."
        if self.options is None:
            raise BackgroundError(
                f"the data server at {self._path} is gone ({error}). Start it again; {where}"
            ) from error
        if self.restarts == MOST_RESTARTS:
            raise BackgroundError(
                f"the data server was lost {MOST_RESTARTS + 1} times. See {self._path.with_suffix('.log')}; {where}"
            ) from error
        self.restarts += 1
        if self._join.world_size == 1:  # the server may be there still, and not know yet that this job is gone
            self._join = msgspec.structs.replace(self._join, job=f"{self._join.job}.again")
        account.counted("server", restarts=1)
        warnings.warn(
            f"the data server at {self._path} (process {self._channel.peer.pid}) ended while this loop used it. It is "
            f"started again; the epoch goes on behind the {len(progress.history)} batches that the loop has taken: "
            "none is lost, none comes twice.", stacklevel=2,
        )  # fmt: skip
        self._connect()
        self.begin(progress, again=True)

    def _connect(self) -> None:
        """Connect and join; start a server where that is ours to do and none is there."""
        left_s = self._left_s()
        for attempt in range(3):
            try:
                if self.options is not None:
                    serving.start(self._path, self._dataset, self.options, timeout_s=left_s())
                self._channel = connect(self._path, 0.0 if self.options is None else 5.0, types=FROM_SERVER)
                weakref.finalize(self, self._channel.close)
                self._channel.send(self._join)
                left = left_s()
                welcome = self._channel.receive(ANSWER_S if left is None else left)[0]
                break
            except TimeoutError:
                if self._wait_s is not None:
                    raise self._timed_out() from None
                raise HeadwayError(
                    f"the data server at {self._path} does not answer. See its log, or end it."
                ) from None
            except ChannelClosed as error:  # one that was just ending: the next attempt starts another
                if attempt == 2 or self.options is None:
                    raise HeadwayError(f"no data server at {self._path}: {error}") from error
        if isinstance(welcome, Failed):
            raise _refusal(welcome)
        assert isinstance(welcome, Welcome)
        self.held, self._counted = _Held(self._channel), {}
        self._check(welcome)

    def _left_s(self) -> Callable[[], float | None]:
        """Return what says how much of the loader's `timeout` is left from now on; None: there is none."""
        if self._wait_s is None:
            return lambda: None
        deadline = time.monotonic() + self._wait_s
        return lambda: max(deadline - time.monotonic(), 0.0)

    def _timed_out(self) -> RuntimeError:
        return RuntimeError(f"DataLoader timed out after {self._wait_s} seconds")

    def _check(self, welcome: Welcome) -> None:
        """Say where the server that is there is not the one that was meant."""
        self.threads = DataServer(threads=int(welcome.options.get("threads") or 0)).num_threads
        account.told("server", {"path": str(self._path), "options": welcome.options, "notes": welcome.notes})
        if self.options is None or not self._chosen:
            return
        wanted = msgspec.to_builtins(self.options.shared())
        other = sorted(key for key, value in welcome.options.items() if msgspec.to_builtins(wanted.get(key)) != value)
        if other:
            warnings.warn(
                f"the data server of this dataset was started with another {', '.join(other)}: the options of the "
                "first job count.", stacklevel=2,
            )  # fmt: skip


class _Held:
    """Slots that this process holds, and how they are given back: also by a collector, in whatever thread."""

    def __init__(self, channel: Channel) -> None:
        self.readers: dict[int, RingReader] = {}
        self._channel, self._pid = channel, os.getpid()
        self._out: set[tuple[int, int, int]] = set()

    def memory(self, filled: Filled) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a batch's memory, writable: that of the slot while few are held, else a copy. It frees itself."""
        for number in [number for number in self.readers if number < filled.ring]:
            del self.readers[number]  # batches that lie there keep its memory
        reader, slot = self.readers[filled.ring], (filled.ring, filled.slot, filled.generation)
        view = reader.view(filled.slot, filled.generation, writable=True)
        if len(self._out) >= NUM_HELD:
            copy = np.frombuffer(bytearray(view), np.uint8)
            self._release(reader, slot)
            return copy
        self._out.add(slot)
        root: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(view, np.uint8)
        weakref.finalize(root, self._release, reader, slot).atexit = False
        return root

    def drop(self, filled: Filled) -> None:
        """Give back the slot of a batch that nobody wants."""
        self._release(self.readers[filled.ring], (filled.ring, filled.slot, filled.generation))

    def _release(self, reader: RingReader, slot: tuple[int, int, int]) -> None:
        """Free a slot and tell the server; not in a fork, whose copy of a batch says nothing about the batch."""
        if self._pid != os.getpid():
            return
        self._out.discard(slot)
        reader.release(*slot[1:])
        # It may be gone, or so busy that it will look by itself.
        with contextlib.suppress(ChannelClosed, TimeoutError):
            self._channel.send(Freed(), timeout_s=0.0)


class Served(_BaseDataLoaderIter):
    """An iterator over batches that a server makes; torch's own base class, so that recorders see each `next`."""

    def __init__(self, view: View, link: Link, place: ServedWalk) -> None:
        super().__init__(view)  # type: ignore[arg-type]  # it reads attributes and nothing else
        self.walk, self._link = place, link
        self._collate, self._batched, self._seed = view.collate_fn, view._auto_collation, view._seed
        self._pipeline = view.dataset if isinstance(view.dataset, Batches) else None
        link.user = weakref.ref(self)
        self._begin()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin the next pass: a loader with persistent workers keeps its iterator."""
        super()._reset(loader, first_iter)
        self.walk = loader._walk
        self._begin()

    def _begin(self) -> None:
        self.walk.begin(self._link.items, self._link.rank)
        self._lost(None)

    def __next__(self) -> Any:
        try:
            while (data := super().__next__()) is Empty.BATCH:
                pass
            return data
        except StopIteration:
            self.walk.finished = True
            raise

    def _next_data(self) -> Any:
        if self.walk.finished:
            raise StopIteration
        filled = self._received()
        if isinstance(filled, Over):
            self._link.count(filled)
            raise StopIteration
        if filled.error is not None:
            self._took(filled, unpacked_items(filled.everybody or b""))
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
        with generators_kept(), Draws(seed, shared=True):
            return collate(data if self._batched else data[0])


def _path(dataset: Any, options: DataServer) -> Path:
    return Path(options.path) if options.path else serving.path_for(dataset)


def _job_name(options: DataServer | None, world_size: int) -> str:
    """Return a name that all ranks of this job agree on and no other job has."""
    number = next(_number)
    if options is not None and options.job is not None:
        return f"{options.job}.{number}"
    if world_size == 1:
        return f"{os.getpid()}.{number}.{secrets.token_hex(4)}"
    here = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")]
    if not here[1]:
        raise InputError(
            f"the {world_size} ranks have no name for their job in common. Pass server=DataServer(job='NAME')."
        )
    if int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) != world_size:
        raise InputError(
            f"a data server serves the ranks of one host; this job has {world_size} on several. Leave server= out."
        )
    # The next run has the same address and id, but a folder of its own: .../attempt_0/RANK/error.json, or RUN/logs/...
    run = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"{'.'.join(here)}.{zlib.crc32(os.fsencode(run)):08x}.{attempt}.{number}"


def _collates_by_default(loader: Any) -> bool:
    if isinstance(loader.dataset, Batches):
        return loader.dataset.collate is None
    return loader.batch_size is not None and loader.collate_fn in (default_collate, default_convert)


def _refusal(failed: Failed) -> HeadwayError:
    return DataShareError(failed.text) if failed.kind == "DataShareError" else InputError(failed.text)


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
