"""Opens files that strangers left: regular ones only, so that no read waits for a writer that never comes.

A FIFO, a socket or a device in the place of a file would block a plain
`open` for good, or never end. `open_regular` refuses them before a byte is
read.

>>> import tempfile
>>> from pathlib import Path
>>> pipe = Path(tempfile.mkdtemp()) / "a.json"
>>> os.mkfifo(pipe)
>>> read_regular(pipe)
Traceback (most recent call last):
headway.core.errors.InputError: ...a.json is a FIFO, not a regular file. Name a file, or copy its content into one.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from headway.core.errors import InputError

KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
"""Type of a file that is not regular -> what a person calls it."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file to read its bytes.

    Raises `InputError` where `path` is a FIFO, a socket or a device; `OSError` as `open` does, for a folder too.
    """
    # O_NONBLOCK: a FIFO without a writer opens at once and can be refused; it changes nothing for regular files.
    with _refused(path):
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_others(os.fstat(number).st_mode, path)
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a regular file. Raises as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise as `open_regular` does, for readers that open the path themselves."""
    with _refused(path):
        mode = os.stat(path).st_mode
    _refuse_others(mode, path)


@contextmanager
def _refused(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the system says of a link to itself, or of a socket, into `InputError`."""
    try:
        yield
    except OSError as cause:
        if cause.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        what = "a link that leads to itself" if cause.errno == errno.ELOOP else "a socket"
        raise InputError(f"{path} is {what}, not a regular file. Name a file.") from cause


def _refuse_others(mode: int, path: str | os.PathLike[str]) -> None:
    kind = KINDS.get(stat.S_IFMT(mode))
    if kind is not None:
        raise InputError(f"{path} is {kind}, not a regular file. Name a file, or copy its content into one.")


def read_text(path: str | os.PathLike[str], what: str) -> str:
    """Return the text of a regular file, `what` it should be in words; raises `InputError` where it cannot be read."""
    try:
        return read_regular(path).decode("utf-8")
    except OSError as cause:
        raise InputError(f"cannot read {path}: {cause.strerror}. Give the path of {what}.") from cause
    except UnicodeDecodeError as cause:
        raise InputError(f"{path} is not text in UTF-8. Give the path of {what}.") from cause
