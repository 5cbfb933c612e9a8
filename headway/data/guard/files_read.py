"""Which files a batch was read from, and whether one of them has changed since.

A worker reads ahead: a file that the training loop writes meanwhile is not yet
what it will be when the loop asks for the batch. So a worker notes which files
it opens, looks at and lists, with what the file system says of each, and the
training process looks again when the batch is due.

    worker      open(f) ── noted: size, times ──> batch, {f: noted}
    process                                       is f as noted? ── no ──> the batch is read here

Opening goes through Python: what native code opens by itself is not noted (`system_calls` finds it in a trial). And
the times of a file tell nothing while this process has it mapped for writing: a store to a page that was written before
leaves them as they are.

>>> import tempfile
>>> files = FilesRead()
>>> mapped_for_writing().clear()  # of examples before this one: their inodes are used again
>>> with tempfile.NamedTemporaryFile("w") as file:
...     with files.noting() as noted, open(file.name) as copy:
...         _ = copy.read()
...     before = changed(noted)
...     _ = file.write("more"), file.flush()
...     before, changed(noted) == file.name
(None, True)
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any
from urllib.parse import unquote

from headway.core.machine.host import mapped_memory
from headway.runtime.in_rank.bootstrap import active

FileStat = tuple[int, ...] | None
"""Device, inode, size, times of the last two kinds of change in ns; of a link that of its own change and its inode too.

None for a file that is not there; of a link that leads nowhere the first five are 0.
"""

LISTINGS = ("os.listdir", "os.scandir")
"""Audit events of looks into folders."""

DATABASE = "sqlite3.connect"
"""Audit event of a database that is opened, which is a file."""

LOOKS = ("stat", "lstat", "access", "readlink")
"""Functions of `os` that look at a file and are no audit events."""

MAPPED = "mmap.__new__"
"""Audit event of a mapping, with its descriptor and what it may be accessed for."""

MAY_WRITE = (0, 2)
"""How mappings through which the file is written may be accessed: not said, and for writing."""

ELSEWHERE = ("/proc/", "/sys/", "/dev/")
"""Where the kernel makes up files as they are read."""

CODE = (".pyc", ".so")
"""Endings of files of an import, which another worker may just have written."""

TICK_NS = 20_000_000
"""File systems know the time of a write to some ms: one so close before a moment may have been after it."""

FILE = "the script writes {} while examples are read from it"
"""Why a batch that was read ahead is not the one that the loop would get."""

NEVER = (0, 0, 0, 0, 0)
"""What no file is like: one that was noted so has always changed."""

_stat, _lstat = os.stat, os.lstat


class _OfThread(threading.local):
    """What the calling thread notes."""

    noted: dict[str, FileStat] | None = None


class FilesRead:
    """Notes the files that this process reads; for as long as it lives, as audit hooks cannot be taken back."""

    def __init__(self, *, looks: bool = False) -> None:
        """Begin to listen; with `looks` also to what only asks whether a file is there, for good in this process."""
        self._local = _OfThread()
        self._of_context: ContextVar[dict[str, FileStat] | None] = ContextVar("headway_files_read", default=None)
        session = active()  # the recording of this process is no data of the script's
        run = os.environ.get("HEADWAY_RUN") if session is None else session.probes.run
        self._elsewhere = (*ELSEWHERE, f"{os.path.abspath(run)}{os.sep}") if run else ELSEWHERE
        sys.addaudithook(self._heard)
        mapped_for_writing()
        for name in LOOKS if looks else ():
            setattr(os, name, self.looking(getattr(os, name)))

    @contextmanager
    def noting(self) -> Iterator[dict[str, FileStat]]:
        """Give a mapping that fills with the files read in the block, each as it was before it was read."""
        found: dict[str, FileStat] = {}
        outer, self._local.noted = self._local.noted, found
        token = self._of_context.set(found)
        try:
            yield found
        finally:
            self._local.noted = outer
            self._of_context.reset(token)
            if outer is not None:
                outer |= found | outer  # what was noted first counts

    def _found(self) -> dict[str, FileStat] | None:
        found = self._local.noted
        return self._of_context.get() if found is None else found

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if (found := self._found()) is None:
            return
        if event == "open" or event in LISTINGS:
            self._note(found, arguments[0] if arguments else ".")
        elif event == DATABASE and arguments and isinstance(arguments[0], (str, bytes, os.PathLike)):
            for name in _database(os.fsdecode(arguments[0])):
                for ending in ("", "-wal", "-journal"):  # what was written last may not be in the file itself yet
                    self._note(found, name + ending)
            if "mode=memory" in os.fsdecode(arguments[0]):  # of this process: what a fork has is another one
                found["a database in memory"] = NEVER

    def looking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of `os` that looks at a file: one of `LOOKS`."""

        @wraps(original)
        def look(*arguments: Any, **named: Any) -> Any:
            if (found := self._found()) is not None:
                self._note(found, arguments[0] if arguments else named.get("path"))
            return original(*arguments, **named)

        return look

    def _note(self, found: dict[str, FileStat], path: Any) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return  # a descriptor: it was opened by a path
        name = os.path.abspath(os.fsdecode(path))
        if not f"{name}{os.sep}".startswith(self._elsewhere) and not name.endswith(CODE):
            found.setdefault(name, noted(name))


