"""One background thread that works off a bounded queue, and never hides a failure.

Use it to keep slow work (writing, compressing, sending) off the step path.
The queue holds at most `capacity` entries; a full one blocks the caller or
drops the newest entry, as the caller chose. When the work raises, the thread
stops and every later call raises `BackgroundError` with the cause chained.

>>> seen = []
>>> with BackgroundWorker(seen.append, capacity=8) as worker:
...     accepted = [worker.put(x) for x in (1, 2, 3)]
>>> seen, accepted
([1, 2, 3], [True, True, True])
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

from headway.core.errors import BackgroundError, Closing, HeadwayError, InputError
from headway.core.machine.hidden_thread import HiddenThread, forget

T = TypeVar("T")


class BackgroundWorker(Closing, Generic[T]):
    """Calls `work(entry)` for every accepted entry, in order, on one thread that the script does not see.

    Close it, or use it in a `with` block: at interpreter exit the thread
    stops where it is. It belongs to the process that made it.
    """

    def __init__(
        self,
        work: Callable[[T], object],
        *,
        capacity: int = 64,
        when_full: Literal["block", "drop"] = "block",
        name: str = "headway-worker",
    ) -> None:
        """Start the thread. Raises `InputError` on a capacity below 1 or an unknown `when_full`."""
        if capacity < 1:
            raise InputError(f"capacity is {capacity}; a queue needs room for at least 1 entry. Pass 1 or more.")
        if when_full not in ("block", "drop"):
            raise InputError(f"when_full is {when_full!r}; choose 'block' or 'drop'.")
        self._work = work
        self._capacity = capacity
        self._drop = when_full == "drop"
        self._queue: deque[T] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._closing = False
        self._finished = False
        self._failure: BaseException | None = None
        self._dropped = 0
        self._pid = os.getpid()
        self._thread = HiddenThread(self._run, name=name).start()

    @property
    def dropped(self) -> int:
        """Entries that were not worked off: refused by a full queue, or left over when the work failed."""
        return self._dropped

    def put(self, entry: T) -> bool:
        """Queue one entry; return False if it was dropped.

        Raises `BackgroundError` if earlier work failed, `InputError` after
        `close`, `HeadwayError` in a forked child.
        """
        self._check_process()
        with self._changed:
            while True:
                self._raise_failure()
                if self._closing:
                    raise InputError("this worker is closed; put entries before close().")
                if len(self._queue) < self._capacity:
                    break
                if self._drop:
                    self._dropped += 1
                    return False
                self._changed.wait()
            self._queue.append(entry)
            self._changed.notify_all()
            return True

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything queued so far is done; raises `BackgroundError` on failure or after `timeout_s`."""
        self._check_process()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while (self._queue or self._busy) and self._failure is None:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise BackgroundError(
                        f"{len(self._queue) + self._busy} entries are not done after {timeout_s} s. "
                        "Wait longer, or look at what the worker does."
                    )
                self._changed.wait(left)
            self._raise_failure()

    def close(self, timeout_s: float | None = None) -> None:
        """Finish what is queued and stop the thread; calling it again does nothing. Raises as `flush` does."""
        if self._finished or self._pid != os.getpid():
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        try:
            self.flush(timeout_s)
        finally:
            # After a timeout work is left, and closing again waits again.
            self._finished = not (self._queue or self._busy)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        """Work off the queue until it is closed and empty, or the work fails."""
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                entry = self._queue.popleft()
                self._busy = True
                self._changed.notify_all()
            failure: BaseException | None = None
            try:
                self._work(entry)
            except BaseException as error:  # nothing may be lost here: it surfaces at the caller's next call
                failure = error
            forget()  # the work may have asked for its thread
            with self._changed:
                self._busy = False
                if failure is not None:
                    self._failure = failure
                    self._dropped += len(self._queue)
                    self._queue.clear()
                self._changed.notify_all()
                if failure is not None:
                    return

    def _raise_failure(self) -> None:
        """Tell the caller about an earlier failure."""
        if self._failure is not None:
            name = self._thread.name
            raise BackgroundError(
                f"{name} failed earlier: {self._failure!r}; {self._dropped} entries were not done. "
                "Remove the cause and start a new worker."
            ) from self._failure

    def _check_process(self) -> None:
        """A fork copies the queue but not the thread."""
        if self._pid != os.getpid():
            raise HeadwayError(
                f"this worker runs in process {self._pid}, not in {os.getpid()}. Start one after the fork."
            )
