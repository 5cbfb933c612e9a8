"""A checkpoint as a reader sees it: which tensors and objects, in which pieces, where their bytes begin.

Opens a checkpoint of ours through its commit record and manifests, which say
where every piece's elements lie, and any other DCP checkpoint through its
`.metadata` and the records themselves. Elements that do not lie in a file as
a row-major run (compressed, transposed, encrypted by an extension) are
unpacked on first use, by whoever opened it. No torch. Offsets are bytes.

>>> import tempfile
>>> from headway.storage.commit import commit
>>> from headway.storage.draft import finish_rank, open_draft
>>> draft = open_draft(tempfile.mkdtemp(), 7, "a", rank=0)
>>> finish_rank(draft, RankManifest(7, "a", 0, 1, None), None)
>>> _ = commit(draft, world_size=1)
>>> stored = open_stored(draft.target)
>>> stored.step, stored.ours, stored.world_size, list(stored.tensors)
(7, True, 1, [])

The files of a checkpoint in a bucket: a reader that goes on where it stopped is read ahead for.

A request to a bucket takes tens of milliseconds whatever its size, so small
windows of a long tensor, one request each, would be slow. Where a thread goes
on right behind what it read last, twice as much is asked for each time, up to
`AHEAD_BYTES`; a read elsewhere gets just what it wants. So at most as much is
read in vain as was wanted. Offsets are bytes.

>>> from headway.storage.stores import LocalStore
>>> import tempfile
>>> store = LocalStore(tempfile.mkdtemp())
>>> store.put("a", [bytes(range(100))])
>>> files = BucketFiles(store)
>>> [bytes(files.span("a", start, start + 2, bytearray)) for start in (0, 2, 4, 50)]
[b'\\x00\\x01', b'\\x02\\x03', b'\\x04\\x05', b'23']

Damaged blocks rebuilt from parity while a checkpoint is being read; the files stay as they are.

The first damaged block makes the whole checkpoint be verified, once: which
members of its stripe are good has to be known. After that a block costs the
reading of as many others as its stripe has data members. For putting files
right for good there is `headway ckpt repair`.

>>> import tempfile
>>> ParityRepair(tempfile.mkdtemp())("rank-0/__0_0.distcp", 0, 4096) is None
True
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.checkpoint.layout.fetch import Files, LocalFiles, Room, Source, too_short
from headway.core.errors import DamageError, FormatError, HeadwayError
from headway.core.files.safe_files import RoomError
from headway.core.units import MIB
from headway.storage.checks.repair import rebuilt
from headway.storage.checks.verification import verify
from headway.storage.commit import commit_record, matches, rebuild
from headway.storage.digests import Digested, crc32_combine, unpack_digests
from headway.storage.formats.dcp import Chunk, StoredTensor, read_metadata
from headway.storage.formats.records import read_saved
from headway.storage.formats.values import ITEM_BYTES
from headway.storage.formats.zip_files import entries
from headway.storage.manifest import (
    COMMIT,
    DIGESTS_FILE,
    MANIFEST,
    METADATA,
    TWIN,
    CommitRecord,
    FileEntry,
    Piece,
    RankManifest,
    StoredObject,
    decode,
    merged_objects,
    rank_folder,
)
from headway.storage.redundancy.parity import best
from headway.storage.redundancy.parity_files import Images, Losses
from headway.storage.stores import LocalStore, Store

if TYPE_CHECKING:
    from typing_extensions import Buffer


UNPACKED = "unpacked:"
"""Begins the name of a file that exists in memory only: the elements of one record, row by row."""

Unpack = Callable[["Buffer", StoredTensor, Chunk], "Buffer"]
"""Turn a record's bytes into its box's elements, row by row: bytes, tensor, box."""

STEP = re.compile(r"step-(\d+)")


class StoredCheckpoint:
    """An opened checkpoint; also its `Files`, so that what had to be unpacked is read like any other. Close it."""

    def __init__(self, files: Files, place: str, *, unpack: Unpack | None = None) -> None:
        self.place = place
        """Where it is, as a person names it."""
        self.step: int | None = None
        """Its step; None where neither a record nor the folder's name says."""
        self.world_size: int | None = None
        """How many ranks wrote it; None where nothing says."""
        self.record: CommitRecord | None = None
        """The commit record; None for a checkpoint that is not ours, or whose own files are not to be trusted."""
        self.tensors: dict[str, tuple[tuple[int, ...], str]] = {}
        """Name -> shape and element type."""
        self.objects: dict[str, dict[int | None, StoredObject]] = {}
        """Name -> whose (None: everybody's) -> where."""
        self.paths: dict[str, tuple[str | int, ...]] = {}
        """Name -> keys in the nested state dict, where the writer noted them."""
        self._files, self._unpack = files, unpack
        self._unpacked: dict[str, Buffer] = {}
        self._pieces: dict[str, list[Piece]] = {}
        self._chunked: dict[str, StoredTensor] = {}
        self._digests: dict[str, Digested | None] = {}
        self._entries: dict[str, FileEntry] = {}
        self._lock = threading.Lock()

    @property
    def ours(self) -> bool:
        """Whether it has a commit record of ours, and so digests."""
        return self.record is not None

    @property
    def source(self) -> Source:
        """What kind of place it is in."""
        return self._files.source

    @property
    def store(self) -> Store | None:
        """The store that is rooted at it; None where its files are only at hand."""
        return getattr(self._files, "store", None)

    @property
    def held(self) -> MutableMapping[str, Buffer]:
        """The files that are read from memory; who takes one out has it read from where the others are."""
        return getattr(self._files, "held", {})

    @property
    def folder(self) -> Path | None:
        """The folder it lies in; None where that is no folder of this host."""
        return getattr(self._files, "folder", None)

    def pieces(self, fqn: str) -> list[Piece]:
        """Return the pieces of a tensor; the records of a checkpoint that is not ours are looked into here, once."""
        if fqn not in self._pieces and fqn in self._chunked:
            tensor = self._chunked[fqn]
            self._pieces[fqn] = [self._located(fqn, tensor, chunk) for chunk in tensor.chunks]
        return self._pieces.get(fqn, [])

    def is_alike(self, first: str, second: str) -> bool | None:
        """Tell by checksums whether two tensors have the same elements; None where only reading them can tell.

        CRC-32 takes one in 2**32 pairs of unlike tensors for alike.
        """
        if self.tensors[first] != self.tensors[second]:
            return False
        one, other = ({(piece.offsets, piece.lengths): piece for piece in self.pieces(fqn)} for fqn in (first, second))
        if one.keys() == other.keys():
            pairs = [(piece, other[box]) for box, piece in one.items()]
            if all((a.file, a.payload_offset) == (b.file, b.payload_offset) for a, b in pairs):
                return True
            if all(a.crc32 and b.crc32 for a, b in pairs):
                return all(a.crc32 == b.crc32 for a, b in pairs)
        sums = [_checksum(list(pieces.values())) for pieces in (one, other)]
        return None if None in sums else sums[0] == sums[1]

    def digests(self, file: str) -> Digested | None:
        """Return the digests of an image's blocks; None for a file that has none.

        Raises `DamageError` when they are missing, damaged, or not those that were committed.
        """
        with self._lock:
            if file not in self._digests:
                self._digests[file] = self._digests_of(file) if file in self._entries else None
            return self._digests[file]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Buffer:
        """Return bytes of a file."""
        return self._files.read(name, start, stop)

    def span(self, name: str, start: int, stop: int, room: Room) -> memoryview:
        """Return bytes of a file, or of what was unpacked."""
        if name in self._unpacked:
            return memoryview(self._unpacked[name]).cast("B")[start:stop]
        return self._files.span(name, start, stop, room)

    def close(self) -> None:
        """Close its files, and give back what was unpacked."""
        self._unpacked.clear()
        close = getattr(self._files, "close", None)
        if close is not None:
            close()

    def open_ours(self, record: CommitRecord) -> None:
        """Take everything from our own files, or their copies. Raises `DamageError` where none is whole."""
        self.record = record
        self._entries = {entry.name: entry for entry in record.files}
        manifests = [self._manifest(rank) for rank in range(record.world_size)]
        for manifest in manifests:
            self.paths |= manifest.paths
            for piece in manifest.pieces:
                self._pieces.setdefault(piece.fqn, []).append(piece)
        self.tensors = {fqn: (pieces[0].shape, pieces[0].dtype) for fqn, pieces in self._pieces.items()}
        self.objects = merged_objects(manifests)
        self.step, self.world_size = record.step, record.world_size

    def open_dcp(self, data: bytes) -> None:
        """Take everything from the bytes of a `.metadata`; how much memory that may take, the whole checkpoint says."""
        name = f"{self.place}/{METADATA}"
        try:
            metadata = read_metadata(data, name)
        except RoomError:  # more tensors than the metadata alone has room for
            if (store := self.store) is None:
                raise
            metadata = read_metadata(data, name, num_bytes=sum(store.list().values()))
        self._chunked, self.paths = metadata.tensors, metadata.paths
        self.tensors = {fqn: (tensor.shape, tensor.dtype) for fqn, tensor in metadata.tensors.items()}
        self.objects = {
            fqn: {None: StoredObject(fqn, None, at.file, at.record_offset, at.record_bytes, 0)}
            for fqn, at in metadata.objects.items()
        }
        match = STEP.fullmatch(self.place.rstrip("/").rpartition("/")[2])
        self.step = int(match[1]) if match else None

    def _manifest(self, rank: int) -> RankManifest:
        name = f"{rank_folder(rank)}/{MANIFEST}"
        data = self._whole(name)
        return decode(data, RankManifest, f"{self.place}/{name}")

    def _digests_of(self, image: str) -> Digested:
        name = f"{image.rpartition('/')[0]}/{DIGESTS_FILE}"
        found = unpack_digests(self._whole(name), f"{self.place}/{name}")
        if found.root != self._entries[image].root:
            raise DamageError(f"{self.place}/{name} is not of {image}. Run: headway ckpt repair")
        return found

    def _whole(self, name: str) -> bytes:
        """Return a small file as it was committed: itself, else a copy of it, else what the rest implies."""
        assert self.record is not None, "only a checkpoint with a record has such files"
        entry = self._entries.get(name)
        data = _read(self._files, name)
        if data is not None and entry is not None and matches(data, entry, self.record.digest):
            return data
        rebuilt = rebuild(self.store, self.record, name) if self.store is not None else None
        if rebuilt is None:
            raise DamageError(
                f"{self.place}/{name} is {'missing' if data is None else 'damaged'}, and no copy of it is whole. "
                "Run: headway ckpt repair, or restore an older step."
            )
        return rebuilt

    def _located(self, fqn: str, tensor: StoredTensor, chunk: Chunk) -> Piece:
        """Return the piece of a box, after a look into its record."""
        start, stop = chunk.record_offset, chunk.record_offset + chunk.record_bytes
        num_bytes = math.prod(chunk.lengths) * ITEM_BYTES.get(tensor.dtype, 0)
        common = (fqn, tensor.dtype, tensor.shape, chunk.offsets, chunk.lengths)
        found = None if chunk.transforms else self._place_in(chunk, num_bytes)
        if found is not None:
            place, crc = found
            return Piece(*common, chunk.file, start, chunk.record_bytes, start + place, num_bytes, crc)
        if self._unpack is None:
            raise FormatError(
                f"{self.place}/{chunk.file} holds {fqn!r} in another form than row by row. Read it where torch is."
            )
        name = f"{UNPACKED}{chunk.file}@{start}"
        self._unpacked[name] = self._unpack(self._files.read(chunk.file, start, stop), tensor, chunk)
        return Piece(*common, name, 0, num_bytes, 0, num_bytes, 0)

    def _place_in(self, chunk: Chunk, num_bytes: int) -> tuple[int, int] | None:
        """Return where in its record a box's elements begin, and their CRC-32 (0: unknown); None if not row by row."""
        start, stop, name = chunk.record_offset, chunk.record_offset + chunk.record_bytes, f"{self.place}/{chunk.file}"
        try:
            record = self._files.read(chunk.file, start, stop)
        except FileNotFoundError:
            raise DamageError(f"{name} is missing. Copy the whole checkpoint.") from None
        if memoryview(record).nbytes < chunk.record_bytes:
            raise too_short(name, start + memoryview(record).nbytes, stop)
        try:
            listed = entries(memoryview(record).cast("B"), name)
            saved = read_saved(record, name, listed)
            place, size = saved.place_of(saved.tensors[0])
        except (FormatError, IndexError):
            return None
        crcs = {(entry.payload_offset, entry.num_bytes): entry.crc32 for entry in listed}
        return (place, crcs.get((place, size), 0)) if size == num_bytes else None


