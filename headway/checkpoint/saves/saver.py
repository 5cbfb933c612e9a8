"""One rank's saves: state to image, image to agent, the agent's word back to tickets.

A save has two moments. `begin` reads the state: what has to be read at once
is copied on return, what lies on a device is under way. `complete` reads the
objects that were left for later, and hands the image to the agent once it is
whole. In between, and after, training goes on.

>>> import tempfile
>>> saver = Saver(tempfile.mkdtemp(), {"w": {"x": torch.ones(2)}}, Options())
>>> ticket = saver.begin(7, {})
>>> saver.complete(wait=True)
>>> ticket.result().step
7
>>> saver.close()
"""

from __future__ import annotations

import logging
import pickle
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from headway.checkpoint.agent.link import AgentLink
from headway.checkpoint.agent.messages import Committed, Failed, Hello, Layout, Persist, Persisted, Phase, SavedObject
from headway.checkpoint.agent.saving import TornError
from headway.checkpoint.policy import Keep
from headway.checkpoint.restores.exchange import Agreement, ReplicaHolders
from headway.checkpoint.saves.arenas import Arenas, layout_of, parts_of, sources_of, tail_bytes_of
from headway.checkpoint.saves.image import Image, Part, cuda_device_of, pickled
from headway.checkpoint.saves.image_file import host_bytes
from headway.checkpoint.saves.snapshot import Snapshot
from headway.checkpoint.saves.tickets import LISTEN_S, Commit, FailedSaves, SaveTicket
from headway.checkpoint.state.sharding_cache import ShardingCache
from headway.checkpoint.state.shards import LocalState
from headway.core.errors import BackgroundError, InputError
from headway.core.units import NS_PER_S
from headway.runtime.host.device import in_use
from headway.runtime.in_rank import state_account
from headway.storage.digests import checksum

LOG = logging.getLogger(__name__)
LOG.addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True)
class Options:
    """What stays the same for all saves."""

    redundancy: str = "none"
    keep: Keep = field(default_factory=Keep)
    inflight: int = 1
    """Saves that may be under way at once."""
    device_snapshot: str = "auto"
    """"auto", "device" or "host"."""
    any_world: tuple[str, ...] = ()
    """Names of objects whose values differ between ranks, and may be taken by any other world size."""
    on_error: str = "warn"
    """"warn" or "raise": what a failure in the background is to the training loop."""


@dataclass(slots=True)
class _Pending:
    """A save whose image is not whole yet."""

    ticket: SaveTicket
    number: int
    """Of the image."""
    image: Image
    parts: tuple[Part, ...]
    early: dict[str, Any]
    """Name -> state when the save began."""
    late: dict[str, Any]
    """Name -> object of which something is read again."""
    state: LocalState
    snapshot: Snapshot
    begun_ns: int
    values: dict[str, bytes]
    """Name -> pickled object."""
    is_changed: bool
    """Whether this is the first save of a layout."""
    sums: dict[Any, tuple[int, int]] = field(default_factory=dict)
    """(fqn, offsets) of a piece -> (bytes of a word, sum of the words) that the copy must have."""


