"""Where bytes lie, in five methods: a folder here, a bucket in `objects.py`.

Everything that reads a checkpoint (verify, show, diff, restore) reads it
through a `Store` rooted at the checkpoint; everything that lists or removes
checkpoints, through one rooted above them. Writing a checkpoint to a folder
goes through `draft.py`, because a folder has renames; a bucket has none, so
there every file is one `put` under `step-<n>.<attempt>/`, and the commit is
`put_if_absent` of `step-<n>/commit.json`, whose record names the attempt: of
two writers one wins, and what is listed is whole.

Names are paths relative to the store's root, with `/`. Sizes are bytes.

>>> import tempfile
>>> store = LocalStore(tempfile.mkdtemp())
>>> store.put("a/b.bin", [b"12", b"34"])
>>> store.put_if_absent("a/b.bin", b"56"), bytes(store.read("a/b.bin", 1, 3)), store.list("a")
(False, b'23', {'a/b.bin': 4})

Files that are whole, or not there, even after the power went.

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

import errno
import mmap
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from headway.core.errors import InputError
from headway.core.files.private import check_inside
from headway.core.files.regular_file import open_regular, whole_file

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


class Store(Protocol):
    """Bytes under names. All five are whole or not at all; a missing name is `FileNotFoundError`."""

    @property
    def place(self) -> str:
        """Where the store is, as a person names it."""
        ...

    def put(self, name: str, parts: Iterable[Buffer]) -> None:
        """Write `parts` on end under `name`, durably, in the place of what was there."""
        ...

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write `data` under `name`, durably, unless the name is taken; say whether it was written."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Buffer:
        """Return the bytes `[start, stop)` of a name, fewer where it ends before; all of it by default."""
        ...

    def list(self, prefix: str = "") -> dict[str, int]:
        """Return name -> size of all that lies under the folder `prefix`, sorted by name."""
        ...

    def remove(self, prefix: str) -> None:
        """Remove a name, and all that lies under it as a folder; nothing there is fine."""
        ...


class LocalStore:
    """A folder as a store. Reads are views of the page cache: nothing is copied."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)

    @property
    def place(self) -> str:
        """The folder."""
        return str(self._root)

    def path(self, name: str) -> Path:
        """Return the path of a name.

        Raises `InputError` for one that would lead out of the store.
        """
        if name.startswith("/") or ".." in name.split("/"):
            raise InputError(f"{name!r} leads out of {self._root}. Use names inside of it.")
        return self._root / name

    def put(self, name: str, parts: Iterable[Buffer]) -> None:
        """See `Store.put`; raises `InputError` where a link leads out of the store."""
        check_inside(self._root, self.path(name))
        make_folder(self.path(name).parent)
        write_durably(self.path(name), parts)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """See `Store.put_if_absent`: a hard link fails where the name is taken."""
        target = self.path(name)
        check_inside(self._root, target)
        make_folder(target.parent)
        draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}.draft")
        write_durably(draft, [data])
        try:
            os.link(draft, target)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
            sync_folder(target.parent)
        return True

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Buffer:
        """See `Store.read`; the answer stays valid while it is held, whatever happens to the name."""
        try:
            with open_regular(self.path(name)) as file:
                size = os.fstat(file.fileno()).st_size
                end = size if stop is None else min(stop, size)
                first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
                if not 0 <= start < end:
                    return b""
                mapped = mmap.mmap(file.fileno(), end - first, access=mmap.ACCESS_READ, offset=first)
                return memoryview(mapped)[start - first :]
        except (IsADirectoryError, NotADirectoryError):  # a folder lies there, or a file where its folder was
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path(name))) from None

    def list(self, prefix: str = "") -> dict[str, int]:
        """See `Store.list`."""
        top = self.path(prefix)
        found = {}
        for folder, _, names in os.walk(top):
            for name in names:
                place = os.path.join(folder, name)
                with suppress(OSError):  # a draft that was renamed meanwhile, or a link that leads nowhere
                    found[os.path.relpath(place, self._root)] = os.stat(place).st_size
        return dict(sorted(found.items()))

    def remove(self, prefix: str) -> None:
        """See `Store.remove`."""
        target = self.path(prefix)
        check_inside(self._root, target)
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
