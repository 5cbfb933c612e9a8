"""When asynchronous messages were posted: what is recorded as comm.send or comm.recv is only the wait for them.

A message can move once both ends are posted, so that, and not the start of a wait, is when an end arrived.

>>> key = message_key(np.array([0]), np.array([3]), np.array([False]), np.array([1]))
>>> posted_ns(key, np.array([90]), key, np.array([20])).tolist()
[20]
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.trace.events.intervals import number_alike

Ints = NDArray[np.int64]


def message_key(group: Ints, seq: Ints, receives: NDArray[np.bool_], peer: Ints) -> Ints:
    """[n, 4] What tells the messages of one rank apart: group, n-th between these two ranks, direction, peer."""
    return np.stack([group, seq, receives, peer], axis=1).astype(np.int64)


def posted_ns(key: Ints, start_ns: Ints, post_key: Ints, post_ns: Ints) -> Ints:
    """Return [n] when each wait's message was posted; its own start where that was not recorded (a blocking call).

    `key` [n, 4] and `start_ns` [n] are of the waits, `post_key` [k, 4] and `post_ns` [k] of the posts.
    """
    found = np.array(start_ns, np.int64)
    if not len(post_ns) or not len(found):
        return found
    code = number_alike(np.concatenate([post_key, key]))
    at = np.full(int(code.max()) + 1, -1, np.int64)
    at[code[: len(post_ns)]] = np.arange(len(post_ns))
    which = at[code[len(post_ns) :]]
    return np.where(which >= 0, np.minimum(found, np.asarray(post_ns)[which]), found)
