"""Trials of a user's code in a forked child, which can only read: what it is asked, how long it may take.

>>> in_child(lambda: ("it draws", 7))
('it draws', 7)
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch

from headway.core.processes.child import said
from headway.runtime.host.host_memory import address_limit
from headway.runtime.script.run_delay import read_delay

TIMEOUT_S = 60.0
"""A child that has not answered by then hangs, as a worker would, where the caller gives it no other limit."""

ENDS = {-signal.SIGSEGV: "reading it writes to memory that processes share, or crashes in a forked one"}
"""How a child ends -> what that says of the dataset."""


@dataclass(slots=True)
class Limit:
    """How long each child of one decision may take."""

    seconds: float = TIMEOUT_S
    reached: bool = False
    """Whether a child has not answered by then."""


_LIMIT: ContextVar[Limit | None] = ContextVar("headway_limit", default=None)
"""The limit of the decision that this thread is taking."""

waited_ns = [0]
"""[1] How long the children of `in_child` have waited for a core so far: other load on the host, or a low priority."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[Limit]:
    """Give each child that `in_child` forks in this block so many seconds; the limit tells whether one took them all.

    >>> with limited(0.2) as limit:
    ...     in_child(signal.pause)[0], limit.reached
    ('reading an example in a forked process took over 0.2 s: it waits for a lock of another thread, or hangs', True)
    """
    limit = Limit(seconds)
    token = _LIMIT.set(limit)
    try:
        yield limit
    finally:
        _LIMIT.reset(token)


def in_child(
    work: Callable[[], tuple[str | None, Any]], timeout_s: float | None = None, *, lose_writes: bool = False
) -> tuple[str | None, Any]:
    """Return what `work` returns in a forked child with one intra-op thread; (reason, 0) when it fails there.

    It fails as well when it takes longer than `timeout_s`, by default what `limited` says. The child can only read
    (`core.machine.apart`): neither this process nor the files of the script notice it. A write to shared memory is a
    reason, or is lost with the child.
    """

    def worked() -> tuple[Any, ...]:
        return *work(), run_delay_ns()

    def answered() -> bytes:
        torch.set_num_threads(1)
        # What is imported now may ask for it (torch's compiler does), and trying folders out writes to them.
        tempfile.tempdir = tempfile.tempdir or "/tmp"
        try:
            answer = worked()
        except Exception as failure:
            answer = f"reading an example in a forked process raised {type(failure).__name__}: {failure}", 0, -1
        return pickle.dumps(answer)

    if (limited_to := address_limit()) is not None:  # nothing that is tried here may be applied then
        return limited_to, 0
    limit = _LIMIT.get() or Limit()
    seconds, began = limit.seconds if timeout_s is None else timeout_s, monotonic()
    try:
        answered_bytes, code = said(answered, seconds, apart="lose writes" if lose_writes else "end at writes")
        answer = pickle.loads(answered_bytes)
    except Exception:
        took = monotonic() - began >= seconds
        limit.reached = limit.reached or took
        reason = f"reading an example ended the forked process that tried it ({code})"
        if took:
            reason = f"reading an example in a forked process took over {seconds:g} s: "
            reason += "it waits for a lock of another thread, or hangs"
        answer = ENDS.get(code, reason), 0
    else:
        waited_ns[0] += max(answer[2], 0)
    return answer[0], answer[1]


def run_delay_ns() -> int:
    """Return how long this process's first thread has waited for a core, -1 if unknown.

    Not by `open_schedstat`, which goes by `os.getpid`: in a child that reads as its parent would, that is the parent's.
    """
    try:
        descriptor = os.open("/proc/self/schedstat", os.O_RDONLY)
    except OSError:
        return -1
    try:
        return read_delay(descriptor)
    finally:
        os.close(descriptor)
