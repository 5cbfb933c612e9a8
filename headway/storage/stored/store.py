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
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headway.core.errors import InputError
from headway.core.files.private import check_inside
from headway.core.files.regular_file import open_regular
from headway.storage.stored.durable import make_folder, sync_folder, write_durably

if TYPE_CHECKING:
    from typing_extensions import Buffer


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
