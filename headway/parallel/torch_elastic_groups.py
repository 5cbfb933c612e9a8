"""Process groups of a job of replicas of a pipeline, which are made anew without the ranks that were killed.

Rank d S + s has stage s of replica d, of S stages. A step ends in two phases, so that a rank may be killed at any
moment without a copy of the weights:

    sum       the ranks of each stage sum their gradients        a rank that has summed can step alone
    commit    all ranks sum one number                           a rank that has the sum knows that all have summed
    update    each rank steps its optimizer, without a message

Killed before anybody has committed the step: all ranks drop what they computed of it, weights are as they were, and
the step begins again under the schedule without the rank. Killed later: all ranks have their gradients summed, and
those that have not updated do so. Which of both is agreed by the steps that each rank has committed; those of ranks
that are gone are on the launcher's board (`headway.runtime.launching.peers`).

The launcher also says who was killed: a connection that closes tells only that something has happened. Groups meet in
a file in the launcher's memory folder, a new one for each set of killed ranks, so that no rank hosts what others need.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from headway.core.errors import BackgroundError, InputError
from headway.runtime.lane import POLL_S, separate_group
from headway.runtime.launching.peers import PeerBoard, peers_of

NOTICE_S = 20.0
"""How long the launcher's word is awaited after a connection has failed, before it counts as another failure."""

CONNECT_S = 10.0
"""How long ranks that have all said how far they are may take for each part of connecting."""

CONNECT_TRIES = 5
"""So often gloo tries to reach a rank that does not answer, each time for the whole timeout of the group: one that is
killed while groups connect delays a switch by `CONNECT_S`."""


class LostPeerError(BackgroundError):
    """A message or a sum failed because another rank is gone or late."""


class _MoreKilledError(Exception):
    """Another rank was killed while the others agreed on how to go on."""


