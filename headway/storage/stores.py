"""Where bytes lie, in five methods: a folder here, a bucket in `ObjectStore`.

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

A bucket as a store: S3 and what speaks its protocol, Google, Azure, through obstore.

`ObjectStore` is `store.Store` on the objects below a URL. A large object goes
up in parts, several at once, and exists when the last one is there; what
fails on the way is tried again by obstore. Nothing is relied on but S3's own
promises: an object is whole or not there, a put with `If-None-Match` is done
by one writer only, a read after a write sees it. Needs the extra `s3`.

    open_store("s3://bucket/run1")            # credentials, region and endpoint from the environment (AWS_...)
    ObjectStore("s3://bucket/run1", endpoint="http://minio:9000", client_options={"allow_http": True})

obstore's threads do not survive a fork: a process that has used a store must
not be forked for one that uses stores too. Sizes are bytes.

>>> import tempfile
>>> store = ObjectStore(f"file://{tempfile.mkdtemp()}")
>>> store.put("a/b.bin", [b"12", b"34"])
>>> store.put_if_absent("a/b.bin", b"56"), bytes(store.read("a/b.bin", 1, 3)), store.list("a")
(False, b'23', {'a/b.bin': 4})

Which process used an object store first: obstore's threads do not survive a fork.

A process that has used a store and is forked leaves its child a client whose
requests never end. Whoever makes a client asks `claim` first, so that the
child hears of it instead of waiting.

>>> claim([0]) is None
True
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeVar

from headway.core.errors import HeadwayError, InputError
from headway.core.files.private import check_inside
from headway.core.files.safe_files import open_regular, whole_file
from headway.core.units import MIB

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

    def __init__(self, root: str | Path, *, makes_folders: bool = True) -> None:
        """`makes_folders` off: a put where there is no folder is an `InputError`, as in a draft that was given up."""
        self._root, self._makes_folders = Path(root), makes_folders

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
        if self._makes_folders:
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


USER = [0]
"""The process that used obstore first, of those whose memory this is a copy of; 0: none yet."""


def claim(user: list[int] = USER) -> None:
    """Note that this process uses obstore. Raises `InputError` where a fork has broken it."""
    if user[0] not in (0, os.getpid()):
        raise InputError(
            f"process {user[0]} had read from an object store before it forked this one, whose reads would never "
            "end. Pass multiprocessing_context='forkserver' to the loader, use threads, or read nothing before."
        )
    user[0] = os.getpid()


T = TypeVar("T")

PART_BYTES = 8 * MIB
"""What goes up at a time; a larger object goes in parts of this size (S3 wants at least 5 MiB)."""

PARTS_AT_ONCE = 8
"""Parts that are under way together."""

URL = re.compile(r"(s3|s3a|gs|az|azure|abfs|abfss|https?|file):/+(.+)", re.DOTALL)
"""What names a bucket; one slash is left of it where it went through a path."""


def url_of(place: str | Path) -> str | None:
    """Return the URL that a place is, or None where it is a folder.

    >>> url_of(Path("s3://bucket/run1")), url_of("checkpoints/run1")
    ('s3://bucket/run1', None)
    """
    match = URL.fullmatch(str(place))
    if match is None:
        if "://" in str(place):
            raise InputError(f"{place} is no URL of a store that is known. Use s3://, gs://, az:// or a folder.")
        return None
    return f"{match[1]}://{'/' if match[1] == 'file' else ''}{match[2].rstrip('/')}"


def open_store(url: str) -> ObjectStore:
    """Return the store below a URL; the environment says how it is reached."""
    return ObjectStore(url)


def present(store: Store, folder: str, names: Iterable[str]) -> set[str] | None:
    """Return which of the names lie in a folder, None where there is no such folder.

    A look at each here, one request in a bucket.
    """
    if isinstance(store, LocalStore):
        top = store.path(folder)
        return {name for name in names if (top / name).exists()} if top.exists() else None
    there = store.list(folder)
    return {name for name in names if f"{folder}/{name}" in there} if there else None


class ObjectStore:
    """Objects below a URL, by name; see `store.Store` for what the methods promise.

    `InputError` says what a user can mend (no such bucket, no access), `HeadwayError` that the network failed.
    """

    def __init__(self, url: str, **options: Any) -> None:
        """Connect to nothing yet; `options` are those of `obstore.store.from_url`.

        Raises `InputError` without the extra `s3`, for a URL that is none, and in a process forked from one that has
        used a store.
        """
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise InputError("object stores need the extra `s3`. Install it: pip install 'headway[s3]'.") from error
        claim()
        self._url, self._options = url.rstrip("/"), options
        self._obstore = obstore
        self._client: Any = self._tried(self._url, lambda: from_url(self._url, **options))

    @property
    def place(self) -> str:
        """The URL."""
        return self._url

    def under(self, prefix: str) -> ObjectStore:
        """Return the store of what lies under the folder `prefix`."""
        return ObjectStore(f"{self._url}/{prefix}", **self._options)

    def put(self, name: str, parts: Iterable[Buffer]) -> None:
        """See `Store.put`: readers see the object once all of it is there."""
        pieces = _pieces(parts)
        first = next(pieces, b"")
        second = next(pieces, None)
        if second is None:
            self._tried(name, lambda: self._obstore.put(self._client, name, first, use_multipart=False))
            return
        chained = (piece for group in ((first, second), pieces) for piece in group)
        self._tried(
            name,
            lambda: self._obstore.put(
                self._client, name, chained, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
            ),
        )

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """See `Store.put_if_absent`. A put whose answer was lost and that was tried again is known by its bytes."""
        return self._put_if(name, data, "create")

    def put_if_same(self, name: str, data: bytes, tag: str) -> bool:
        """Write `data` in the place of the object that has this `tag`; say whether that one was there still."""
        return self._put_if(name, data, {"e_tag": tag})

    def tag(self, name: str) -> str:
        """Return what changes with the content of an object. Raises `FileNotFoundError`."""
        return str(self._tried(name, lambda: self._obstore.head(self._client, name))["e_tag"])

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Buffer:
        """See `Store.read`: one request, of that range only."""
        get = self._obstore
        if stop is not None and stop <= start:
            return b""
        try:
            if stop is not None:
                found: Buffer = self._tried(name, lambda: get.get_range(self._client, name, start=start, end=stop))
                return found
            options = {"range": {"offset": start}} if start else None
            whole: Buffer = self._tried(name, lambda: get.get(self._client, name, options=options).bytes())
            return whole
        except _PastEndError:
            return b""

    def list(self, prefix: str = "") -> dict[str, int]:
        """See `Store.list`."""
        return {entry["path"]: int(entry["size"]) for entry in self._entries(prefix)}

    def folders(self) -> tuple[str, ...]:
        """Return the names of the folders at the top, sorted."""
        found = self._tried(self._url, lambda: self._obstore.list_with_delimiter(self._client))
        return tuple(sorted(str(name).rstrip("/") for name in found["common_prefixes"]))

    def changed_unix_s(self, prefix: str) -> float | None:
        """Return when the newest object under a folder was written; None where there is none."""
        return max((entry["last_modified"].timestamp() for entry in self._entries(prefix)), default=None)

    def remove(self, prefix: str) -> None:
        """See `Store.remove`. Not one act: remove first what others go by."""
        names = [*self.list(prefix)]
        with suppress(FileNotFoundError):  # somebody else was first
            if names:
                self._tried(prefix, lambda: self._obstore.delete(self._client, names))
        with suppress(FileNotFoundError):
            if prefix:
                # Of a `file://` root a prefix may be a folder, which can be asked for but not deleted.
                self._tried(prefix, lambda: self._obstore.head(self._client, prefix))
                self._tried(prefix, lambda: self._obstore.delete(self._client, prefix))

    def _entries(self, prefix: str) -> tuple[Any, ...]:
        """Return what is known of the objects under a folder, sorted by name."""
        listed = self._tried(
            self._url,
            lambda: [entry for page in self._obstore.list(self._client, prefix or None) for entry in page],
        )
        return tuple(sorted(listed, key=lambda entry: str(entry["path"])))

    def _put_if(self, name: str, data: bytes, mode: Any) -> bool:
        """Write an object on a condition; say whether it is there now as asked."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            self._tried(name, lambda: self._obstore.put(self._client, name, data, mode=mode, use_multipart=False))
        except (AlreadyExistsError, PreconditionError):
            return bytes(self.read(name)) == data
        return True

    def _tried(self, name: str, request: Callable[[], T]) -> T:
        """Return what a request gives; what obstore raises becomes our error that names the object."""
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        try:
            return request()
        except (AlreadyExistsError, PreconditionError):
            raise
        except (BaseError, OSError, ValueError) as error:
            place = name if name.startswith(self._url) else f"{self._url}/{name}"
            raise _told(place, error) from error


