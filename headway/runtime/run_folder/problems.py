"""What goes wrong with a recording while a job runs: kept, and said once the job has ended, a line for each cause.

A full disk shows at every file at once. Whatever a launcher does for the recording stands behind `kept`, so that it
never ends the job, nor hides how that ended.

>>> problems = Problems()
>>> with problems.kept("run.json"): raise OSError(28, "No space left on device")
>>> with problems.kept("events of attempt 0"): raise OSError(28, "No space left on device", "e.parquet")
>>> print(*problems.lines(), sep=chr(10))
the recording lacks run.json; events of attempt 0: No space left on device
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

MOST = 6
"""What is missing for one cause is listed up to here, then counted."""


def disk_full() -> OSError:
    """Return what the system raises on a full disk, where a write ended short without an error."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Problems:
    """What of a recording is missing, by its cause; in the order in which it was seen."""

    def __init__(self) -> None:
        self._missing: dict[str, list[str]] = {}
        self._others: list[str] = []

    def add(self, missing: str, cause: BaseException) -> None:
        """Note that `missing` could not be recorded, because of `cause`."""
        of_system = os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else repr(cause)
        of_cause = self._missing.setdefault(of_system, [])
        if missing not in of_cause:
            of_cause.append(missing)

    def say(self, text: str) -> None:
        """Note something else to be said at the end."""
        self._others.append(text)

    @contextmanager
    def kept(self, missing: str) -> Iterator[None]:
        """Keep what the block raises, as the cause for which `missing` is not recorded."""
        try:
            yield
        except Exception as cause:  # whatever it is, the job goes on
            self.add(missing, cause)

    def lines(self) -> list[str]:
        """Return what there is to say."""
        return [f"the recording lacks {_listed(missing)}: {cause}" for cause, missing in self._missing.items()] + (
            self._others
        )


def _listed(missing: list[str]) -> str:
    more = f"; and {len(missing) - MOST} more" if len(missing) > MOST else ""
    return "; ".join(missing[:MOST]) + more
