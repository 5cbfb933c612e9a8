"""Ranks that go on without a rank that was killed: what they and their launcher tell each other.

Usually the launcher stops all ranks of a job when one of them fails. A job with replicas of its state can do without
one: each rank announces the stage of the model that it has, and when a rank is killed of which another one has the
stage, the launcher writes down that it is gone and lets the others run. They read that when a message from it fails.

The board is in the memory file of `save_and_leave`, behind what is there: 16 bytes for each rank of the host,

    int64 steps     that the rank has completed, which outlives it
    uint8 stage     that it has, plus 1; 0 = it cannot do without others
    uint8 state     0 = it runs, 1 = it was killed, 2 = it has ended with code 0

>>> from headway.runtime.launching.save_and_leave import LeaveBoard
>>> leave = LeaveBoard.make(num_ranks=4)
>>> board = PeerBoard(leave.descriptor, 4)
>>> for rank in range(4): board.announce(rank, stage=rank % 2)
>>> board.note_steps(3, 7)
>>> board.cover([3]), board.killed(), board.steps(3), board.cover([1])
(True, frozenset({3}), 7, False)
"""

from __future__ import annotations

import mmap
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from headway.runtime.launching.save_and_leave import board_of, peers_offset
from headway.runtime.run_folder.exit_class import RankEnd, classify
from headway.trace.events.vocabulary import SPANS
from headway.trace.recording.incident import REROUTE, Blamed, Incident, write_incidents

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headway.trace.rings.records import RingHeader

_SLOT = struct.Struct("@qBB6x")  # native and aligned: each field is written at once
_STEPS, _BYTE = struct.Struct("@q"), struct.Struct("@B")
_STAGE_AT, _STATE_AT = 8, 9
RUNS, KILLED, ENDED = range(3)


class PeerBoard:
    """What each rank has, how far it is, and whether it is gone."""

    def __init__(self, descriptor: int, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._offset = peers_offset(num_ranks)
        self._memory = mmap.mmap(descriptor, self._offset + _SLOT.size * num_ranks)

    def announce(self, index: int, stage: int) -> None:
        """Say that a rank has a stage, and does without any rank of which another one has the stage."""
        _BYTE.pack_into(self._memory, self._at(index) + _STAGE_AT, stage + 1)

    def has_announced(self, index: int) -> bool:
        """Whether a rank has."""
        return self._slot(index)[1] > 0

    def all_announced(self) -> bool:
        """Whether all ranks have."""
        return all(map(self.has_announced, range(self.num_ranks)))

    def note_steps(self, index: int, steps: int) -> None:
        """Say how many steps a rank has completed."""
        _STEPS.pack_into(self._memory, self._at(index), steps)

    def steps(self, index: int) -> int:
        """Return how many steps a rank has completed."""
        return int(self._slot(index)[0])

    def killed(self) -> frozenset[int]:
        """Return the ranks that were killed, and that the others do without."""
        return frozenset(index for index in range(self.num_ranks) if self._slot(index)[2] == KILLED)

    def ended(self) -> frozenset[int]:
        """Return the ranks that have ended with code 0."""
        return frozenset(index for index in range(self.num_ranks) if self._slot(index)[2] == ENDED)

    def note_end(self, index: int) -> None:
        """Say that a rank has ended with code 0."""
        _BYTE.pack_into(self._memory, self._at(index) + _STATE_AT, ENDED)

    def peers(self, index: int) -> list[int]:
        """Return the other ranks that run and have the stage of a rank."""
        stages = [self._slot(peer)[1] for peer in range(self.num_ranks)]
        gone = {index} | self.killed() | self.ended()
        return [peer for peer, stage in enumerate(stages) if stage == stages[index] and peer not in gone]

    def cover(self, lost: Iterable[int]) -> bool:
        """Write down that ranks were killed, where the others can do without all of them; else return False."""
        gone = {*lost} | self.killed()
        stages = [self._slot(index)[1] for index in range(self.num_ranks)]
        live = {stage for index, stage in enumerate(stages) if index not in gone}
        if not self.all_announced() or any(stages[index] not in live for index in gone):
            return False
        for index in gone:
            _BYTE.pack_into(self._memory, self._at(index) + _STATE_AT, KILLED)
        return True

    def _at(self, index: int) -> int:
        return self._offset + _SLOT.size * index

    def _slot(self, index: int) -> tuple[int, int, int]:
        steps, stage, state = _SLOT.unpack_from(self._memory, self._at(index))
        return steps, stage, state


class RerouteAccount:
    """The incidents of a job that goes on without killed ranks, written to the run folder as they come.

    `add` is a listener of the drain and runs in its thread; everything else is called in the launcher's main thread.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._incidents: list[Incident] = []
        self._board: PeerBoard | None = None
        self._switched_ns: dict[int, int] = {}  # rank -> end of its newest change of schedule

    def add(self, header: RingHeader, records: NDArray[np.void]) -> None:
        """Take in what was drained from one process."""
        switches = records[records["code"] == SPANS["step.reroute"].code]
        if len(switches):
            ends = switches["start_ns"] + switches["duration_ns"]
            self._switched_ns[header.rank] = int(ends.max())

    def note_killed(self, end: RankEnd, attempt: int, board: PeerBoard) -> None:
        """Write down that a rank was killed, and that the others go on without it."""
        at_ns, rank = time.perf_counter_ns(), end.rank
        self._board = board
        peers = ", ".join(f"rank {peer}" for peer in board.peers(rank))
        steps = min(board.steps(index) for index in range(board.num_ranks) if index not in board.killed())
        self._incidents.append(
            Incident(
                attempt=attempt, cls=classify(end), suspects=Blamed([rank], [socket.gethostname()]),
                detected_ns=end.end_ns, located_ns=at_ns, down_ns=at_ns, decided_ns=at_ns, action=REROUTE,
                reason=f"its stage of the model is on {peers} too", step=steps, restored="memory", lost_steps=0,
                evidence=f"rank {rank}: signal {-end.code}",
            )
        )  # fmt: skip
        write_incidents(self._run, self._incidents)

    def look(self) -> None:
        """Complete incidents of the last attempt once all ranks that run have changed their schedule since."""
        board = self._board
        if board is None:
            return
        switched_ns, before = dict(self._switched_ns), list(self._incidents)
        gone, attempt = board.killed() | board.ended(), before[-1].attempt
        running = [switched_ns.get(rank, 0) for rank in range(board.num_ranks) if rank not in gone]
        ended = [ns for rank, ns in switched_ns.items() if rank in board.ended()]
        for index, row in enumerate(before):
            ends = [*running, *(ns for ns in ended if ns > row.detected_ns)]
            if row.attempt == attempt and row.first_step_ns is None and min(ends, default=0) > row.detected_ns:
                self._incidents[index] = structs.replace(row, first_step_ns=max(ends))
        if self._incidents != before:
            write_incidents(self._run, self._incidents)


def peers_of(environment: Mapping[str, str]) -> tuple[PeerBoard, int] | None:
    """Return the board that this rank inherited, and its index on it; None where there is none."""
    slot = board_of(environment)
    return None if slot is None else (PeerBoard(slot[0].descriptor, slot[0].num_ranks), slot[1])