class _PastEndError(HeadwayError):
    """A range begins behind the end of its object."""


def _told(place: str, error: Exception) -> Exception:
    """Return our error for one of obstore."""
    text = str(error)
    if "NoSuchBucket" in text:
        return InputError(f"{place}: there is no such bucket. Create it, or check the URL, region and endpoint.")
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{place} is not there")
    if "InvalidRange" in text or "416 " in text:
        return _PastEndError(f"{place} ends before the range that was asked for. Ask for less.")
    denied = ("AccessDenied", "403 Forbidden", "401 Unauth", "InvalidAccessKeyId", "SignatureDoesNotMatch")
    if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError") or any(w in text for w in denied):
        return InputError(f"access to {place} is denied. Pass credentials that may list, read and write it.")
    first = text.partition("\n")[0]
    return HeadwayError(f"{place} cannot be reached: {first}. Check the network and the endpoint, then try again.")


def _pieces(parts: Iterable[Buffer]) -> Iterator[bytes]:
    """Yield the same bytes in pieces of `PART_BYTES`, the last one shorter."""
    open_piece = bytearray()
    for part in parts:
        view = memoryview(part).cast("B")
        while len(view):
            room = PART_BYTES - len(open_piece)
            open_piece += view[:room]
            view = view[room:]
            if len(open_piece) == PART_BYTES:
                yield bytes(open_piece)
                open_piece.clear()
    if open_piece:
        yield bytes(open_piece)
