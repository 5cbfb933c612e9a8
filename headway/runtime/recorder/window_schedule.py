"""At which steps windows open: the same on all hosts of a job, without a word between them.

A window opens at a multiple of a power of two of steps, its spacing, and has that step as its number. Each host finds
its spacing from what windows cost it. So equal numbers mean equal steps, and the windows of a host on which they cost
more are some of the others':

    windows cost 10 ms    |   |   |   |   |   |   |   |     every 64th step
    windows cost 20 ms    |       |       |       |         every 128th

While one host profiles, the others wait for its collectives; they profile at the same steps. So hosts that are alike
pay one budget together, and not one each. The ranks of one host agree through 8 bytes in a file, some steps ahead: one
that looks late finds out in time.

>>> spacing(cost_ns=10_000_000, step_ns=20_000_000, budget=0.01, least=20)
64
>>> opening_step(now=103, cycle=2, ahead=10, spacing=64)
128
"""

from __future__ import annotations

import os
import random
import struct

from headway.core.machine.host import host_id
from headway.runtime.recorder.probes import Probes

MOST_RANKS = 16
"""Ranks of a job that take part in one window: in larger jobs they take turns."""


def spacing(*, cost_ns: int, step_ns: int, budget: float, least: int) -> int:
    """Return the least power of two of steps (of `step_ns` each) whose `budget` pays for a window of `cost_ns`.

    `least` is the number of steps that a window needs: to be announced, to come, and to be over. With fewer between
    two multiples a host would reach every second or third of them only, and another host the ones between.
    """
    steps = 16
    while (steps < least or steps * step_ns * budget < cost_ns) and steps < 1 << 40:
        steps *= 2
    return steps


def opening_step(*, now: int, cycle: int, ahead: int, spacing: int) -> int:
    """Return the first optimizer step, at least `ahead` cycles after `now`, that ends a multiple of `spacing` cycles.

    A cycle is one turn of all optimizers: `cycle` optimizer steps.
    """
    stride = cycle * spacing
    return -(-(now + ahead * cycle) // stride) * stride


def takes_part(rank: int, num_ranks: int, number: int) -> bool:
    """Whether `rank` records window `number` of a job of `num_ranks`: `MOST_RANKS` or fewer do, others each time.

    >>> sum(takes_part(rank, 1024, 64) for rank in range(1024))
    16
    """
    strides = -(-num_ranks // MOST_RANKS)
    return strides <= 1 or rank % strides == random.Random(number).randrange(strides)


class WindowSchedule:
    """The optimizer step at which the ranks of this host open their next window: 8 bytes in a file."""

    def __init__(self, probes: Probes) -> None:
        recorder = probes.recorder
        self.leads = recorder.rank == 0 if recorder.role else recorder.local_rank == 0
        """Whether this rank writes; a rank that the script spawned itself knows only its rank."""
        self._path = f"{probes.run}/windows/schedule-a{recorder.attempt}-{host_id()}"
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def read(self) -> int:
        """Return the announced step, -1 when there is none."""
        data = os.pread(self._descriptor, 8, 0)
        return struct.unpack("<q", data)[0] if len(data) == 8 else -1

    def write(self, step: int) -> None:
        """Announce the next window; through a descriptor of its own, for the script may have closed and reused ours."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, struct.pack("<q", step), 0)
        finally:
            os.close(descriptor)
