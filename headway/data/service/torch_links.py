"""A loader's connection to its data server: one rank of one job, which begins one pass after the other.

A server that was started automatically is started again when it is lost, at
most three times. What the link needs to go on exactly is what its own loop
took (`headway.data.service.batches`) and what the lost server told of the ranks
that need nothing of the pass any more (`messages.Decided`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import select
import time
import warnings
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from torch.utils.data import default_collate, default_convert

from headway.core.errors import BackgroundError, HeadwayError, InputError
from headway.core.machine.ring import RingReader
from headway.core.wire.channel import Channel, ChannelClosed, connect
from headway.data.bytes import account
from headway.data.guard.picture import Picture
from headway.data.pipeline.torch_loader import PipelineDataset
from headway.data.service import torch_start as serving
from headway.data.service.batches import JobProgress
from headway.data.service.messages import (
    FROM_SERVER,
    PROTOCOL,
    Begin,
    Decided,
    Filled,
    Freed,
    Join,
    Over,
    RequestFailed,
    Rings,
    Waiting,
    Welcome,
)
from headway.data.service.stock import DataServer
from headway.data.service.torch_preparers import base_of, identity

if TYPE_CHECKING:
    from headway.data.service.torch_served import Served

NUM_HELD = 4
"""Batches that a loop may keep without copies."""

MOST_RESTARTS = 3
"""A server that dies more often than that is ill."""

ANSWER_S = 120.0
"""Longest that a server may take to look at its dataset and let a job in."""

_number = itertools.count()
"""Served loaders of this process: ranks of one job make theirs in the same order."""


class DataServerClient:
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
        self._pid, self._picture = os.getpid(), Picture(loader.dataset).state
        self._dataset, items = base_of(loader.dataset)
        rank, world = loader._place()
        self.rank, self.world_size, self.items = rank, world, range(len(self._dataset)) if items is None else items
        self._path = Path(str(given)) if self.options is None else _path(self._dataset, self.options)
        self._join = Join(
            protocol=PROTOCOL, job=_job_name(self.options, world), rank=rank, world_size=world,
            batch_size=loader.batch_size or 1, shuffle=loader._shuffle, tail=loader._tail,
            fingerprint=identity(self._dataset), items=items,
            collated=loader.dataset.collate is None if isinstance(loader.dataset, PipelineDataset)
            else loader.batch_size is not None and loader.collate_fn in (default_collate, default_convert),
            num_held=NUM_HELD,
        )  # fmt: skip
        self._wait_s: float | None = loader.timeout or None
        self.restarts = 0
        """Servers that were lost."""
        self.user: weakref.ref[Served] | None = None
        self.held: _Held
        self._counted: dict[str, dict[str, int]] = {}
        self.threads = 1
        """Threads of the server: it may make so many batches at once."""
        self._num_begun = self._num_passes = 0
        self._warned = False
        self._told: dict[int, Decided] = {}
        self._inherited: dict[int, Decided] = {}
        """Number of a pass, as its `Begin` has it -> the latest that was told of it: by this server, by lost ones."""
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
        return same and self._pid == os.getpid() and self._picture == Picture(loader.dataset).state

    def begin(self, progress: JobProgress, *, again: bool = False) -> None:
        """Begin a pass; `again`: go on with it after a server was lost."""
        self._num_begun += 1
        if again:  # this pass and those behind it have another number now
            self._inherited = {number + 1: told for number, told in (self._inherited | self._told).items()}
            self._told = {}
        else:
            self._num_passes += 1
        told = self._inherited.get(self._num_begun)
        begin = Begin(
            self._num_begun, progress.epoch, progress.base(), progress.history if again or told else None,
            index=self._num_passes - 1, decided=None if told is None else told.behind(len(progress.history)),
        )  # fmt: skip
        self._channel.send(begin)

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
            if isinstance(message, RequestFailed):
                raise message.error()
            if isinstance(message, Waiting):
                _warn_of_missing(message)
            if isinstance(message, Decided):
                self._told = {n: told for n, told in self._told.items() if n >= self._num_begun}
                self._told[message.begun] = message
            if isinstance(message, (Filled, Over)) and message.begun == self._num_begun:
                return message
            if isinstance(message, Filled) and message.slot >= 0:
                self.held.drop(message)

    def count(self, over: Over) -> None:
        """Note what the server did during a pass, for whomever, and how this job's order leaned towards its cache."""
        if over.finding and not self._warned:
            self._warned = True
            account.told("cache", {"finding": over.finding})
            text = f"the data server at {self._path} keeps no examples any more: {over.finding}. They are read anew."
            with contextlib.suppress(RuntimeWarning):  # a script that makes errors of warnings loses no batch by it
                warnings.warn(text, RuntimeWarning, stacklevel=2)
        told = {"server": over.counts, "order": over.order}
        for what, now in told.items() if self.rank == 0 else ():  # what ranks count is added up: one of them tells
            before = self._counted.get(what, {})
            account.counted(what, **{name: value - before.get(name, 0) for name, value in now.items()})
            self._counted[what] = now

    def again(self, error: ChannelClosed, progress: JobProgress) -> None:
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
                weakref.finalize(self, _leave, self._channel, self._pid)
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
        if isinstance(welcome, RequestFailed):
            raise welcome.error()
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
        if _hung_up(self._channel):  # a send would fail, and close what it has said before it went
            return
        # It may be so busy that it will look by itself.
        with contextlib.suppress(ChannelClosed, TimeoutError):
            self._channel.send(Freed(), timeout_s=0.0)


def _leave(channel: Channel, pid: int) -> None:
    """End the connection; a fork of the process that has it lets go of its copy only."""
    (channel.close if pid == os.getpid() else channel.abandon)()


def _hung_up(channel: Channel) -> bool:
    """Whether the process at the other end is gone, or the channel closed."""
    if channel.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(channel.fileno(), 0)
    return bool(poll.poll(0))


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


def _warn_of_missing(waiting: Waiting) -> None:
    ranks = ", ".join(map(str, waiting.ranks))
    text = (
        f"the data server has waited {waiting.since_s:g} s for rank {ranks} of this job, which was connected when the "
        "last server was lost: only it knows which batches it had. The wait ends when it comes back, or with an error "
        f"after {waiting.grace_s:g} s (DataServer(grace_s=...)). If that rank has ended, start the job again from its "
        "last state."
    )
    with contextlib.suppress(RuntimeWarning):  # a script that makes errors of warnings loses no batch by it
        warnings.warn(text, RuntimeWarning, stacklevel=2)
