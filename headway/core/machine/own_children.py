"""Children of headway's own in a process whose script looks after its children by a signal handler.

A script may stop when a child of it ends, or count those that did. A child that is forked and waited for in a block
of `unheard` is not a child of the script's: the handler does not run for it. Where a child of the script's own ends
meanwhile, the signal is raised again after the block.

>>> import os
>>> heard = []
>>> before = signal.signal(signal.SIGCHLD, lambda *_: heard.append(1))
>>> with unheard():
...     pid = os.fork()
...     if pid == 0: os._exit(0)
...     _ = os.waitpid(pid, 0)
>>> _ = signal.signal(signal.SIGCHLD, before)
>>> heard
[]
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_waitid = os.waitid  # as it is: remedies wrap the script's


@contextmanager
def unheard() -> Iterator[None]:
    """Leave the script's handler of SIGCHLD out for the length of a block that forks a child and waits for it.

    Outside of the main thread, where Python sets no handlers, it stays.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    ended_before = _has_ended()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
        if not ended_before and _has_ended():
            signal.raise_signal(signal.SIGCHLD)


def _has_ended() -> bool:
    """Tell whether a child has ended that nobody has waited for yet."""
    with suppress(ChildProcessError):
        return _waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return False
