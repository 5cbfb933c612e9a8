"""Which messages a send/receive kernel of a profiler trace carries.

torch says of each send and receive, in a row of the host, to or from which
rank it goes. NCCL runs one kernel for a message, or one for a batch of them,
which it launches when the batch is complete:

    host     |send to 4| |receive from 4| |launch|        |send to 4 [launch]|
    stream                                    |  kernel  |                |  kernel  |

So a message belongs to the first launch of its thread that comes after its
begin. What a kernel carries is an entry of the trace's table of groups: the
process group and the other end of each message, in order.

>>> entry = message_entry([(0, 4, True), (0, 4, False)])
>>> entry["name"], entry["sends"], entry["receives"]
('messages: to 4 in 0, from 4 in 0', [[0, 4]], [[0, 4]])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Begins:
    """When `n` rows begin, and on which lane."""

    row: Ints
    """[n] Number of each row."""

    lane: Ints
    """[n] Its lane."""

    start_ns: Ints
    """[n] Its begin."""


def next_of(rows: Begins, among: Begins) -> Ints:
    """[n] Row of `among` that begins first on the lane of each of `rows` at its begin or after it, -1 for none."""
    found = np.full(len(rows.row), -1, np.int64)
    for lane in np.unique(rows.lane).tolist():
        own, theirs = np.flatnonzero(rows.lane == lane), np.flatnonzero(among.lane == lane)
        theirs = theirs[np.argsort(among.start_ns[theirs], kind="stable")]
        at = np.searchsorted(among.start_ns[theirs], rows.start_ns[own])
        there = at < len(theirs)
        found[own[there]] = among.row[theirs[at[there]]]
    return found


def messages_of(kernel: Ints, launch: Ints, messages: Begins, launches: Begins) -> dict[int, list[int]]:
    """Return kernel -> rows of the messages that it carries, in order; kernels of which that is not known are left out.

    `kernel` [k] are rows of kernels, `launch` [k] of their launches, -1 where those are not in the file. Of kernels
    that one launch started (a replayed graph) nothing is known.
    """
    known, first, count = np.unique(launch, return_index=True, return_counts=True)
    alone = (known >= 0) & (count == 1)
    kernel_of = dict(zip(known[alone].tolist(), kernel[first[alone]].tolist(), strict=True))
    carrier = next_of(messages, launches)
    found: dict[int, list[int]] = {}
    for at in np.argsort(messages.start_ns, kind="stable").tolist():
        if int(carrier[at]) in kernel_of:
            found.setdefault(kernel_of[int(carrier[at])], []).append(int(messages.row[at]))
    return found


def message_entry(messages: Sequence[tuple[int, int, bool]]) -> dict[str, Any]:
    """Return the entry of a kernel in the table of groups: `messages` are (process group, other rank, whether sent)."""
    words = [f"{'to' if sent else 'from'} {peer} in {group}" for group, peer, sent in messages]
    return {
        "name": f"messages: {', '.join(words)}",
        "ranks": [],
        "sends": [[group, peer] for group, peer, sent in messages if sent],
        "receives": [[group, peer] for group, peer, sent in messages if not sent],
    }
