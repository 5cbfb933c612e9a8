"""Keeps a fleet's supervisor running: the process that reads from the fleet starts it again when it is killed.

Master and workers go with their supervisor. The next one begins with the
master's checkpoint; readers come back by themselves, and nothing that a loop
took comes again. A supervisor that ends by itself (its masters keep ending) is
not started again, nor one that is killed `MAX_QUICK` times in a row as soon
as it runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time

from headway.data.fleet.supervisor import MAX_QUICK, QUICK_S, Settings, start
from headway.data.fleet.worker import Make

LOG = logging.getLogger(__name__)
LOG.addHandler(logging.NullHandler())


class Keeper:
    """One supervisor at a time, of the process that made this object. Close it to end the fleet."""

    def __init__(self, make: Make, settings: Settings, *, sweeps: bool = False) -> None:
        """Start the fleet; with `sweeps` its folder goes with it, however this process ends."""
        self._make, self._settings, self._sweeps = make, settings, sweeps
        self._pid, self._lock, self._closed = os.getpid(), threading.RLock(), False
        self.supervisor, self._channel = start(make, settings, sweeps=sweeps)
        """Process id of the supervisor that runs now."""
        self._thread = threading.Thread(target=self._watch, name="headway-fleet-keeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let the fleet end; a collector may call it in any thread. In a fork of the process that made it: nothing."""
        if self._pid == os.getpid():
            with self._lock:
                self._closed = True
                self._channel.close()

    def close(self) -> None:
        """End the fleet and wait for its end; doing it again is fine."""
        self.stop()
        if self._pid == os.getpid():
            self._thread.join()

    def _watch(self) -> None:
        """Wait for the supervisor's end; start another where it was killed."""
        num_quick = 0
        while True:
            begun_s = time.monotonic()
            code = _waited_for(self.supervisor)
            with self._lock:
                if self._closed or code >= 0:
                    return
                num_quick = num_quick + 1 if time.monotonic() - begun_s < QUICK_S else 0
                if num_quick >= MAX_QUICK:
                    return
                LOG.warning("the fleet's supervisor was ended by signal %d; another one is started", -code)
                self._channel.close()
                self.supervisor, self._channel = start(self._make, self._settings, sweeps=self._sweeps)
                if self._closed:  # by a collector, while this thread started it
                    self._channel.close()


def _waited_for(pid: int) -> int:
    """Wait until a child has ended; return its exit code, or minus the signal that ended it."""
    # Not with waitpid alone: where the script waits for any child, it may take this one's end first.
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll()
        finally:
            os.close(pidfd)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return -9
