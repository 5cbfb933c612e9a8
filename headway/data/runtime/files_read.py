"""Which files a batch was read from, and whether one of them has changed since.

A worker reads ahead: a file that the training loop writes meanwhile is not yet
what it will be when the loop asks for the batch. So a worker notes which files
it opens, looks at and lists, with what the file system says of each, and the
training process looks again when the batch is due.

    worker      open(f) ── noted: size, times ──> batch, {f: noted}
    process                                       is f as noted? ── no ──> the batch is read here

Opening goes through Python: what native code opens by itself is not noted.

>>> import tempfile
>>> files = FilesRead()
>>> with tempfile.NamedTemporaryFile("w") as file:
...     with files.noting() as noted, open(file.name) as copy:
...         _ = copy.read()
...     before = changed(noted)
...     _ = file.write("more"), file.flush()
...     before, changed(noted) == file.name
(None, True)
"""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from headway.runtime.bootstrap import active

Noted = tuple[int, int, int, int, int] | None
"""Device, inode, size, times of the last changes in ns; None for a file that is not there."""

LISTINGS = ("os.listdir", "os.scandir")
"""Audit events of looks into folders."""

DATABASE = "sqlite3.connect"
"""Audit event of a database that is opened, which is a file."""

LOOKS = ("stat", "lstat", "access")
"""Functions of `os` that look at a file and are no audit events."""

ELSEWHERE = ("/proc/", "/sys/", "/dev/")
"""Where the kernel makes up files as they are read."""

CODE = (".pyc", ".so")
"""Endings of files of an import, which another worker may just have written."""

TICK_NS = 20_000_000
"""File systems know the time of a write to some ms: one so close before a moment may have been after it."""

FILE = "the script writes {} while examples are read from it"
"""Why a batch that was read ahead is not the one that the loop would get."""

_stat = os.stat


class _OfThread(threading.local):
    """What the calling thread notes."""

    noted: dict[str, Noted] | None = None


class FilesRead:
    """Notes the files that this process reads; for as long as it lives, as audit hooks cannot be taken back."""

    def __init__(self, *, looks: bool = False) -> None:
        """Begin to listen; with `looks` also to what only asks whether a file is there, for good in this process."""
        self._local = _OfThread()
        session = active()  # the recording of this process is no data of the script's
        run = os.environ.get("HEADWAY_RUN") if session is None else session.probes.run
        self._elsewhere = (*ELSEWHERE, f"{os.path.abspath(run)}{os.sep}") if run else ELSEWHERE
        sys.addaudithook(self._heard)
        for name in LOOKS if looks else ():
            setattr(os, name, self._looking(getattr(os, name)))

    @contextmanager
    def noting(self) -> Iterator[dict[str, Noted]]:
        """Give a mapping that fills with the files read in the block, each as it was before it was read."""
        found: dict[str, Noted] = {}
        self._local.noted = found
        try:
            yield found
        finally:
            self._local.noted = None

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._local.noted is None:
            return
        if event == "open" or event in LISTINGS:
            self._note(arguments[0] if arguments else ".")
        elif event == DATABASE and arguments and isinstance(arguments[0], (str, bytes, os.PathLike)):
            for ending in ("", "-wal", "-journal"):  # what was written last may not be in the file itself yet
                self._note(os.fsdecode(arguments[0]) + ending)

    def _looking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def look(*arguments: Any, **named: Any) -> Any:
            if self._local.noted is not None:
                self._note(arguments[0] if arguments else named.get("path"))
            return original(*arguments, **named)

        return look

    def _note(self, path: Any) -> None:
        found = self._local.noted
        if found is None or not isinstance(path, (str, bytes, os.PathLike)):
            return  # a descriptor: it was opened by a path
        name = os.path.abspath(os.fsdecode(path))
        if not f"{name}{os.sep}".startswith(self._elsewhere) and not name.endswith(CODE):
            found.setdefault(name, noted(name))


@cache
def files_read() -> FilesRead:
    """Return the listener of this process, which the children that it forks have as well: one, as it stays for good."""
    return FilesRead()


def noted(path: str) -> Noted:
    """Return what the file system says of a file."""
    try:
        facts = _stat(path)
    except (OSError, ValueError):
        return None
    size = facts.st_size if stat.S_ISREG(facts.st_mode) else 0
    return facts.st_dev, facts.st_ino, size, facts.st_mtime_ns, facts.st_ctime_ns


def changed(files: Mapping[str, Noted]) -> str | None:
    """Return the first file that is not as it was noted, None when all of them are."""
    return next((path for path, before in files.items() if noted(path) != before), None)


def written_since(files: Mapping[str, Noted], moment_ns: int) -> str | None:
    """Return the first file that was written after `moment_ns` of the wall clock, or may have been; None: none was."""
    for path, facts in files.items():
        if facts is not None and max(facts[3:]) > moment_ns - TICK_NS:
            return path
    return None