def _checksum(pieces: Sequence[Piece]) -> int | None:
    """Return the CRC-32 of a tensor's elements, row by row; None where its pieces do not tell."""
    total = 0
    for piece in sorted(pieces, key=lambda piece: piece.offsets):
        if piece.lengths[1:] != piece.shape[1:] or not piece.crc32:
            return None
        total = crc32_combine(total, piece.crc32, piece.payload_bytes)
    is_whole = sum(math.prod(piece.lengths) for piece in pieces) == math.prod(pieces[0].shape)
    return total if is_whole else None


def open_stored(
    place: str | Path | Store | Files, *, unpack: Unpack | None = None, trust: bool = True
) -> StoredCheckpoint:
    """Open the checkpoint in a folder, or under a store or files that are rooted at it.

    With `trust` off, our own record and manifests are passed over, and only `.metadata` is used (to read what is left
    of a damaged checkpoint). Raises `FormatError` for what is no checkpoint, `DamageError` for a damaged one.
    """
    files, name = _files_of(place)
    stored = StoredCheckpoint(files, name, unpack=unpack)
    data = (_read(files, COMMIT) or _read(files, COMMIT + TWIN)) if trust else None
    if data is not None:
        stored.open_ours(_record(files, data, f"{name}/{COMMIT}"))
        return stored
    record = _copied_record(files) if trust else None
    if record is not None:
        stored.open_ours(record)
        return stored
    data = _read(files, METADATA)
    if data is None:
        raise _no_checkpoint(place, name)
    stored.open_dcp(data)
    return stored


