"""Keeps a fleet's supervisor running: the process that reads from the fleet starts it again when it is killed.

Master and workers go with their supervisor. The next one begins with the
master's checkpoint; readers come back by themselves, and nothing that a loop
took comes again. A supervisor that ends by itself (its masters keep ending) is
not started again, nor one that is killed `MAX_QUICK` times in a row as soon
as it runs: then the fleet has ended. Readers of this process learn why from
`Keeper.failure`, all others from a process that refuses them (`hub`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time

from headway.core.wire.channel import ChannelClosed
from headway.data.fleet.hub import START_AGAIN, ended_with
from headway.data.fleet.supervisor import MAX_QUICK, QUICK_S, FleetSettings, start
from headway.data.fleet.worker import Make

LOG = logging.getLogger(__name__)
LOG.addHandler(logging.NullHandler())


class Keeper:
    """One supervisor at a time, of the process that made this object. Close it to end the fleet."""

    def __init__(self, make: Make, settings: FleetSettings, *, sweeps: bool = False) -> None:
        """Start the fleet; with `sweeps` its folder goes with it, however this process ends."""
        self._make, self._settings, self._sweeps = make, settings, sweeps
        self._pid, self._lock, self._closed = os.getpid(), threading.RLock(), False
        self.failure = ""
        """Why the fleet has ended, for its user; empty as long as it has not, or was closed."""
        self.supervisor, self._channel = start(make, settings, sweeps=sweeps)
        """Process id of the supervisor that runs now, after a failure that of the process that tells others of it."""
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
        """Wait for the supervisor's end; start another where it was killed, else one that says why there is none."""
        num_quick = 0
        while True:
            begun_s = time.monotonic()
            code = _waited_for(self.supervisor)
            with self._lock:
                if self._closed or self.failure:
                    return
                num_quick = num_quick + 1 if time.monotonic() - begun_s < QUICK_S else 0
                self.failure = self._why_ended(code, num_quick)
                if self.failure:
                    LOG.error("the fleet has ended: %s", self.failure)
                else:
                    LOG.warning("the fleet's supervisor ended with %s; another one is started", ended_with(code))
                self._channel.close()
                try:
                    self.supervisor, self._channel = start(
                        self._make, self._settings, sweeps=self._sweeps, refuses=self.failure
                    )
                except Exception as error:  # as when the system lets us start no more processes
                    self.failure = self.failure or (
                        f"the fleet's supervisor ended with {ended_with(code)}, and another one cannot be started "
                        f"({type(error).__name__}: {error}). {START_AGAIN}"
                    )
                    LOG.exception("no process tells others that the fleet has ended: %s", self.failure)
                    return
                if self._closed:  # by a collector, while this thread started it
                    self._channel.close()

    def _why_ended(self, code: int | None, num_quick: int) -> str:
        """Return why there is to be no other supervisor after one that ended with `code`, else nothing."""
        with contextlib.suppress(ChannelClosed, TimeoutError):
            said: str = self._channel.receive(timeout_s=0.0)[0].why
            return said
        if code is not None and code >= 0:
            return (
                f"the fleet's supervisor ended with {ended_with(code)}: its traceback is in the output of this "
                f"process. {START_AGAIN}"
            )
        if num_quick >= MAX_QUICK:
            return (
                f"{MAX_QUICK} supervisors of the fleet in a row ended within {QUICK_S:g} s of their start, the last "
                f"with {ended_with(code)}, so no more are started. {START_AGAIN}"
            )
        return ""


def _waited_for(pid: int) -> int | None:
    """Wait until a child has ended; return its exit code, minus the signal that ended it, or None when it is lost."""
    # Not with waitpid alone: where the script waits for any child, it may take this one's end first.
    with contextlib.suppress(OSError):  # it has ended already, or this process can open no more files
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
        return None
