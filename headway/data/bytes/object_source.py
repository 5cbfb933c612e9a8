"""Examples in an object store (S3 and what speaks its protocol, Google, Azure, a folder), through obstore.

`ObjectSource` reads an object per example, `ObjectTarSource` members of tar
shards by ranges. Objects are listed once, when the source is made; obstore
retries what fails on the way. Needs the extra `s3`.

    ObjectSource("s3://bucket/train", region="eu-central-1")
    ObjectTarSource("s3://bucket/shards", suffixes=(".jpg",), endpoint="http://minio:9000")

Further arguments are those of `obstore.store.from_url`: credentials, region,
endpoint, retry_config, client_options; without them the environment decides.

Its network threads do not survive a fork. So the listing runs in a child, and
loader workers may be forked as long as the training process itself has read
nothing; after that they must be started by "forkserver", or be threads.

>>> import pathlib, tempfile
>>> folder = pathlib.Path(tempfile.mkdtemp())
>>> for name in ("cat", "dog"):
...     (folder / name).mkdir()
...     _ = (folder / name / "1.jpg").write_bytes(name.encode())
>>> images = ObjectSource(f"file://{folder}")
>>> [(images.read(k), images.meta(k)["label"]) for k in range(len(images))]
[(b'cat', 0), (b'dog', 1)]
"""

from __future__ import annotations

import io
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from headway.core.errors import FormatError, HeadwayError, InputError
from headway.core.machine.child import said
from headway.data.bytes.source import IMAGE_SUFFIXES, NOTHING, digest_of, labels_of, tar_members
from headway.storage.stores import USER, claim

T = TypeVar("T")

HEADER_BUFFER_BYTES = 1 << 16
"""Read at once while the headers of a tar shard are listed."""

DENIED = ("PermissionDeniedError", "UnauthenticatedError")
"""Errors of obstore that a credential would mend."""


class Listed(msgspec.Struct, array_like=True):
    """An object as it was listed."""

    key: str
    size: int
    tag: str
    """Changes with the content."""


class Member(msgspec.Struct, array_like=True):
    """A file inside a tar shard."""

    shard: int
    name: str
    offset: int
    size: int


class ObjectSource:
    """Objects below a URL, sorted by key; the folder that an object lies in is its `label` (0, 1, ... by name)."""

    def __init__(self, url: str, suffixes: Sequence[str] = IMAGE_SUFFIXES, **options: Any) -> None:
        """List the objects. Raises `InputError` when there is none, the bucket is missing or access is denied."""
        self._bucket = Bucket(url, options)
        listed = apart(lambda: self._bucket.listed(suffixes), list[Listed])
        self._keys = [entry.key for entry in listed]
        self._sizes = [entry.size for entry in listed]
        self._labels = labels_of(key.rpartition("/")[0] for key in self._keys)
        self._digest = digest_of(f"{entry.key}:{entry.size}:{entry.tag}" for entry in listed)

    def __len__(self) -> int:
        return len(self._keys)

    def read(self, index: int) -> bytes:
        """Return the bytes of object `index`. Raises `FormatError` when it is gone or was changed, `InputError`."""
        return self._bucket.get(self._keys[index], self._sizes[index])

    def meta(self, index: int) -> Mapping[str, Any]:
        """Return its label."""
        return {"label": self._labels[index]}

    def fingerprint(self) -> str:
        """Return a digest of keys, sizes and entity tags."""
        return f"objects:{self._digest}"


class ObjectTarSource:
    """Members of the tar shards (not compressed) below a URL, each read by one range request."""

    def __init__(self, url: str, suffixes: Sequence[str] = (), **options: Any) -> None:
        """List the shards (`*.tar`) and read their headers.

        Raises `InputError` as `ObjectSource` does, `FormatError` on what is no plain tar file.
        """
        self._bucket = Bucket(url, options)
        shards, self._members = apart(lambda: self._listed(suffixes), tuple[list[Listed], list[Member]])
        if not self._members:
            raise InputError(f"the shards below {url} hold no member to read. Check URL and suffixes.")
        self._keys = [shard.key for shard in shards]
        self._digest = digest_of([*(f"{m.name}:{m.size}" for m in self._members), *(shard.tag for shard in shards)])

    def __len__(self) -> int:
        return len(self._members)

    def read(self, index: int) -> bytes:
        """Return the bytes of member `index`. Raises `FormatError` when its shard is gone or shorter, `InputError`."""
        member = self._members[index]
        return self._bucket.get(self._keys[member.shard], member.size, start=member.offset)

    def meta(self, index: int) -> Mapping[str, Any]:
        """Return nothing: a tar file has no labels."""
        return NOTHING

    def fingerprint(self) -> str:
        """Return a digest of the members' names and sizes, and the shards' entity tags."""
        return f"object-tar:{self._digest}"

    def _listed(self, suffixes: Sequence[str]) -> tuple[list[Listed], list[Member]]:
        shards = self._bucket.listed((".tar",))
        return shards, [
            Member(number, name, offset, size)
            for number, shard in enumerate(shards)
            for name, offset, size in self._bucket.tar_members(shard)
            if not suffixes or name.lower().endswith(tuple(suffixes))
        ]