def _record(files: Files, data: bytes, name: str) -> CommitRecord:
    """Return the commit record, from a copy where its own file is damaged."""
    try:
        return decode(data, CommitRecord, name)
    except DamageError:
        record = _copied_record(files)
        if record is None:
            raise
        return record


def _copied_record(files: Files) -> CommitRecord | None:
    """Return the commit record as other ranks keep it, None where none does."""
    store = getattr(files, "store", None)
    return commit_record(store) if store is not None else None


def _no_checkpoint(place: str | Path | Store | Files, name: str) -> FormatError:
    if isinstance(place, str | Path) and Path(place).is_file():
        return FormatError(
            f"{name} is a file, and a checkpoint is a folder. What torch.save or safetensors wrote becomes one by: "
            "headway ckpt import"
        )
    return FormatError(f"{name} is no checkpoint: it holds neither {COMMIT} nor {METADATA}. Name a step's folder.")


def _files_of(place: str | Path | Store | Files) -> tuple[Files, str]:
    """Return the files at a place, and its name."""
    if isinstance(place, str | Path):
        return LocalFiles(place), str(place)
    if isinstance(place, Files):
        name = getattr(place, "folder", None) or getattr(getattr(place, "store", None), "place", place.source)
        return place, str(name)
    return BucketFiles(place), place.place


