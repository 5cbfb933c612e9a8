"""Files that are whole, or not there, even after the power went.

`whole_file` of core protects a reader from a half-written file; what is
stored here must also survive the crash of the machine: the bytes are flushed
and fsynced before the rename, and the folder after it. Every write of a
checkpoint goes through these functions, so that one test sees their order.

>>> import tempfile
>>> target = Path(tempfile.mkdtemp()) / "a.bin"
>>> write_durably(target, [b"one ", b"two"])
>>> target.read_bytes()
b'one two'
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from headway.core.files.regular_file import whole_file

if TYPE_CHECKING:
    from typing_extensions import Buffer


@contextmanager
def durable_file(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a file to write; when the block ends it stands at `path`, durable; when the block raises it is gone.

    Order: write, flush, fsync of the file, rename, fsync of its folder.
    """
    with whole_file(path) as draft, open(draft, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    sync_folder(Path(path).parent)


def write_durably(path: str | Path, parts: Iterable[Buffer]) -> None:
    """Write `parts` on end into `path`, whole and durable."""
    with durable_file(path) as file:
        for part in parts:
            file.write(part)


def sync_folder(path: str | Path) -> None:
    """Make the entries of a folder durable: what was created, renamed or removed in it."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: str | Path) -> None:
    """Create a folder and those above it, durably; one that exists already is fine."""
    path = Path(path)
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    for folder in reversed(missing):
        try:
            os.mkdir(folder)
        except FileExistsError:  # somebody else was first; a file in the way shows at the next step
            continue
        sync_folder(folder.parent)
