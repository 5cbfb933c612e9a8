"""The checkpoint agent of one rank: a process without torch that makes snapshots durable, and outlives the trainer.

    python -m headway.checkpoint.agent.agent FD LOG        its end of a socket pair; what its stderr goes to

The trainer passes it shared memory once, and a short message per save. The
agent writes the image, its digests and its manifest into the save's draft, in
a folder or a bucket (`saving`); rank 0's agent commits once all manifests
stand; then each encodes its parity.
When the trainer dies the agent finishes what it has, and keeps the newest
committed image in memory for a while: an attempt that is started again on the
same host restores from there. Errors go to the trainer.

HEADWAY_CKPT_RATE_MB_S bounds what it writes per second (default: unbounded),
HEADWAY_CKPT_LINGER_S is how long it stays for a restart (default 60).

>>> socket_path("/data/run 7", 3).name.endswith("-3.sock")
True
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from headway.checkpoint.agent import saving
from headway.checkpoint.agent.messages import (
    FROM_CALLER,
    PROTOCOL,
    Committed,
    Done,
    Failed,
    Finish,
    HeldImage,
    Hello,
    ImageArena,
    ImageRequest,
    Layout,
    Leave,
    Persist,
    Persisted,
    Phase,
    Redundant,
)
from headway.checkpoint.agent.saving import check_sums
from headway.core.errors import HeadwayError, InputError
from headway.core.files.private import runtime_directory
from headway.core.wire.channel import Channel, Listener, PeerProcess
from headway.core.wire.loop import ServiceLoop
from headway.core.wire.pace import RateLimiter
from headway.core.wire.wires import ChannelClosed, Packets
from headway.storage.draft import AnyDraft
from headway.storage.manifest import CommitRecord, image_name
from headway.storage.stores import url_of

LOG = logging.getLogger(__name__)
LOG.addHandler(logging.NullHandler())

COMMIT_S = 900.0
"""Longest that a save may wait for other ranks."""

ORPHAN_S = 10.0
"""The same once the trainer is dead: the ranks of a dead job have little left to write."""

LINGER_S = 60.0
"""How long a newest image stays in memory for a restart."""

NICE = 10
"""Training goes first."""

MOST_LOG_BYTES = 1 << 20
"""How long the log grows: of what goes wrong at every save the trainer hears each time, the log need not."""


@dataclass(slots=True)
class UncommittedSave:
    """A save whose part of this rank is durable, but which is not committed yet."""

    save: Persist
    draft: AnyDraft
    since_s: float
    since_ns: int


class Agent:
    """The loop: one channel to the trainer, a socket for others, saves that wait for other ranks. One thread."""

    def __init__(self, trainer: Channel, *, pace: RateLimiter, linger_s: float = LINGER_S) -> None:
        self._trainer: Channel | None = trainer
        self._pace, self._linger_s = pace, linger_s
        self._hello: Hello | None = None
        self._layout = Layout(())
        self._arenas: dict[int, tuple[int, mmap.mmap]] = {}
        self._waiting: list[UncommittedSave] = []
        self._abandoned: set[AnyDraft] = set()
        self._held: tuple[HeldImage, int] | None = None  # what is held, in which arena
        self._listener: Listener | None = None
        self._callers: dict[Channel, Finish | None] = {}
        self._loop = ServiceLoop(patience_s=math.inf)
        self._orphan_since_s: float | None = None
        self._marks_at_s = 0.0
        self._ends = False
        self._polls_s = saving.POLL_S
        self._poll_s = self._polls_s[0]
        self.num_failures = 0
        """Errors told to the trainer, or to nobody: they are in the log."""

    def end(self) -> None:
        """Finish what is under way, then end; a signal handler may call it."""
        self._ends = True

    def run(self) -> None:
        """Work until the trainer has left, or is dead and nobody may come back for what is held."""
        assert self._trainer is not None
        # Children that the trainer forked may hold its end of the channel when it has ended.
        self._loop.add(self._trainer, self._do, self._lose_trainer, with_process=True)
        while not self._is_over():
            self._loop.turn(self._patience_s())
            self._advance()
        self.close("the agent ends")

    # What others say.

    def _do(self, _: Channel, message: msgspec.Struct) -> None:
        """Do what the trainer sent."""
        if isinstance(message, ImageArena) and self._loop.fds:
            self._map(message, self._loop.fds.pop())
        elif isinstance(message, Layout):
            self._layout = message
        elif isinstance(message, Persist):
            self._persist(message)
        elif isinstance(message, Hello):
            self._greet(message)
        elif isinstance(message, Leave):
            self._ends = True

    def _greet(self, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            raise HeadwayError(f"the trainer speaks protocol {hello.protocol}, this agent {PROTOCOL}. Restart the job.")
        self._hello, self._polls_s = hello, saving.poll_s(hello)
        if hello.rank == 0:
            with contextlib.suppress(OSError, HeadwayError):  # what is left shows at the first save
                for path in saving.recover(hello):
                    LOG.info("removed %s, which a dead attempt left", path)

    def _map(self, arena: ImageArena, file: int) -> None:
        """Take over memory for images."""
        self._unmap(arena.number)
        self._arenas[arena.number] = (file, mmap.mmap(file, arena.num_bytes, mmap.MAP_SHARED))

    def _unmap(self, number: int) -> None:
        if self._held is not None and self._held[1] == number:
            self._held = None
        file, memory = self._arenas.pop(number, (-1, None))
        if memory is not None:
            memory.close()
            os.close(file)

    def _lose_trainer(self, channel: Channel, why: str) -> None:
        LOG.info("the trainer is gone: %s", why)
        self._loop.drop(channel)
        self._trainer = None
        self._orphan_since_s = time.monotonic()

    def _call(self, channel: Channel) -> None:
        """Let somebody in who may want what is held."""
        self._callers[channel] = None
        self._loop.add(channel, self._hear_caller, lambda channel, _: self._callers.pop(channel))

    def _hear_caller(self, channel: Channel, message: msgspec.Struct) -> msgspec.Struct | None:
        if isinstance(message, ImageRequest):
            return self._show(channel, message.step)
        if isinstance(message, Finish):
            self._callers[channel] = message
        elif isinstance(message, Leave) and self._trainer is None:
            self._ends = True
        return None

    def _show(self, channel: Channel, step: int) -> HeldImage | None:
        """Send the image that is held, if it is that of `step`; else there is a reply."""
        if self._held is None or step != self._held[0].step:
            return HeldImage()
        held, number = self._held
        self._loop.send(channel, held, [self._arenas[number][0]])
        return None

    # Saves.

    def _persist(self, save: Persist) -> None:
        """Make this rank's part of a save durable; what goes wrong is the trainer's to hear."""
        assert self._hello is not None, "the trainer saves before it has said who it is"
        hello, draft = self._hello, saving.draft_of(self._hello, save.step, save.attempt)
        if self._held is not None and self._held[1] == save.number:
            self._held = None
        saving.sweep(self._abandoned)
        try:
            memory = self._arenas[save.number][1] if save.num_bytes else b""
            check_sums(memory, self._layout.slots, save.sums)
            draft, phases = saving.persist_rank(hello, self._layout, save, memory, self._pace)
        except Exception as error:  # whatever the disk, the folder or our own code does: the save is lost, we go on
            LOG.exception("step %d was not persisted", save.step)
            saving.mark_gone(hello, draft)
            self._fail(save, draft, error)
            return
        self._tell(Persisted(save.step, phases))
        self._waiting.append(UncommittedSave(save, draft, time.monotonic(), time.perf_counter_ns()))
        self._poll_s = self._polls_s[0]

    def _advance(self) -> None:
        """Look whether saves that wait for other ranks are over."""
        self._listen()
        for waiting in list(self._waiting):
            try:
                record = self._look(waiting)
            except Exception as error:  # as above
                LOG.exception("step %d was not committed", waiting.save.step)
                self._waiting.remove(waiting)
                self._fail(waiting.save, waiting.draft, error)
                continue
            if record is not None:
                self._waiting.remove(waiting)
                self._committed(waiting, record)
        self._poll_s = min(self._poll_s * 1.3, self._polls_s[1])
        if self._orphan_since_s is not None and self._hello is not None and time.monotonic() > self._marks_at_s:
            saving.mark_orphans(self._hello)
            self._marks_at_s = time.monotonic() + self._polls_s[1]
        if not self._waiting:
            self._answer_successors()

    def _look(self, waiting: UncommittedSave) -> CommitRecord | None:
        """Return the record once a save is committed. Raises when it never will be."""
        assert self._hello is not None
        is_first = self._hello.rank == 0
        look = saving.commit_if_ready if is_first else saving.outcome
        record: CommitRecord | None = look(self._hello, waiting.draft)
        since_s, most_s = waiting.since_s, COMMIT_S
        if self._orphan_since_s is not None:
            since_s, most_s = max(since_s, self._orphan_since_s), ORPHAN_S
        if record is None and time.monotonic() - since_s > most_s:
            raise HeadwayError(
                f"step {waiting.draft.step} is not committed: other ranks did not finish it within {most_s:g} s. "
                "Look at their agents; the checkpoint before it still stands."
            )
        return record

    def _committed(self, waiting: UncommittedSave, record: CommitRecord) -> None:
        """Tell the trainer, keep the image, let old checkpoints go, add parity."""
        assert self._hello is not None
        save, target, ended_ns = waiting.save, waiting.draft.target, time.perf_counter_ns()
        num_bytes = sum(entry.num_bytes for entry in record.files)
        phase = Phase("checkpoint.commit", waiting.since_ns, ended_ns, num_bytes)
        self._tell(Committed(save.step, str(target), record.root, num_bytes, ended_ns, (phase,)))
        if save.num_bytes:
            held = HeldImage(save.step, image_name(self._hello.rank), save.num_bytes, record.root)
            self._held = (held, save.number)
        try:
            if self._hello.rank == 0:
                saving.prune(self._hello, save.step)
        except (OSError, HeadwayError) as error:
            LOG.exception("old checkpoints were not removed")
            self._tell(Failed(save.step, type(error).__name__, str(error), "retention"))
        if self._hello.redundancy != "none":
            self._encode(save.step, target)

    def _encode(self, step: int, target: Path | str) -> None:
        """Write this rank's parity of a committed checkpoint."""
        assert self._hello is not None
        begun_ns = time.perf_counter_ns()
        try:
            num_bytes = saving.encode(target, self._hello.rank, self._pace)
        except Exception as error:  # the checkpoint stands, but can bear less than was asked for
            if Path(target).exists():
                LOG.exception("step %d has no parity of this rank", step)
                self._tell(Failed(step, type(error).__name__, str(error), "parity"))
            return
        self._tell(Redundant(step, (Phase("checkpoint.parity", begun_ns, time.perf_counter_ns(), num_bytes),)))

    def _fail(self, save: Persist, draft: AnyDraft, error: BaseException) -> None:
        assert self._hello is not None
        if self._hello.rank == 0:
            saving.give_up(draft, f"{type(error).__name__}: {error}")
            self._abandoned.add(draft)
        self._tell(Failed(save.step, type(error).__name__, str(error)))

    def _tell(self, message: msgspec.Struct) -> None:
        self.num_failures += isinstance(message, Failed)
        if self._trainer is None:
            return
        try:
            self._trainer.send(message, timeout_s=10.0)
        except (ChannelClosed, TimeoutError) as error:
            self._lose_trainer(self._trainer, f"it does not listen: {error}")

    # Life.

    def _listen(self) -> None:
        """Let others find us, once whoever was at the place before has gone."""
        if self._listener is not None or self._hello is None:
            return
        with contextlib.suppress(InputError):  # an agent of an earlier attempt is there still
            self._listener = Listener(socket_path(self._hello.root, self._hello.rank), types=FROM_CALLER)
            self._loop.admit(self._listener, self._call)

    def _answer_successors(self) -> None:
        """Nothing is under way: tell the attempts that asked; what is held stays here for all their ranks."""
        for channel in [channel for channel, asked in self._callers.items() if asked is not None]:
            self._callers[channel] = None
            self._loop.send(channel, Done(is_orphan=self._orphan_since_s is not None))

    def _patience_s(self) -> float:
        """Return how long to wait for messages before looking at the folder again."""
        if self._waiting:
            return self._poll_s
        return 0.1 if self._orphan_since_s is not None or self._listener is None else 5.0

    def _is_over(self) -> bool:
        if self._waiting:
            return False
        if self._ends:
            return True
        if self._orphan_since_s is None:
            return False
        return self._held is None or time.monotonic() - self._orphan_since_s > self._linger_s

    def close(self, why: str) -> None:
        """Let everybody go, with a word."""
        # Where other ranks' agents may still have to read why, the draft stays: the next attempt removes it.
        saving.sweep({draft for draft in self._abandoned if not saving.is_awaited(draft)})
        if self._listener is not None:
            self._listener.close()
        self._loop.close(why)
        LOG.info("ended")


