"""The small files of a checkpoint, from whichever place still has them whole.

Use it to read a manifest, digests, `.metadata` or the commit record of a
checkpoint that may be damaged. Candidates in order: the file itself; its
twin beside it (`manifest.json.copy`, `commit.json.copy`); the copies that
other ranks keep (`rank-<r>/copies/<name>`, with redundancy on); and what the
rest of the checkpoint says: `.metadata` follows from the manifests, digests
from the image. Whatever comes back has the root that the commit recorded.

>>> import tempfile
>>> from headway.storage.stored.store import LocalStore
>>> commit_record(LocalStore(tempfile.mkdtemp())) is None
True
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from headway.core.units import MIB
from headway.storage.formats.dcp import metadata_bytes
from headway.storage.stored.digests import Digested, Digester, digest_of, pack_digests, unpack_digests
from headway.storage.stored.manifest import (
    COMMIT,
    COPIES,
    DIGESTS_FILE,
    METADATA,
    TWIN,
    CommitRecord,
    FileEntry,
    RankManifest,
    decode,
    is_whole,
    rank_folder,
)
from headway.storage.stored.store import Store

STRIDE_BYTES = 8 * MIB
"""Bytes of an image that are hashed at a time: a multiple of every block size."""


def _candidates(store: Store, name: str, names: list[str]) -> Iterator[bytes]:
    """Yield the bytes of a file, of its twin, and of its copies at other ranks, where they are there."""
    copies = [place for place in names if place.endswith(f"/{COPIES}/{name}")]
    for place in (name, name + TWIN, *copies):
        try:
            yield bytes(store.read(place))
        except FileNotFoundError:
            continue


def commit_record(store: Store, names: list[str] | None = None) -> CommitRecord | None:
    """Return the commit record of a checkpoint from the first place that has it whole; None where no place has."""
    found = _candidates(store, COMMIT, list(store.list()) if names is None else names)
    return next((record for record in map(whole_record, found) if record is not None), None)


def whole_record(data: bytes) -> CommitRecord | None:
    """Return the commit record that bytes hold, or None where they are not whole.

    Raises `FormatError` when they are whole, and of a version that this headway does not know.
    """
    return decode(data, CommitRecord, COMMIT) if is_whole(data) else None


def matches(data: bytes, entry: FileEntry, digest: str) -> bool:
    """Say whether bytes are those that the commit recorded."""
    return len(data) == entry.num_bytes and digest_of(data, entry.block_bytes, digest=digest).root == entry.root


def read_guarded(store: Store, record: CommitRecord, name: str, names: list[str] | None = None) -> bytes | None:
    """Return a small file as it was committed, from the first place that has it whole; None where none has."""
    entry = next((entry for entry in record.files if entry.name == name), None)
    if entry is None:
        return None
    found = _candidates(store, name, list(store.list()) if names is None else names)
    return next((data for data in found if matches(data, entry, record.digest)), None)


def manifests_of(store: Store, record: CommitRecord, names: list[str] | None = None) -> dict[int, RankManifest]:
    """Return rank -> manifest, of those ranks whose manifest is whole somewhere."""
    found = {}
    for entry in record.files:
        if entry.kind == "manifest" and entry.rank is not None:
            data = read_guarded(store, record, entry.name, names)
            if data is not None:
                found[entry.rank] = decode(data, RankManifest, entry.name)
    return found


def digests_of(store: Store, record: CommitRecord, rank: int, names: list[str] | None = None) -> Digested | None:
    """Return the digests of a rank's image; None where they are whole nowhere."""
    name = f"{rank_folder(rank)}/{DIGESTS_FILE}"
    data = read_guarded(store, record, name, names)
    return None if data is None else unpack_digests(data, name)


def hash_file(store: Store, name: str, block_bytes: int, num_bytes: int, *, digest: str) -> Digested:
    """Return the digests of a stored file, as it is now."""
    digester = Digester(block_bytes, digest=digest)
    for start in range(0, num_bytes, STRIDE_BYTES):
        digester.update(store.read(name, start, min(start + STRIDE_BYTES, num_bytes)))
    return digester.finish()


def rebuild(store: Store, record: CommitRecord, name: str) -> bytes | None:
    """Return a small file as it was committed, copied or derived from what is whole; None where nothing gives it.

    Takes the commit record, its twin, manifests, `.metadata` and digests; not images, which only parity can give.
    """
    names = list(store.list())
    base = PurePosixPath(name).name.removesuffix(TWIN)
    if base == COMMIT:
        return next((data for data in _candidates(store, COMMIT, names) if whole_record(data)), None)
    entry = next((entry for entry in record.files if entry.name == name.removesuffix(TWIN)), None)
    if entry is None or entry.kind not in ("manifest", "metadata", "digests"):
        return None
    found = read_guarded(store, record, entry.name, names)
    if found is None and base in DERIVED:
        found = DERIVED[base](store, record, entry, names)
    return found if found is not None and matches(found, entry, record.digest) else None


def _derived_metadata(store: Store, record: CommitRecord, entry: FileEntry, names: list[str]) -> bytes | None:
    manifests = manifests_of(store, record, names)
    return metadata_bytes(list(manifests.values())) if len(manifests) == record.world_size else None


def _derived_digests(store: Store, record: CommitRecord, entry: FileEntry, names: list[str]) -> bytes | None:
    image = next((file for file in record.files if file.kind == "image" and file.rank == entry.rank), None)
    if image is None or image.name not in names:
        return None
    size = store.list(image.name.rsplit("/", 1)[0])[image.name]
    now = hash_file(store, image.name, image.block_bytes, size, digest=record.digest)
    return pack_digests(now) if now.root == image.root else None


DERIVED = {METADATA: _derived_metadata, DIGESTS_FILE: _derived_digests}
"""Name of a file -> how it follows from the others; a manifest follows from none: it has its twin."""