class Bucket:
    """What lies below a URL. Each process has a client of its own, made when it is first needed."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        """Connect to nothing yet. Raises `InputError` without the extra `s3`."""
        try:
            import obstore  # noqa: F401 - only whether it is there
        except ImportError as error:
            raise InputError("object stores need the extra `s3`. Install it: pip install 'headway[s3]'.") from error
        self.url = url.rstrip("/")
        self._options = dict(options)
        self._client: Any = None

    def listed(self, suffixes: Sequence[str]) -> list[Listed]:
        """Return the objects that end in one of `suffixes`, sorted by key. Raises `InputError` when there is none."""
        import obstore

        wanted = tuple(suffix.lower() for suffix in suffixes)
        store = self._store()
        found = self._tried(self.url, lambda: [entry for page in obstore.list(store) for entry in page])
        kept = [
            Listed(entry["path"], entry["size"], entry["e_tag"] or str(entry["last_modified"]))
            for entry in found
            if entry["path"].lower().endswith(wanted)
        ]
        if not kept:
            raise InputError(f"{self.url} holds no object that ends in {', '.join(wanted)}. Pass another URL.")
        return sorted(kept, key=lambda entry: entry.key)

    def get(self, key: str, size: int, *, start: int | None = None) -> bytes:
        """Return the `size` bytes of an object, or those from `start` on. Raises `FormatError`, `InputError`."""
        import obstore

        store, what = self._store(), f"{self.url}/{key}"
        payload: Any = b""
        if start is not None and size:
            payload = self._tried(what, lambda: obstore.get_range(store, key, start=start, length=size))
        elif start is None:
            answer = self._tried(what, lambda: obstore.get(store, key))
            if answer.meta["size"] != size:
                raise FormatError(
                    f"{what} had {size} bytes when it was listed, and has {answer.meta['size']} now. "
                    "Make the source again."
                )
            payload = self._tried(what, answer.bytes)
        if len(payload) != size:
            raise FormatError(f"{what} ends {size - len(payload)} bytes early. Make the source again.")
        return bytes(payload)

    def tar_members(self, shard: Listed) -> list[tuple[str, int, int]]:
        """Return (name, offset, bytes) of the files in a tar shard. Raises `FormatError`, `InputError`."""
        with io.BufferedReader(_Ranges(self, shard), HEADER_BUFFER_BYTES) as file:
            return tar_members(f"{self.url}/{shard.key}", file)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the client behind."""
        return {**self.__dict__, "_client": None}

    def _store(self) -> Any:
        """Return this process's client. Raises `InputError` where a fork has broken obstore."""
        from obstore.store import from_url

        claim(_user)
        if self._client is None:
            self._client = self._tried(self.url, lambda: from_url(self.url, **self._options))
        return self._client

    def _tried(self, what: str, request: Callable[[], T]) -> T:
        """Return what a request gives; what obstore raises becomes one error that names the object."""
        from obstore.exceptions import BaseError

        try:
            return request()
        except (BaseError, OSError, ValueError) as error:
            raise _told(what, error) from error


class _Ranges(io.RawIOBase):
    """An object as a file that can be sought in."""

    def __init__(self, bucket: Bucket, listed: Listed) -> None:
        self._bucket, self._listed, self._place = bucket, listed, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._listed.size}[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        size = max(min(len(buffer), self._listed.size - self._place), 0)
        buffer[:size] = self._bucket.get(self._listed.key, size, start=self._place)
        self._place += size
        return size


_user = USER
"""See `claim`."""


def apart(work: Callable[[], T], kind: Any) -> T:
    """Return what `work` gives (of type `kind`) in a forked child, so that this process can still be forked itself.

    Where this process uses obstore already, it does the work. Raises what the work raised.
    """
    if _user[0]:
        return work()
    answer, _ = said(lambda: msgspec.msgpack.encode(_outcome(work)))
    if not answer:
        raise HeadwayError("the process that lists objects died. Look for what killed it: its memory, perhaps.")
    failure, found = msgspec.msgpack.decode(answer, type=tuple[tuple[str, str] | None, msgspec.Raw])
    if failure is not None:
        raise {"FormatError": FormatError, "InputError": InputError}.get(failure[0], HeadwayError)(failure[1])
    result: T = msgspec.msgpack.decode(found, type=kind)
    return result


def _outcome(work: Callable[[], Any]) -> tuple[tuple[str, str] | None, Any]:
    try:
        return None, work()
    except (FormatError, InputError) as error:
        return (type(error).__name__, str(error)), None
    except Exception:
        return ("", f"listing objects failed:\n{traceback.format_exc()}"), None


def _told(what: str, error: Exception) -> InputError:
    """Return the one error that says what is wrong with `what`, for an error of obstore."""
    text = str(error)
    if "NoSuchBucket" in text:
        return InputError(f"{what}: there is no such bucket. Check the URL, region and endpoint.")
    if isinstance(error, FileNotFoundError):
        return FormatError(f"{what} is gone. Upload it again, or make the source again.")
    if type(error).__name__ in DENIED or any(word in text for word in ("AccessDenied", "403 Forbidden", "401 Unauth")):
        return InputError(f"access to {what} is denied. Pass credentials that may list and read it.")
    if "InvalidRange" in text or "416 " in text:
        return FormatError(f"{what} is shorter than it was. Upload it again, or make the source again.")
    first = text.partition("\n")[0]
    return InputError(f"{what} cannot be read: {first}. Check the URL, the options and the network.")