class Saver:
    """The saves of one rank. Its thread is the caller's; call from one thread only."""

    def __init__(
        self, root: str, objects: Mapping[str, Any], options: Options, *, holders: Sequence[int] | None = None
    ) -> None:
        """`objects`: name -> anything with `state_dict`, or a mapping that is state itself.

        `holders` are the ranks that hold equal plain tensors; None: all.
        """
        self._root, self._objects, self._options, self._holders = root, objects, options, holders
        self.agreement = Agreement(root)
        """With the other ranks."""
        self.link = AgentLink(self._hello())
        """To this rank's agent."""
        self.failures: list[BackgroundError] = []
        """What went wrong in the background, to be told."""
        self.settled: Callable[[torch.Tensor], bool] = lambda tensor: False
        """Whether nothing but a weight update changes a tensor."""
        self.is_torn = False
        """Whether a save was refused since somebody wrote the state while it was copied."""
        self.durable_s: float | None = None
        """How long the save that was committed last took, from its start to its commit; whoever reads it takes it."""
        self._arenas: Arenas | None = None
        self._pending: _Pending | None = None
        self._tickets: dict[int, SaveTicket] = {}
        self._begun: dict[int, tuple[int, int]] = {}  # step -> when the save began, which image
        self._spare: int | None = None
        self._cut = ShardingCache()
        self._stored: dict[str, tuple[str, bytes]] = {}  # fqn -> a plain value as text, and as it is stored
        self._last = self._furthest = -1  # steps: of the last save, and the highest of all saves
        self._failed_saves = FailedSaves()
        self._num_steps = 0
        self._num_returns = 0  # how often a save went back to a step that was passed
        self._layout: tuple[Any, Layout] | None = None
        self._mode = "device" if options.device_snapshot == "device" else "host"
        self._streams: dict[torch.device, Any] = {}

    @property
    def is_under_way(self) -> bool:
        """Whether some save is not over yet."""
        return self._pending is not None or bool(self.link.outstanding)

    @property
    def pending(self) -> SaveTicket | None:
        """The save whose image is not whole."""
        return self._pending.ticket if self._pending is not None else None

    def begun(self, step: int) -> SaveTicket | None:
        """Return the ticket of a save that is under way, or that failed without anybody being told."""
        return self._tickets.get(step)

    def prepare(self) -> None:
        """Have a thread take and pin the memory of saves from a device, once optimizers have made their state."""
        self._num_steps += 1
        if self._arenas is not None and self._pending is None:
            self._arenas.resume()
        if self._num_steps != 2 or self._arenas is not None or not in_use():
            return
        try:
            _, _, parts, values = self._looked_at()
            assert self._arenas is not None
            self._arenas.prepare(parts, tail_bytes_of(list(values.values())))
        except Exception as cause:  # whatever the objects raise, the save that is asked for is to raise it
            LOG.info("no memory was prepared for the first save: %s", cause)

    def halt(self) -> None:
        """Stop pinning memory in a thread: a graph is about to be captured, which calls of others may spoil."""
        if self._arenas is not None:
            self._arenas.halt()

    def begin(self, step: int, late: Mapping[str, Any]) -> SaveTicket:
        """Begin to save `step`; objects named in `late` are read again by `complete`. Waits for room first.

        Tells of an earlier save that was waited for and failed, see `tell_failures`.
        """
        begun_ns = time.perf_counter_ns()
        self.complete(wait=True)  # books its own time
        complete_ns = time.perf_counter_ns()
        self._wait_for_room(step)
        ready_ns = time.perf_counter_ns()
        ticket = SaveTicket(step, listen=self._hear)
        with state_account.inside("checkpoint.snapshot"):
            pending = self._pending = self._read(ticket, begun_ns, late)
        self._tickets[step] = ticket
        if not late:
            with self._given_up_on_error(pending):
                self._hand_over()
        ended_ns = time.perf_counter_ns()
        ticket.blocked_s += (ended_ns - begun_ns) / NS_PER_S
        if ready_ns - complete_ns > 1_000_000:
            state_account.waited(complete_ns, ready_ns, step=step)
        state_account.snapshotted(ready_ns, ended_ns, bytes=pending.image.num_bytes, step=step)
        return ticket

    def complete(self, *, wait: bool = False) -> None:
        """Read what was left for later; hand the image over if it is whole, or wait until it is."""
        pending = self._pending
        if pending is None:
            return
        begun_ns = time.perf_counter_ns()
        with self._given_up_on_error(pending):
            pending.snapshot.renew()
            if pending.late:
                with state_account.inside("checkpoint.snapshot"):
                    self._read_late(pending)
            if wait:
                pending.snapshot.wait()
            self._hand_over()
        ended_ns = time.perf_counter_ns()
        pending.ticket.blocked_s += (ended_ns - begun_ns) / NS_PER_S
        state_account.waited(begun_ns, ended_ns, step=pending.ticket.step)

    def fence(self) -> None:
        """Let what is launched next wait, on its device, for copies that are under way."""
        if self._pending is not None:
            self._pending.snapshot.fence()

    def listen(self, timeout_s: float = 0.0) -> None:
        """Hear what the agent has to say, and note it."""
        for message in self.link.poll(timeout_s):
            ticket = self._tickets.get(message.step)
            if isinstance(message, Failed):
                self._failed(message, ticket)
                continue
            for phase in message.phases:
                self._account(phase, message.step)
            if isinstance(message, Persisted) and ticket is not None:
                ticket.persist_s = sum(phase.end_ns - phase.start_ns for phase in message.phases) / NS_PER_S
            elif isinstance(message, Committed):
                self._failed_saves.committed(message.path)
                begun_ns, self._spare = self._begun.pop(message.step)
                durable_s = self.durable_s = (message.ended_ns - begun_ns) / NS_PER_S
                if ticket is not None:
                    commit = Commit(message.step, message.path, message.root, message.num_bytes, durable_s)
                    self._tickets.pop(message.step).settle(commit)

    def tell_failures(self, *, is_asked: bool = False) -> None:
        """Tell the caller of failures that it has not been told of yet: as a warning, for the next save tries again.

        Raises `BackgroundError` instead where the caller `is_asked` for it, with on_error="raise", and after
        several in a row (`FailedSaves`). The error names the newest checkpoint.
        """
        for step, ticket in list(self._tickets.items()):
            if ticket.failure is not None:
                del self._tickets[step]
                if not ticket.is_told:
                    self.failures.append(ticket.error())
        raises = is_asked or self._options.on_error == "raise" or self._failed_saves.end_the_job
        while self.failures:
            error = self.failures.pop(0)
            if raises:
                raise BackgroundError(self._failed_saves.error(str(error))) from error
            warnings.warn(self._failed_saves.warning(str(error)), RuntimeWarning, stacklevel=4)

    def wait(self) -> None:
        """Wait until every save is over."""
        self.complete(wait=True)
        while self.link.outstanding:
            self._listen_long(LISTEN_S, max(self._begun, default=0))

    def close(self, *, stays: bool = False) -> None:
        """Let the agent go, which finishes what it has (and `stays` for the next attempt); give the memory back."""
        (self.link.abandon if stays else self.link.close)()
        if self._pending is not None:
            self._pending.snapshot.wait()  # else a device would go on writing to memory that is not ours any more
        if self._arenas is not None:
            self._arenas.close()

    def _hello(self) -> Hello:
        options, agreement = self._options, self.agreement
        return Hello(
            root=self._root, attempt=agreement.attempt, rank=agreement.rank, world_size=agreement.world_size,
            redundancy=options.redundancy, keep_last=options.keep.last, keep_every=options.keep.every,
            host=socket.gethostname(), started_unix_s=time.time(),
        )  # fmt: skip

    def _wait_for_room(self, step: int) -> None:
        """Wait until a save may begin: not too many under way, and none of the same step."""
        while len(self.link.outstanding) >= self._options.inflight or step in self._begun:
            self.listen(LISTEN_S)
            self.tell_failures()

    def _hear(self, timeout_s: float) -> None:
        """Listen on behalf of somebody who waits for a ticket, whose save must get on for that."""
        if not timeout_s:
            self.listen()
            return
        self.complete(wait=True)
        self._listen_long(timeout_s, max(self._begun, default=0))

    def _listen_long(self, timeout_s: float, step: int) -> None:
        """Listen, and book the time: training stands still for the save of `step`."""
        begun_ns = time.perf_counter_ns()
        self.listen(timeout_s)
        state_account.waited(begun_ns, time.perf_counter_ns(), step=step)

    def _failed(self, message: Failed, ticket: SaveTicket | None) -> None:
        why = f"{message.kind}: {message.text.rstrip('.')}"
        if message.what == "save":
            self.is_torn = self.is_torn or message.kind == TornError.__name__
            self._begun.pop(message.step, None)
            self._failed_saves.failed()
            if ticket is not None:
                ticket.settle(why)
            return
        self.failures.append(
            BackgroundError(
                f"the checkpoint of step {message.step} is committed, but its {message.what} failed: {why}. "
                "Remove the cause; the next save tries again."
            )
        )

    @contextmanager
    def _given_up_on_error(self, pending: _Pending) -> Iterator[None]:
        """Leave nothing of a save that cannot be read or handed over: its error is raised once, here."""
        try:
            yield
        except Exception as error:
            pending.snapshot.wait()
            self._pending = None
            self._tickets.pop(pending.ticket.step).settle(f"{type(error).__name__}: {error}")
            raise

    def _account(self, phase: Phase, step: int) -> None:
        state_account.background(phase.name, phase.start_ns, phase.end_ns, bytes=phase.num_bytes, step=step)

    # Reading the state.

    def _read(self, ticket: SaveTicket, begun_ns: int, late: Mapping[str, Any]) -> _Pending:
        """Read everything; what is `late` is only measured for its room, and read again."""
        early, state, parts, values = self._looked_at()
        assert self._arenas is not None
        busy = {number for _, number in self._begun.values()}
        is_changed = self._layout is None or self._layout[0] != (parts, state.paths)
        number, image = self._arenas.take(parts, tail_bytes_of(list(values.values())), busy=busy, spare=self._spare)
        if number == self._spare:
            self._spare = None
        snapshot = Snapshot(self._mode, self._streams)
        snapshot.copy(_pairs(image, state, lambda fqn: not is_late(fqn, late)), settled=self.settled)
        return _Pending(
            ticket, number, image, parts, early, dict(late), state, snapshot, begun_ns, values, is_changed
        )  # fmt: skip

    def _looked_at(self) -> tuple[dict[str, Any], LocalState, tuple[Part, ...], dict[str, bytes]]:
        """Return the state now: name -> state, its pieces, what is stored of them, and pickled objects by name."""
        early = {name: _state_of(thing) for name, thing in self._objects.items()}
        state = self._pieces(early)
        values = {fqn: self._bytes_of(fqn, value) for fqn, value in state.objects.items()}
        self._stored = {fqn: stored for fqn, stored in self._stored.items() if fqn in values}
        if self._arenas is None:
            device = cuda_device_of(shard.tensor for shard in state.shards)
            self._arenas = Arenas(self._options.inflight + 1, pin=device)
        return early, state, parts_of(state.shards), values

    def _read_late(self, pending: _Pending) -> None:
        """Read the objects that the end of the step may have changed."""
        late, known = pending.late, pending.values
        state = self._pieces(pending.early | {name: _late_state(late[name], pending.early[name]) for name in late})
        parts = parts_of(state.shards)
        pending.values = {
            fqn: self._bytes_of(fqn, value) if fqn not in known or is_late(fqn, late) else known[fqn]
            for fqn, value in state.objects.items()
        }
        if parts != pending.parts:
            pending.snapshot.wait()
            self._carry(pending, parts)
        pending.state = state
        pending.snapshot.copy(_pairs(pending.image, state, lambda fqn: is_late(fqn, late)), settled=self.settled)
        pending.late = {}

    def _pieces(self, states: Mapping[str, Any]) -> LocalState:
        """Return what this rank writes of the states of all objects."""
        holders = ReplicaHolders(self._objects, self._holders)
        agreement = self.agreement
        if agreement.rank != holders.first:
            states = {name: holders.without_buffers(name, state) for name, state in states.items()}
        return self._cut.pieces(states, rank=agreement.rank, world_size=agreement.world_size, holders=holders)

    def _bytes_of(self, fqn: str, value: Any) -> bytes:
        """Return an object as it is stored; plain values that stay the same are pickled once."""
        if not _is_plain(value):
            return _bytes_of(fqn, value)
        text = repr(value)  # tells plain values apart, also 1, 1.0 and True, or -0.0 and 0.0
        if self._stored.get(fqn, ("", b""))[0] != text:
            self._stored[fqn] = text, _bytes_of(fqn, value)
        return self._stored[fqn][1]

    def _carry(self, pending: _Pending, parts: tuple[Part, ...]) -> None:
        """Move to an image with other parts, or more room for objects."""
        assert self._arenas is not None
        pending.sums |= _sums(pending)
        tail_bytes = tail_bytes_of(list(pending.values.values()))
        pending.image = self._arenas.carry(pending.number, parts, tail_bytes)
        pending.is_changed = pending.is_changed or parts != pending.parts
        pending.parts = parts

    def _hand_over(self) -> None:
        """Give a whole image to the agent."""
        pending = self._pending
        if pending is None or not pending.snapshot.is_ready():
            return
        names, values = list(pending.values), list(pending.values.values())
        pending.sums |= _sums(pending)
        offsets = pending.image.place(values)
        if offsets is None:
            self._carry(pending, pending.parts)
            offsets = pending.image.place(values)
            assert offsets is not None, "an image was made without room for its objects"
        pending.image.render()
        if self._options.device_snapshot == "auto":
            self._mode = pending.snapshot.better_mode()
        pending.snapshot.release()
        self._tell(pending)
        end = offsets[-1] + len(values[-1]) if values else pending.image.plan.num_bytes
        step, attempt = pending.ticket.step, self._attempt_of(pending.ticket.step)
        placed = tuple(
            SavedObject(name, offset, len(value), name.partition(".")[0] in self._options.any_world)
            for name, offset, value in zip(names, offsets, values, strict=True)
        )
        replicas = _replica_digests(pending.state) if pending.is_changed else {}
        slots = pending.image.plan.slots if pending.sums else ()
        sums = tuple(pending.sums.get((slot.fqn, slot.offsets), (0, 0)) for slot in slots)
        self.link.persist(Persist(step, attempt, pending.number, end, pending.begun_ns, placed, replicas, sums))
        self._begun[step] = (pending.begun_ns, pending.number)
        self._pending = None

    def _tell(self, pending: _Pending) -> None:
        """Let the agent know memory and layout that it does not know yet."""
        assert self._arenas is not None
        if pending.number in self._arenas.untold:
            self._arenas.untold.discard(pending.number)
            self.link.arena(pending.number, pending.image.file.fileno(), pending.image.num_bytes)
        key = (pending.parts, pending.state.paths)
        if self._layout is None or self._layout[0] != key:
            self._layout = (key, layout_of(pending.image.plan, pending.state))
            self.link.layout(self._layout[1])

    def _attempt_of(self, step: int) -> str:
        """Return the attempt's name, numbered where steps come again: no step is saved twice under one name.

        Beyond the furthest step all ranks are back at the plain name, whatever went wrong on one of them before.
        """
        self._num_returns += step <= self._last
        self._last, is_again = step, step <= self._furthest
        self._furthest = max(self._furthest, step)
        return f"{self.agreement.attempt}-{self._num_returns + 1}" if is_again else self.agreement.attempt