def socket_path(root: str | Path, rank: int) -> Path:
    """Return where the agent of `rank` can be found by other processes of this user on this host."""
    place = url_of(root) or os.path.realpath(root)
    name = hashlib.blake2b(os.fsencode(place), digest_size=8).hexdigest()
    return runtime_directory() / f"ckpt-{name}-{rank}.sock"


def pace_from(environment: Mapping[str, str]) -> RateLimiter:
    """Return the rate that the environment asks for. Raises `InputError` on what is no number.

    >>> pace_from({"HEADWAY_CKPT_RATE_MB_S": "50"}).bytes_per_s
    50000000.0
    """
    return RateLimiter(_number(environment, "HEADWAY_CKPT_RATE_MB_S", 0.0) * 1e6)


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise InputError(f"{name} is {text!r}; it must be a number of at least 0. Set it to one, or unset it.")
    return value


def _has_room(record: logging.LogRecord) -> bool:
    """Say whether a line still goes to the log, which is our stderr."""
    return os.fstat(sys.stderr.fileno()).st_size < MOST_LOG_BYTES


def main(arguments: list[str]) -> NoReturn:
    """Be the agent whose end of the channel is descriptor `arguments[0]`; `arguments[1]` goes if nothing went wrong."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger().handlers[0].addFilter(_has_room)
    connected = socket.socket(fileno=int(arguments[0]))
    pid = int.from_bytes(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)
    linger_s = _number(os.environ, "HEADWAY_CKPT_LINGER_S", LINGER_S)
    agent = Agent(
        Channel(Packets(connected), FROM_CALLER, PeerProcess(pid)), pace=pace_from(os.environ), linger_s=linger_s
    )
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: agent.end())  # what is under way is finished first
    with contextlib.suppress(OSError):
        os.nice(NICE)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # waking up, it takes no core from the trainer
    try:
        agent.run()
    except HeadwayError as error:
        agent.close(str(error))
        raise
    if not agent.num_failures:
        Path(arguments[1]).unlink(missing_ok=True)
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