class PeerGroups:
    """The groups of the ranks that run, and how far they are. Needs an initialized process group on gloo."""

    def __init__(self, num_stages: int, *, elastic: bool, timeout_s: float) -> None:
        """Connect all ranks. With `elastic` the launcher is told that they go on without any that is killed.

        Raises `InputError` where they cannot: another backend, several hosts, no launcher, a second runner.
        """
        self.rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._num_stages, self._timeout_s = num_stages, timeout_s
        self.gone: frozenset[int] = frozenset()
        """Ranks that were killed or have ended."""
        self.steps = 0
        """Steps that all ranks have committed, as far as this one knows."""
        self.num_switches = 0
        """Sets of killed ranks that the groups were made anew for."""
        self._board: PeerBoard | None = None
        self._is_summed = False
        if dist.get_backend() != "gloo":
            raise InputError(f"replicas run on gloo, and the process group is {dist.get_backend()}. Initialize gloo.")
        if elastic:
            self._board = _board(self._world_size, self.rank)
        self.everybody: dist.ProcessGroup | None = None
        """The group of all ranks that run."""
        self._of_stage: dist.ProcessGroup | None = None
        self._connect(self._store(), timeout_s, self.gone)

    def announce(self) -> None:
        """Tell the launcher that this rank goes on without ranks that are killed; a failure before ends the job."""
        if self._board is not None:
            self._board.announce(self.rank, self.stage_of(self.rank))

    def stage_of(self, rank: int) -> int:
        """Return the stage of a rank."""
        return rank % self._num_stages

    @property
    def is_elastic(self) -> bool:
        """Whether this job goes on without ranks that are killed."""
        return self._board is not None

    @property
    def live(self) -> list[int]:
        """The ranks that run, in order."""
        return [rank for rank in range(self._world_size) if rank not in self.gone]

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks that run and have this rank's stage."""
        return tuple(rank for rank in self.live if self.stage_of(rank) == self.stage_of(self.rank))

    def sum_over_stage(self, value: torch.Tensor) -> None:
        """Sum a tensor in place over the ranks of this stage; all of them call this. Raises `LostPeerError`."""
        if len(self.holders) > 1:
            with _losing("the sum over its stage", self.rank):
                dist.all_reduce(value, group=self._of_stage)

    def first_of(self, value: int) -> int:
        """Return the value of the lowest rank; all of them call this. Raises `LostPeerError`."""
        first = torch.tensor([value if self.rank == self.live[0] else 0], dtype=torch.int64)
        with _losing("the first value", self.rank):
            dist.all_reduce(first, group=self.everybody)
        return int(first)

    def commit(self) -> None:
        """Agree that all ranks have summed their gradients of this step; they update, whatever happens.

        Raises `LostPeerError` where this rank does not learn it, `BackgroundError` where ranks are at unlike steps.
        """
        self._is_summed = True
        total = torch.tensor([self.steps], dtype=torch.int64)
        with _losing(f"the commit of step {self.steps}", self.rank):
            dist.all_reduce(total, group=self.everybody)
        if int(total) != self.steps * len(self.live):
            raise BackgroundError(
                f"rank {self.rank} is at step {self.steps}, others are not. Call step() alike on all."
            )
        self._completed()

    def recover(self, cause: LostPeerError) -> bool:
        """Make the groups anew without the ranks that were killed; returns whether this rank is to update first.

        If not, and `steps` has not changed, the step begins again. Every rank that runs comes here, because its
        messages fail: this one closes its connections first. Raises `cause` where no rank was killed.
        """
        board = self._board
        if board is None:
            raise cause
        until = time.monotonic() + NOTICE_S
        before = self.gone
        while True:
            self._close()
            killed, gone = board.killed(), board.killed() | board.ended()
            if not killed - before:
                if time.monotonic() > until:
                    raise cause
                time.sleep(POLL_S)
                continue
            try:
                return self._joined(board, killed, gone, before)
            except _MoreKilledError:
                continue
            except (RuntimeError, BackgroundError):  # unless a rank was killed while groups were made
                until = time.monotonic() + NOTICE_S
                while board.killed() == killed:
                    if time.monotonic() > until:
                        raise
                    time.sleep(POLL_S)

    def _joined(self, board: PeerBoard, killed: frozenset[int], gone: frozenset[int], before: frozenset[int]) -> bool:
        """Agree with the other ranks on the steps that are committed, and connect to them."""
        store = self._store("-".join(map(str, sorted(killed))))
        assert store is not None, "ranks with a board meet in a file"
        self.gone = gone
        try:
            store.set(f"steps/{self.rank}", str(self.steps))
            until = time.monotonic() + self._timeout_s
            missing = self.live
            while missing := [rank for rank in missing if not store.check([f"steps/{rank}"])]:
                if board.killed() != killed:
                    raise _MoreKilledError
                ended = board.ended().intersection(missing)
                if time.monotonic() > until:
                    raise BackgroundError(
                        f"ranks {missing} did not say within {self._timeout_s:g} s how far they are, after ranks "
                        f"{sorted(killed)} were killed. Look at what they do, or give a longer timeout_s."
                    )
                self.gone |= ended  # a rank that ended after its last step has noted it on the board
                missing = [rank for rank in missing if rank not in ended]
                time.sleep(POLL_S)
            steps = [int(store.get(f"steps/{rank}")) for rank in self.live]
            committed = max(*steps, *(board.steps(rank) for rank in self.gone))
            self._connect(store, CONNECT_S, killed)
        except BaseException:
            self.gone = before
            raise
        self.num_switches += 1
        is_behind = committed > self.steps
        assert not is_behind or (self._is_summed and committed == self.steps + 1), "a step was committed too early"
        if is_behind:
            self._completed()
        self._is_summed = False
        return is_behind

    def _completed(self) -> None:
        self.steps, self._is_summed = self.steps + 1, False
        if self._board is not None:
            self._board.note_steps(self.rank, self.steps)

    def _store(self, killed: str = "") -> Store | None:
        """Return where ranks meet: a file of the launcher's for each set of killed ranks; None: torch's own store."""
        if self._board is None:
            return None
        name = f"peers-{os.environ.get('HEADWAY_ATTEMPT', '0')}-{killed}"
        path = str(Path(os.environ["HEADWAY_RINGS"]) / name)
        return FileStore(path, -1)

    def _connect(self, store: Store | None, seconds: float, killed: frozenset[int]) -> None:
        """Make the groups of all ranks that run and of those of this stage, each within so many seconds."""

        def watch() -> None:
            if self._board is not None and self._board.killed() != killed:
                raise _MoreKilledError

        with _meeting_at(store):
            self.everybody = self._group("headway-peers", self.live, seconds, watch)
            if len(self.holders) > 1:
                self._of_stage = self._group("headway-stage", self.holders, seconds, watch)

    def _group(
        self, name: str, ranks: Sequence[int], seconds: float, watch: Callable[[], None]
    ) -> dist.ProcessGroup:  # fmt: skip
        connect_s = seconds / CONNECT_TRIES if self.gone else seconds
        made = separate_group(name, ranks=ranks, timeout_s=seconds, connect_s=connect_s, watch=watch)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self._timeout_s), made)
        return made

    def _close(self) -> None:
        """Close all connections, so that ranks that wait for this one learn of the failure, and forget the groups.

        gloo closes those of a group when a wait for one of them runs out, and in no other way while works exist.
        """
        for group in (self.everybody, self._of_stage):
            for peer in range(group.size()) if group is not None else ():
                if group is not None and peer != group.rank():
                    with contextlib.suppress(RuntimeError):
                        group.recv([torch.zeros(1)], peer, 0).wait(timedelta(milliseconds=1))
            if group is not None:
                with contextlib.suppress(RuntimeError):
                    dist.destroy_process_group(group)
        self.everybody = self._of_stage = None


@contextlib.contextmanager
def _meeting_at(store: Store | None) -> Iterator[None]:
    """Let torch make groups by another store than the default group's, which one of the ranks hosts."""
    if store is None:
        yield
        return
    world, default = dist.distributed_c10d._world, dist.group.WORLD
    assert default is not None, "peers have a process group"
    backend, before = world.pg_map[default]
    world.pg_map[default] = backend, store
    try:
        yield
    finally:
        world.pg_map[default] = backend, before


@contextlib.contextmanager
def _losing(what: str, rank: int) -> Iterator[None]:
    """Name what gloo could not do."""
    try:
        yield
    except RuntimeError as cause:
        reason = str(cause).splitlines()[0][:200] if str(cause) else type(cause).__name__
        raise LostPeerError(
            f"rank {rank} waited for {what}, and another rank is gone or late ({reason}). Look at the other ranks' "
            "errors, and start the job again from its last checkpoint."
        ) from cause


def _board(world_size: int, rank: int) -> PeerBoard:
    """Return the launcher's board; raises `InputError` where ranks cannot go on without one that is killed."""
    slot = peers_of(os.environ)
    if slot is None or "HEADWAY_RINGS" not in os.environ:
        raise InputError(
            "elastic=True needs the launcher to say which rank was killed. Start the job by headway run "
            "--nproc-per-node N -- SCRIPT, or pass elastic=False."
        )
    board, index = slot
    if board.num_ranks != world_size or index != rank:
        raise InputError(
            f"elastic=True needs all {world_size} ranks on one host, and {board.num_ranks} are on this one. Start them "
            "on one host, or pass elastic=False."
        )
    if board.has_announced(index):
        raise InputError("this job has an elastic pipeline already. Make one runner, or pass elastic=False.")
    return board
