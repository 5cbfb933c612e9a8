"""A bell for a thread that waits in a selector: any thread may ring, also after the waiting one has left.

>>> from headway.core.machine.host import readable
>>> with Waker() as wake:
...     wake.ring(), wake.ring()
...     readable(wake.fileno(), 0.0), wake.clear(), readable(wake.fileno(), 0.0)
(None, None)
(True, None, False)
>>> wake.ring()
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Self


class Waker:
    """Register it for reading; `clear` it when it was rung. A signal handler may ring too."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.RLock()  # a number that is closed may be another file's a moment later

    def ring(self) -> None:
        """Wake the thread, now or when it next waits; nothing once closed."""
        with self._lock:
            if self._fd >= 0:
                with contextlib.suppress(BlockingIOError):  # it has been rung so often that it will not be missed
                    os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Forget that it was rung."""
        with self._lock, contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def fileno(self) -> int:
        """Return the descriptor to wait on; -1 once closed."""
        return self._fd

    def close(self) -> None:
        """Give the descriptor back; doing it again is fine."""
        with self._lock:
            if self._fd >= 0:
                fd, self._fd = self._fd, -1
                os.close(fd)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()