def _is_plain(value: Any) -> bool:
    """Say whether a value is a number, a short text, None, or a tuple of such: equal text means equal value."""
    if type(value) is tuple:
        return len(value) < 16 and all(map(_is_plain, value))
    return type(value) in (int, float, bool, type(None)) or (type(value) is str and len(value) < 256)


def _bytes_of(fqn: str, value: Any) -> bytes:
    """Return an object as it is stored. Raises `InputError` for one that cannot be pickled."""
    try:
        return pickled(value)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as cause:
        raise InputError(
            f"'{fqn}' cannot be stored: {cause}. Leave it out of the object's state_dict, or keep plain values there."
        ) from cause


def _state_of(thing: Any) -> Any:
    """Return the state of an object."""
    return thing if isinstance(thing, Mapping) else thing.state_dict()


def is_late(fqn: str, late: Mapping[str, Any]) -> bool:
    """Return whether a value is read again: all of an object in `late`, of an optimizer what a scheduler may set.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    >>> is_late("opt.param_groups", {"opt": optimizer}), is_late("opt.state.0.momentum_buffer", {"opt": optimizer})
    (True, False)
    """
    name, _, below = fqn.partition(".")
    if name not in late:
        return False
    return not isinstance(late[name], torch.optim.Optimizer) or below.split(".")[0] == "param_groups"


def _late_state(thing: Any, early: Any) -> Any:
    """Return the state of an object that is read again; an optimizer's is the earlier one but for its settings."""
    now = _state_of(thing)
    return {**early, "param_groups": now["param_groups"]} if isinstance(thing, torch.optim.Optimizer) else now


def _pairs(image: Image, state: LocalState, wanted: Callable[[str], bool]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return slot and tensor of every part whose name is wanted."""
    everything = zip(image.plan.slots, image.slots, sources_of(state.shards), strict=True)
    return [(slot, source) for told, slot, source in everything if wanted(told.fqn)]


def _sums(pending: _Pending) -> dict[Any, tuple[int, int]]:
    """Return the sums that pieces of a whole image must have."""
    by_place = pending.snapshot.sums()
    slots = zip(pending.image.plan.slots, pending.image.slots, strict=True)
    return {(slot.fqn, slot.offsets): by_place[t.data_ptr()] for slot, t in slots if t.data_ptr() in by_place}


def _replica_digests(state: LocalState) -> dict[str, str]:
    """Return what other ranks compare their copies with: name -> digest of all of the tensor."""
    return {name: checksum(host_bytes(tensor)) for name, tensor in state.replicas.items()}
