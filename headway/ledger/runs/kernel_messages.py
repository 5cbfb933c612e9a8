"""Sends and receives on devices: until when a kernel of a pipeline stage waited for the stage at the other end.

Kernels of a message have begun on both ranks before its bytes flow. The n-th
send from one rank to another meets the n-th receive there, as NCCL keeps their
order; torch's sequence numbers count each rank's own messages and match
nothing. No receive ends before its send begins: where one does, the clocks or
the pairs are wrong, and nothing is matched between those two ranks. A window
shows messages from the first that was launched in it, so two ranks may show
unequally many; then those that are paired must have run at the same time for a
moment. A send that was over before its receive began had left its bytes in a
buffer and waited for nobody.

>>> messages = KernelMessages(call=np.array([0, 1]), group=np.zeros(2, int), source=np.array([4, 4]),
...                           target=np.array([5, 5]), sends=np.array([True, False]))
>>> peers_begun(messages, start_ns=np.array([30, 10]), end_ns=np.array([40, 40])).tolist()  # the receive waits to 30
[30, 30]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.trace.events.intervals import Ints, number_alike


@dataclass(frozen=True, slots=True)
class KernelMessages:
    """The messages that send/receive kernels carry, over all ranks; [m] each. A kernel may carry several."""

    call: Ints
    """Index of the kernel's call."""
    group: Ints
    """Process group."""
    source: Ints
    """Rank that sends."""
    target: Ints
    """Rank that receives."""
    sends: NDArray[np.bool_]
    """Whether the kernel is the one that sends."""

    @classmethod
    def of(cls, groups: Mapping[int, Mapping[str, Any]], group: Ints, rank: Ints, *, first: int = 0) -> KernelMessages:
        """Return the messages of kernels [k] with these entries of a trace's `groups`; the calls count from `first`."""
        parts = [np.zeros((5, 0), np.int64)]
        for number in np.unique(group[group >= 0]).tolist():
            entry, calls = groups.get(number, {}), np.flatnonzero(group == number)
            own, blank = rank[calls], np.zeros(len(calls), np.int64)
            for inside, peer in entry.get("sends", ()):
                parts.append(np.stack([calls + first, blank + inside, own, blank + peer, blank + 1]))
            for inside, peer in entry.get("receives", ()):
                parts.append(np.stack([calls + first, blank + inside, blank + peer, own, blank]))
        call, inside, source, target, sends = np.concatenate(parts, axis=1)
        return cls(call, inside, source, target, sends > 0)

    @classmethod
    def joined(cls, parts: Sequence[KernelMessages]) -> KernelMessages:
        """Put the messages of several ranks one behind the other."""
        columns = ("call", "group", "source", "target", "sends")
        return cls(*(np.concatenate([getattr(part, column) for part in parts]) for column in columns))


def peers_begun(messages: KernelMessages, *, start_ns: Ints, end_ns: Ints) -> Ints:
    """[n] When the last kernel had begun that each call's kernel waited for, no sooner than its own begin.

    `start_ns` and `end_ns` [n] are those of the calls' kernels, on one clock. Calls whose peers are not seen get their
    own begin.
    """
    begun = np.array(start_ns, np.int64)
    if not len(messages.call):
        return begun
    channel = number_alike(np.stack([messages.group, messages.source, messages.target], axis=1))
    order = np.lexsort((start_ns[messages.call], channel))
    for rows in np.split(order, np.flatnonzero(np.diff(channel[order])) + 1):
        sent, received = (messages.call[rows[messages.sends[rows] == way]] for way in (True, False))
        count = min(len(sent), len(received))
        even = len(sent) == len(received)
        sent, received = sent[:count], received[:count]
        possible = start_ns[sent] < end_ns[received]
        if not (possible & (even | (start_ns[received] < end_ns[sent]))).all():
            continue
        np.maximum.at(begun, received, start_ns[sent])
        waits = start_ns[received] < end_ns[sent]
        np.maximum.at(begun, sent[waits], start_ns[received[waits]])
    return begun