def _read(files: Files, name: str) -> bytes | None:
    try:
        return bytes(files.read(name))
    except (FileNotFoundError, NotADirectoryError):
        return None


AHEAD_BYTES = 16 * MIB
"""Most that is asked for at a time for a reader that goes on."""


@dataclass(slots=True)
class _Last:
    """What a thread was given last, and what of the file it has beyond that."""

    name: str
    start: int
    data: memoryview
    stop: int  # where the reader is
    asked_bytes: int


class BucketFiles:
    """Files under a store whose requests are slow. Safe for several threads."""

    source: Source = "remote"

    def __init__(self, store: Store) -> None:
        """`store` is rooted at the checkpoint."""
        self.store = store
        """Where they are."""
        self._sizes: dict[str, int] | None = None
        self._local = threading.local()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Buffer:
        """Return bytes of a file, as the store gives them."""
        return self.store.read(name, start, stop)

    def span(self, name: str, start: int, stop: int, room: Room) -> memoryview:
        """Return bytes of a file: `Files.span`."""
        last: _Last | None = getattr(self._local, "last", None)
        if last is not None and last.name == name and last.start <= start and stop <= last.start + len(last.data):
            last.stop = stop
            return last.data[start - last.start : stop - last.start]
        goes_on = last is not None and last.name == name and last.stop == start
        asked = max(stop - start, min(2 * last.asked_bytes, AHEAD_BYTES)) if last and goes_on else stop - start
        url = f"{self.store.place}/{name}"
        try:
            data = memoryview(self.store.read(name, start, min(start + asked, max(self._size(name), stop)))).cast("B")
        except FileNotFoundError as cause:
            raise DamageError(f"{url} is missing. Run: headway ckpt repair") from cause
        if len(data) < stop - start:
            raise too_short(url, start + len(data), stop)
        self._local.last = _Last(name, start, data, stop, asked)
        return data[: stop - start]

    def _size(self, name: str) -> int:
        """Return how long a file is, 0 if there is none; all are listed once."""
        if self._sizes is None:
            self._sizes = self.store.list()
        return self._sizes.get(name, 0)


# Damaged blocks rebuilt from parity while a checkpoint is being read; the files stay as they are.


class ParityRepair:
    """Rebuilds blocks of one checkpoint in a folder: see `fetch.Mend`."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._lock = threading.Lock()
        self._known: Losses | None = None
        self._looked = False

    def __call__(self, file: str, start: int, stop: int) -> bytes | None:
        """Return bytes `start` to `stop` of a file, at most a block of it, or None where parity does not give them."""
        with self._lock:
            if not self._looked:
                self._known, self._looked = self._losses(), True
        losses = self._known
        ranks = [rank for rank, entry in losses.images.entries.items() if entry.name == file] if losses else []
        return rebuilt(losses, ranks[0], start, stop) if losses and ranks else None

    def _losses(self) -> Losses | None:
        """Find out what is damaged; None where there is nothing to rebuild from."""
        record = commit_record(LocalStore(self._folder))
        if record is None:
            return None
        try:
            return best(Images(self._folder, record), list(verify(self._folder).damaged))[0]
        except HeadwayError:
            return None
