"""A job that is to end saves first: how the launcher asks for that, and at which step all ranks do it.

`headway run` that gets SIGTERM asks its ranks, where every one of them has saved or restored with a
`headway.Checkpointer` before; otherwise SIGTERM is forwarded at once. A rank looks after each step whether it was
asked. Ranks are not at the same step then, so each says at which one it is, and all save the step after the latest:

    rank 0   ...| 41 |  asked, says 41 | 42 | 43 | saves 43
    rank 1   ...|  41  | 42 |  asked, says 42 | 43 | saves 43

No rank can pass that step before it knows it: its next collective needs the rank that has not said its step yet. (Ranks
that never wait for each other may pass it. Then nothing is saved, and the deadline ends them.) Once the checkpoint is
committed the rank sends SIGTERM to itself: a handler of the script's runs as it would have, otherwise the rank ends.

The board is 8 bytes for the deadline, and a byte for each rank of the host that says whether it saves: a memory file
that ranks inherit, and programs that a rank starts do not. A look costs less than a microsecond.

>>> board = LeaveBoard.make(num_ranks=2)
>>> board.announce(0), board.ask(8.0), board.announce(1), board.ask(8.0), 7 < board.left_s() <= 8
(None, False, None, True, True)
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
import sys
import time
import weakref
from collections.abc import Callable, Mapping

VARIABLE = "HEADWAY_LEAVE"
"""Variable of a rank's environment: descriptor of the board, index of the rank on it, number of ranks."""

SAVES = "HEADWAY_SAVES"
"""Variable with a folder: each rank puts a file there once it can be asked. A scheduler on any host sees them."""

NAME = "headway-leave"
"""Name of the memory file; who inherits the variable without the descriptor does not find it there."""

ASK_FRACTION = 0.8
"""Share of the grace in which ranks may save; for the rest of it they have had SIGTERM."""

_DEADLINE = struct.Struct("=d")

PEER_BYTES = 16
"""Bytes of each rank behind the board, which `peers` uses."""


class LeaveBoard:
    """What the launcher and the ranks of a host tell each other."""

    def __init__(self, descriptor: int, num_ranks: int) -> None:
        self.descriptor, self.num_ranks = descriptor, num_ranks
        self._memory = mmap.mmap(descriptor, _DEADLINE.size + num_ranks)

    @classmethod
    def make(cls, num_ranks: int) -> LeaveBoard:
        """Make the board of a group of ranks, with a descriptor that they inherit."""
        descriptor = os.memfd_create(NAME, 0)
        os.truncate(descriptor, peers_offset(num_ranks) + PEER_BYTES * num_ranks)
        board = cls(descriptor, num_ranks)
        weakref.finalize(board, os.close, descriptor)
        return board

    def variable(self, index: int) -> dict[str, str]:
        """Return what the environment of a rank says of the board."""
        return {VARIABLE: f"{self.descriptor}:{index}:{self.num_ranks}"}

    def announce(self, index: int) -> None:
        """Say that a rank saves, and will when it is asked."""
        self._memory[_DEADLINE.size + index] = 1

    def ask(self, deadline_s: float) -> bool:
        """Ask all ranks to save and leave within `deadline_s`; False, and nothing is asked, where one would not."""
        if not all(self._memory[_DEADLINE.size :]):
            return False
        _DEADLINE.pack_into(self._memory, 0, time.monotonic() + deadline_s)
        return True

    def left_s(self) -> float | None:
        """Return the seconds until the deadline; None where nothing was asked."""
        (until_s,) = _DEADLINE.unpack_from(self._memory)
        return max(until_s - time.monotonic(), 0.0) if until_s else None


def peers_offset(num_ranks: int) -> int:
    """Return where in the memory file the slots of `peers` begin: a multiple of 8 bytes."""
    return -(-(_DEADLINE.size + num_ranks) // 8) * 8


def board_of(environment: Mapping[str, str]) -> tuple[LeaveBoard, int] | None:
    """Return the board that this rank inherited, and its index on it; None where there is none."""
    try:
        descriptor, index, num_ranks = map(int, environment[VARIABLE].split(":"))
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{NAME} "):
            return None
        return LeaveBoard(descriptor, num_ranks), index
    except (KeyError, ValueError, OSError):  # not started by a launcher, or a child that it was closed in
        return None


class Leaving:
    """Whether and when this rank saves for the last time."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._board: LeaveBoard | None = None
        self._index = 0
        self._environment = environment
        self._announced = self._over = False
        self.step: int | None = None
        """The step to save before leaving, once all ranks have said theirs."""

    def announce(self) -> None:
        """Say, at a save or after a restore, that this rank can be asked."""
        if not self._announced:
            self._announced = True
            found = board_of(self._environment)
            if found is not None:
                self._board, self._index = found
                self._board.announce(self._index)
                folder = self._environment.get(SAVES)
                if folder:
                    with contextlib.suppress(OSError):  # who is to see it does without
                        rank = self._environment.get("RANK", self._index)
                        os.close(os.open(f"{folder}/rank-{rank}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))

    @property
    def is_asked(self) -> bool:
        """Whether the launcher has asked, and the rank has not tried to leave yet."""
        return self._board is not None and not self._over and self._board.left_s() is not None

    def is_due(self, step: int, said: Callable[[int], list[int] | None]) -> bool:
        """Say, at the end of `step`, whether this is the one to save.

        `said(step)` publishes the step of the first call and returns those of all ranks once all have said one.
        """
        if not self.is_asked:
            return False
        if self.step is None and (steps := said(step)) is not None:
            self.step = step if len(steps) == 1 else max(steps) + 1
        return step == self.step

    def leave(self, step: int, durable: Callable[[float], object]) -> None:
        """Wait until `step` is durable (`durable(timeout_s)` raises where it is not), then end by SIGTERM.

        Returns where a handler of the script's returns, or the script ignores SIGTERM.
        """
        left_s = self._board.left_s() if self._board is not None else None
        self._over = True  # a handler of the script's may save on its own
        try:
            durable(left_s or 0.0)
            said = f"step {step} is saved; leaving, as SIGTERM to the launcher asked"
        except Exception as cause:
            said = f"leaving, as SIGTERM to the launcher asked, without step {step}: {cause}"
        sys.stderr.write(f"headway: {said}\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGTERM)