@cache
def files_read() -> FilesRead:
    """Return the listener of this process, which the children that it forks have as well: one, as it stays for good."""
    return FilesRead()


def note_looks(patch: Callable[[str, Callable[[Any], Any]], Any]) -> None:
    """Have what only looks at a file noted too, from now on; `patch(target, wrapper)` replaces a function."""
    for name in LOOKS:
        patch(f"os:{name}", files_read().looking)


def _database(name: str) -> list[str]:
    """Return the paths that the name of a database may mean: it may be a URI, with options.

    >>> _database("file:///data/a%20b.db?mode=ro"), _database("labels.db")
    (['file:///data/a%20b.db?mode=ro', '/data/a b.db'], ['labels.db'])
    """
    if not name.startswith("file:"):
        return [name]
    path = name.removeprefix("file:").partition("?")[0].partition("#")[0]
    if path.startswith("//"):  # then the name of this host may follow
        path = "/" + path[2:].partition("/")[2]
    return [name, unquote(path)]


@cache
def mapped_for_writing() -> set[tuple[int, int]]:
    """Return device and inode of the files that this process, or one that it was forked from, can write by memory.

    Those that are mapped at the first call, whoever mapped them, and those that Python maps from then on, also where
    they are mapped no more: the pages may have been written before an example was read, and again after it. The
    kernel's list has a thousand lines, and is read once.
    """
    found: set[tuple[int, int]] = set()
    with suppress(OSError):
        for row in mapped_memory():
            if row.access[1::2] == "ws" and row.inode and row.path:
                with suppress(OSError):  # it was removed; by its path, as some file systems show two device numbers
                    facts = _stat(row.path)
                    found.add((facts.st_dev, facts.st_ino))

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event == MAPPED and arguments[0] >= 0 and arguments[2] in MAY_WRITE:
            with suppress(OSError):
                if fcntl.fcntl(arguments[0], fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR:
                    facts = os.fstat(arguments[0])
                    found.add((facts.st_dev, facts.st_ino))

    sys.addaudithook(heard)
    return found


def noted(path: str) -> FileStat:
    """Return what the file system says of a file, and of the link to it that `path` may be."""
    try:
        itself = _lstat(path)
    except (OSError, ValueError):
        return None
    link = (itself.st_ctime_ns, itself.st_ino) if stat.S_ISLNK(itself.st_mode) else ()
    try:
        facts = _stat(path) if link else itself
    except OSError:
        return *NEVER, *link
    size = facts.st_size if stat.S_ISREG(facts.st_mode) else 0
    return facts.st_dev, facts.st_ino, size, facts.st_mtime_ns, facts.st_ctime_ns, *link


def changed(files: Mapping[str, FileStat]) -> str | None:
    """Return the first file that is not as it was noted, or may not be; None when all of them are."""
    mapped = mapped_for_writing()
    for path, before in files.items():
        now = noted(path)
        if now != before or (now is not None and now[:2] in mapped):
            return path
    return None


def written_since(files: Mapping[str, FileStat], moment_ns: int) -> str | None:
    """Return the first file that was written after `moment_ns` of the wall clock, or may have been; None: none was."""
    mapped = mapped_for_writing()
    for path, facts in files.items():
        if facts is not None and (max(facts[3:6]) > moment_ns - TICK_NS or facts[:2] in mapped):
            return path
    return None
