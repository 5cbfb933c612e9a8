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

A file that appears whole or not at all.

Use it wherever a reader may meet the file while it is written, or where the
writer may be killed: the bytes go into a temporary file beside the target,
which a rename then puts in its place.

>>> import tempfile
>>> target = Path(tempfile.mkdtemp()) / "a.txt"
>>> with whole_file(target) as draft:
...     _ = draft.write_text("done")
...     target.exists()
False
>>> target.read_text()
'done'
"""

from __future__ import annotations

import csv
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from headway.core.errors import FormatError, InputError

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


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """Return the lines of a table that another program wrote, whose names may be of people: UTF-8, else Latin-1.

    Raises as `open_regular` does.
    """
    data = read_regular(path).removeprefix(b"\xef\xbb\xbf")
    try:
        return data.decode("utf-8").splitlines(keepends=True)
    except UnicodeDecodeError:  # any bytes are text in Latin-1
        return data.decode("latin-1").splitlines(keepends=True)


def read_table(
    path: str | os.PathLike[str], columns: Sequence[str] = (), delimiter: str = ",", *, fix: str = ""
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (line, column -> text) of each row of a table with a header line; it has `columns` and maybe others.

    Raises `InputError` where it cannot be read, `FormatError` where a column is missing, which `fix` mends, or a row
    has too few.
    """
    try:
        table = csv.DictReader(read_lines(path), delimiter=delimiter, restval=None)
        names = list(table.fieldnames or ())
        if missing := [name for name in columns if name not in names]:
            mended = fix or f"Write a header with {', '.join(columns)}."
            raise FormatError(f"{path} has no column {missing[0]}. {mended}")
        for row in table:
            if None in row.values():
                raise FormatError(
                    f"{path}:{table.line_num} has fewer columns than the header. Complete the line or remove it."
                )
            yield table.line_num, row
    except OSError as cause:
        raise InputError(f"cannot read {path}: {cause.strerror}. Give the path of a table.") from cause
    except csv.Error as cause:
        raise FormatError(f"{path}:{table.line_num}: {cause}. Correct that line.") from None


def read_text(path: str | os.PathLike[str], what: str) -> str:
    """Return the text of a regular file, `what` it should be in words; raises `InputError` where it cannot be read."""
    try:
        return read_regular(path).decode("utf-8")
    except OSError as cause:
        raise InputError(f"cannot read {path}: {cause.strerror}. Give the path of {what}.") from cause
    except UnicodeDecodeError as cause:
        raise InputError(f"{path} is not text in UTF-8. Give the path of {what}.") from cause


@contextmanager
def parquet_faults(path: str | os.PathLike[str], *, fix: str = "Fetch or write the file again.") -> Iterator[None]:
    """Have whatever pyarrow raises while it reads `path` end as one `FormatError`, whose last sentence is `fix`.

    What is broken only shows where it is read: in the footer when the file is opened, in a page with its column.
    """
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError, MemoryError) as cause:
        reason = " ".join(str(cause).split()).rstrip(".")
        raise FormatError(f"{path} cannot be read as Parquet: {reason}. {fix}") from cause


# A file that appears whole or not at all.


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield the path of a draft; rename it to `path` when the block ends, remove it when the block raises.

    Raises `InputError` when the folder of `path` does not exist, and for a folder.
    """
    target = Path(path)
    if not target.name or target.is_dir():
        raise InputError(f"{str(path)!r} is no name of a file that could be written. Name one.")
    if not target.parent.is_dir():
        raise InputError(f"{target} cannot be written: the folder {target.parent} does not exist. Create it first.")
    draft = target.with_name(f".{target.name}.{os.getpid()}.draft")
    draft.unlink(missing_ok=True)  # of a dead process of our number; or a link that somebody laid there to be followed
    try:
        yield draft
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
