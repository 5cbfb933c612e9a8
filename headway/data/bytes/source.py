"""Where examples come from: files in a folder, tar shards, a Parquet column, generated JPEGs, and slow storage.

A source has a length, reads the bytes of example i from any thread, and says
what else is known of it (`meta`: labels). All indexes are built once;
reading opens nothing that it does not close or share safely.

>>> images = SyntheticJpeg(4, width=32, height=24, seed=7)
>>> len(images), images.read(2) == images.read(2), images.read(1) == images.read(2)
(4, True, False)
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import tarfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from pyarrow import parquet

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import parquet_faults
from headway.core.rng import stream

NOTHING: dict[str, Any] = {}

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")
"""Files that a source takes for images, unless told otherwise."""


class Source(Protocol):
    """Random access to the raw examples of a dataset. Write a class of this shape; there is nothing to subclass."""

    def __len__(self) -> int:
        """Return the number of examples."""
        ...

    def read(self, index: int) -> Any:
        """Return example `index`: bytes, or an array. Safe to call from several threads."""
        ...

    def meta(self, index: int) -> Mapping[str, Any]:
        """Return what else is known of it, numbers by name."""
        ...

    def fingerprint(self) -> str:
        """Return what tells the dataset from another."""
        ...


def digest_of(parts: Iterable[object]) -> str:
    """Return a short digest of the texts of `parts`."""
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).hexdigest()


def labels_of(folders: Iterable[str]) -> list[int]:
    """Return a label per folder name: its place among the different ones, sorted."""
    names = list(folders)
    classes = {name: k for k, name in enumerate(sorted(set(names)))}
    return [classes[name] for name in names]


class FolderSource:
    """Files below a folder, sorted by path; the folder that holds a file is its `label` (0, 1, ... by name)."""

    def __init__(self, folder: str | Path, suffixes: Sequence[str] = IMAGE_SUFFIXES) -> None:
        """List the files. Raises `InputError` when there is none."""
        self._root = os.fspath(folder)
        wanted = tuple(sorted(suffix.lower() for suffix in suffixes))
        self._paths = list(_files(self._root, "", wanted)) if os.path.isdir(self._root) else []
        if not self._paths:
            raise InputError(f"{folder} holds no file that ends in {', '.join(wanted)}. Pass another folder.")
        self._labels = labels_of(path.rpartition("/")[0] for path in self._paths)
        self._digest = digest_of(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, index: int) -> bytes:
        """Return the bytes of file `index`."""
        with open(os.path.join(self._root, self._paths[index]), "rb", buffering=0) as file:
            return file.readall()

    def meta(self, index: int) -> Mapping[str, Any]:
        """Return its label."""
        return {"label": self._labels[index]}

    def fingerprint(self) -> str:
        """Return a digest of the paths."""
        return f"folder:{self._digest}"


def _files(root: str, below: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Yield the paths, relative to `root` and in order, of files with one of `suffixes`; links to folders end here."""
    with os.scandir(os.path.join(root, below)) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(root, f"{below}{entry.name}/", suffixes)
        elif entry.name.lower().endswith(suffixes) and entry.is_file():
            yield below + entry.name


TAR_BLOCK = 512
"""Bytes of a tar header; members begin at multiples of it."""

_OCTAL = re.compile(rb"[0-7]+")


class TarSource:
    """Members of tar files (not compressed), read in place through an index of offsets made once."""

    def __init__(self, paths: Iterable[str | Path], suffixes: Sequence[str] = ()) -> None:
        """Read the headers. Raises `FormatError` on what is no plain tar file, `InputError` when nothing is in it."""
        self._paths = [Path(path) for path in paths]
        self._members: list[tuple[int, int, int]] = []
        names = []
        for shard, path in enumerate(self._paths):
            for name, offset, size in tar_members(path):
                if not suffixes or name.lower().endswith(tuple(suffixes)):
                    self._members.append((shard, offset, size))
                    names.append(name)
        if not names:
            raise InputError(f"{[str(path) for path in self._paths]} hold no member to read. Check paths and suffixes.")
        self._digest = digest_of([*names, *(size for _, _, size in self._members)])
        self._open: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._members)

    def read(self, index: int) -> bytes:
        """Return the bytes of member `index`. Raises `FormatError` when the shard has become shorter."""
        shard, offset, size = self._members[index]
        found = os.pread(self._descriptor(shard), size, offset)
        if len(found) != size:
            raise FormatError(f"{self._paths[shard]} ends inside member {index}. Fetch the shard again.")
        return found

    def meta(self, index: int) -> Mapping[str, Any]:
        """Return nothing: a tar file has no labels."""
        return NOTHING

    def fingerprint(self) -> str:
        """Return a digest of names and sizes."""
        return f"tar:{self._digest}"

    def __getstate__(self) -> dict[str, Any]:
        """Leave descriptors behind: another process opens its own."""
        return {**self.__dict__, "_open": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over all but the descriptors."""
        self.__dict__.update(state, _lock=threading.Lock())

    def __del__(self) -> None:
        for descriptor in getattr(self, "_open", {}).values():
            os.close(descriptor)

    def _descriptor(self, shard: int) -> int:
        key = os.getpid(), shard
        with self._lock:
            if key not in self._open:
                self._open[key] = os.open(self._paths[shard], os.O_RDONLY | os.O_CLOEXEC)
            return self._open[key]


def tar_members(path: Path | str, file: IO[bytes] | None = None) -> list[tuple[str, int, int]]:
    """Return (name, offset, bytes) of the files in a tar file, or in an open `file` that `path` names.

    Raises `FormatError` on what is no tar file without compression.
    """
    try:
        if file is None and os.path.getsize(path):
            with open(path, "rb") as shard, mmap.mmap(shard.fileno(), 0, access=mmap.ACCESS_READ) as memory:
                found = _plain_members(memory)
            if found is not None:
                return found
        with tarfile.open(path, "r:", file) as tar:
            return [(member.name, member.offset_data, member.size) for member in tar if member.isreg()]
    except (tarfile.TarError, OSError) as error:
        raise FormatError(f"{path} cannot be read as a tar file without compression: {error}. Unpack it.") from error


def _plain_members(memory: mmap.mmap) -> list[tuple[str, int, int]] | None:
    """Return the members of a tar file that holds files and folders only, None where `tarfile` must decide.

    3 us a member in place of tarfile's 27: ImageNet's 1.28 million open in 4 s.
    """
    found, place, longer = [], 0, ""
    while any(head := memory[place : place + TAR_BLOCK]):
        kind, digits = head[156:157], head[124:136].strip(b" \0")
        if (
            len(head) < TAR_BLOCK
            or head[257:262] != b"ustar"
            or not _OCTAL.fullmatch(digits)
            or kind not in (b"0", b"5", b"x")
        ):
            return None
        offset, size = place + TAR_BLOCK, int(digits, 8)
        place = offset + -(-size // TAR_BLOCK) * TAR_BLOCK
        if place > len(memory):
            return None
        if kind == b"x":
            names = _pax_name(memory[offset : offset + size])
            if names is None:
                return None
            longer = names
            continue
        if kind == b"0":
            folder, name = (
                part.partition(b"\0")[0].decode(errors="surrogateescape") for part in (head[345:500], head[:100])
            )
            ours = f"{folder}/{name}" if folder and head[262:263] == b"\0" else name
            found.append((longer or ours, offset, size))
        longer = ""
    # Without the block of zeros at its end it may have been cut: tarfile knows.
    return found if len(head) == TAR_BLOCK else None


def _pax_name(records: bytes) -> str | None:
    """Return the name in an extended header, "" when there is none; None where the header says more than times."""
    name = ""
    while records:
        length, _, rest = records.partition(b" ")
        if not length.isdigit() or not 0 < int(length) <= len(records):
            return None
        key, _, value = rest[: int(length) - len(length) - 2].partition(b"=")
        if key == b"path":
            name = value.decode(errors="surrogateescape").rstrip("/")
        elif key not in (b"mtime", b"atime", b"ctime"):
            return None
        records = records[int(length) :]
    return name


class ParquetSource:
    """One column of a Parquet file (bytes, text or numbers); other columns may serve as labels.

    A row group is decoded whole: the last `groups` of them are kept, so
    read in the order of the file, or shuffle whole groups.
    """

    def __init__(self, path: str | Path, column: str, labels: Sequence[str] = (), *, groups: int = 4) -> None:
        """Read the footer. Raises `FormatError` on what is no Parquet file, `InputError` on an unknown column."""
        self._path = Path(path)
        with parquet_faults(path, fix="Pass a Parquet file."):
            file = parquet.ParquetFile(self._path)
        with file:
            names = file.schema_arrow.names
            rows = [file.metadata.row_group(k).num_rows for k in range(file.metadata.num_row_groups)]
            self._digest = digest_of([*names, *rows, column])
        missing = [name for name in (column, *labels) if name not in names]
        if missing:
            raise InputError(f"{path} has no column {missing[0]!r}; it has: {', '.join(names)}. Choose one of them.")
        self._first = np.cumsum([0, *rows])
        self._column, self._labels, self._num_kept = column, tuple(labels), groups
        self._kept: OrderedDict[int, dict[str, list[Any]]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._first[-1])

    def read(self, index: int) -> Any:
        """Return the value of row `index`."""
        group, row = self._place(index)
        return self._group(group)[self._column][row]

    def meta(self, index: int) -> Mapping[str, Any]:
        """Return the label columns of row `index`."""
        if not self._labels:
            return NOTHING
        group, row = self._place(index)
        return {name: self._group(group)[name][row] for name in self._labels}

    def fingerprint(self) -> str:
        """Return a digest of columns and row groups."""
        return f"parquet:{self._digest}"

    def __getstate__(self) -> dict[str, Any]:
        """Leave the decoded groups behind."""
        return {**self.__dict__, "_kept": OrderedDict(), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over all but the decoded groups."""
        self.__dict__.update(state, _lock=threading.Lock())

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise InputError(f"row {index} is not in {self._path}: it has {len(self)}. Use 0 to {len(self) - 1}.")
        group = int(np.searchsorted(self._first, index, side="right")) - 1
        return group, index - int(self._first[group])

    def _group(self, group: int) -> dict[str, list[Any]]:
        with self._lock:
            if group in self._kept:
                self._kept.move_to_end(group)
                return self._kept[group]
            with parquet_faults(self._path), parquet.ParquetFile(self._path) as file:
                table = file.read_row_group(group, columns=[self._column, *self._labels])
            self._kept[group] = table.to_pydict()
            while len(self._kept) > self._num_kept:
                self._kept.popitem(last=False)
            return self._kept[group]


class SyntheticJpeg:
    """`n` JPEGs of one size, a function of `seed` alone: smooth colours under fine noise. Label: index modulo 10.

    At 500 x 375 an image has about 90 kB (quality 90), as the photographs of
    common datasets. Encoded on first use and kept. Needs the extra `vision`.
    """

    def __init__(self, n: int, width: int = 500, height: int = 375, seed: int = 0, *, quality: int = 90) -> None:
        """Note the size. Raises `InputError` on sizes below 1."""
        if min(n, width, height) < 1:
            raise InputError(f"n, width, height are {(n, width, height)}; each must be 1 or more.")
        self._n, self._size, self._seed, self._quality = n, (width, height), seed, quality
        self._made: dict[int, bytes] = {}

    def __len__(self) -> int:
        return self._n

    def read(self, index: int) -> bytes:
        """Return the JPEG of image `index`."""
        made = self._made.get(index)
        if made is None:
            self._made[index] = made = jpeg_of(self.pixels(index), self._quality)
        return made

    def pixels(self, index: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the uint8 [height, width, 3] pixels before compression."""
        width, height = self._size
        rng = stream(self._seed, "synthetic jpeg", index)
        y, x = np.mgrid[0:height, 0:width].astype(np.float32)
        # One plane wave per colour: 0.5 to 6 periods along each side, in radians per pixel. The noise is the same in
        # all three.
        waves = rng.uniform(0.5, 6.0, (3, 2)).astype(np.float32) * (2 * np.pi / np.array([height, width], np.float32))
        phase = rng.uniform(0, 2 * np.pi, 3).astype(np.float32)
        smooth = [np.sin(waves[c, 0] * y + waves[c, 1] * x + phase[c]) for c in range(3)]
        noise = rng.normal(0, 10, (height, width, 1)).astype(np.float32)
        return np.clip(128 + 80 * np.stack(smooth, axis=-1) + noise, 0, 255).astype(np.uint8)

    def meta(self, index: int) -> Mapping[str, Any]:
        """Return its label."""
        return {"label": index % 10}

    def fingerprint(self) -> str:
        """Return sizes and seed."""
        return f"synthetic-jpeg:{self._n}x{self._size[0]}x{self._size[1]}:{self._seed}:{self._quality}"


def jpeg_of(pixels: np.ndarray[Any, np.dtype[np.uint8]], quality: int = 90) -> bytes:
    """Return uint8 [height, width, 3] pixels as a JPEG. Raises `InputError` without the extra `vision`."""
    try:
        import simplejpeg
    except ImportError as error:
        raise InputError("JPEGs need the extra `vision`. Install it: pip install 'headway[vision]'.") from error
    encoded: bytes = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=quality)
    return encoded


class Throttled:
    """Another source behind a token bucket: `bytes_per_s` in all, and `latency_s` per read; makes stalls repeatable.

    Readers in several threads share the bucket. A process that gets a copy has a bucket of its own.
    """

    def __init__(
        self,
        source: Source,
        bytes_per_s: float,
        latency_s: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Raise `InputError` on a rate that is not above 0."""
        if not bytes_per_s > 0 or latency_s < 0:
            raise InputError(
                f"bytes_per_s is {bytes_per_s}, latency_s {latency_s}; use a rate above 0, a latency >= 0."
            )
        self._source, self._rate, self._latency = source, bytes_per_s, latency_s
        self._clock, self._sleep = clock, sleep
        self._free = clock()
        """When the bucket has delivered all that was asked of it."""
        self._lock = threading.Lock()
        self.bytes_read = 0

    def __len__(self) -> int:
        return len(self._source)

    def read(self, index: int) -> Any:
        """Return example `index` when a disk of this speed would have."""
        found = self._source.read(index)
        size = found.nbytes if hasattr(found, "nbytes") else len(found)
        with self._lock:
            now = self._clock()
            self._free = max(self._free, now) + size / self._rate
            wait = self._free + self._latency - now
            self.bytes_read += size
        self._sleep(wait)
        return found

    def meta(self, index: int) -> Mapping[str, Any]:
        """Return what the source says of it."""
        return self._source.meta(index)

    def fingerprint(self) -> str:
        """Return the source's."""
        return self._source.fingerprint()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the lock behind."""
        return {**self.__dict__, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start with a full bucket."""
        self.__dict__.update(state, _lock=threading.Lock(), _free=state["_clock"]())
