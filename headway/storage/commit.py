"""The one act that makes a checkpoint visible, and what there is to restore from.

A draft becomes a checkpoint by one rename of its folder, after everything in
it is durable and known to be whole: each rank's manifest stands, the pieces
tile every tensor, all ranks agree on dtypes, shapes and replicas. Whatever
fails before the rename leaves a draft, which nobody lists, and the older
checkpoints as they were. A step that is there already is never written into.

>>> import tempfile
>>> from headway.storage.draft import finish_rank, open_draft
>>> from headway.storage.manifest import RankManifest
>>> root = tempfile.mkdtemp()
>>> draft = open_draft(root, 7, "a", rank=0)
>>> finish_rank(draft, RankManifest(7, "a", 0, 1, None), None)
>>> committed(root)
[]
>>> commit(draft, world_size=1).step, committed(root)[-1].path.name
(7, 'step-7')

The small files of a checkpoint, from whichever place still has them whole.

Use it to read a manifest, digests, `.metadata` or the commit record of a
checkpoint that may be damaged. Candidates in order: the file itself; its
twin beside it (`manifest.json.copy`, `commit.json.copy`); the copies that
other ranks keep (`rank-<r>/copies/<name>`, with redundancy on); and what the
rest of the checkpoint says: `.metadata` follows from the manifests, digests
from the image. Whatever comes back has the root that the commit recorded.

>>> import tempfile
>>> from headway.storage.stores import LocalStore
>>> commit_record(LocalStore(tempfile.mkdtemp())) is None
True
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from headway.core.errors import DamageError, FormatError, InputError
from headway.core.files.private import remove_tree
from headway.core.units import MIB
from headway.storage.boxes import Box, cover_fault
from headway.storage.digests import Digested, Digester, digest_of, pack_digests, unpack_digests
from headway.storage.draft import LEFTOVER, AnyDraft, Draft, is_stale, wait_for_ranks
from headway.storage.formats.dcp import metadata_bytes
from headway.storage.manifest import (
    COMMIT,
    COPIES,
    DIGESTS_FILE,
    MANIFEST,
    METADATA,
    TWIN,
    CommitRecord,
    FileEntry,
    Piece,
    RankManifest,
    decode,
    encode,
    is_whole,
    rank_folder,
    read_record,
    root_of,
    small_entry,
)
from headway.storage.stores import LocalStore, Store, sync_folder

STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class CommittedCheckpoint:
    """A checkpoint that can be restored from."""

    step: int
    """Its step."""

    path: Path
    """Its folder."""

    @property
    def ours(self) -> bool:
        """Whether it was committed here, and so has digests; else it is a stock DCP checkpoint."""
        return is_own(self.path)

    @property
    def record(self) -> CommitRecord | None:
        """Its commit record; None where it has none, or a broken one."""
        try:
            return read_record(self.path / COMMIT, CommitRecord)
        except (FileNotFoundError, NotADirectoryError, DamageError, FormatError):
            return None

    @property
    def store(self) -> LocalStore:
        """The store that is rooted at it."""
        return LocalStore(self.path)


class StepTakenError(InputError):
    """Another writer has committed this step; what it wrote stands."""


def is_own(path: Path) -> bool:
    """Say whether a folder is, or was, a checkpoint of ours: it has a commit record, or what a rank's agent left."""
    places = (COMMIT, f"rank-*/{MANIFEST}", f"rank-*/{COPIES}/{COMMIT}")
    return any(next(path.glob(place), None) for place in places)


def committed(root: str | Path) -> list[CommittedCheckpoint]:
    """Return the checkpoints under `root`, oldest step first: every `step-<n>` that holds a `.metadata`, or is ours.

    One of ours is listed also when it has lost its `.metadata` and commit record: other ranks may have copies. Drafts,
    and checkpoints that are being removed, have other names and are not listed. A root that does not exist has none.
    Raises `InputError` for a root that is a file.
    """
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise InputError(f"{root} is a file; checkpoints lie in a folder. Pass that folder.") from None
    found = [CommittedCheckpoint(int(match[1]), Path(root) / name) for name in names if (match := STEP.fullmatch(name))]
    return sorted(entry for entry in found if (entry.path / METADATA).exists() or entry.ours)


def commit(
    draft: Draft,
    *,
    world_size: int,
    redundancy: str = "none",
    replace: bool = False,
    deadline_s: float = 600.0,
) -> CommitRecord:
    """Wait until all ranks are done, check that the whole is whole, and make the draft a checkpoint.

    Order: `.metadata`, `commit.json`, the draft's folder, the rename, the root's folder; each durable before the
    next. With `replace` a checkpoint of the same step (of an attempt that was given up) changes places with the
    draft in one act, and is then removed. Asked again for what this attempt has committed, it returns that record.

    Raises
    ------
    StepTakenError
        The step stands already, and `replace` is off.
    HeadwayError
        Ranks are missing after `deadline_s`.
    InputError
        The manifests do not make up a whole state: the tensor and the element, or the ranks, are named.
    DamageError
        A file is not as long as its manifest says.
    """
    done = _done_before(draft)
    if done is not None:
        return done
    if draft.target.exists() and not replace:
        raise StepTakenError(_taken(draft))
    manifests = wait_for_ranks(draft, world_size, deadline_s=deadline_s)
    store = LocalStore(draft.path, makes_folders=False)
    record = seal(store, manifests, draft, world_size=world_size, redundancy=redundancy)
    for note in draft.path.glob(".owner-*.json"):
        note.unlink(missing_ok=True)
    sync_folder(draft.path)
    publish(draft, replace=replace)
    return record


def seal(
    store: Store, manifests: Sequence[RankManifest], draft: AnyDraft, *, world_size: int, redundancy: str
) -> CommitRecord:
    """Check what ranks wrote into the store of a draft; put `.metadata` and the commit record beside it, return that.

    The caller makes it visible: a folder by a rename (`commit`), a bucket by a `put_if_absent`. Raises as
    `commit` does when the whole is not whole.
    """
    check_whole(manifests, draft.step, draft.attempt, world_size, store.list())
    metadata, digest = metadata_bytes(manifests), manifests[0].digest
    files = (*_files(store, manifests), small_entry(METADATA, metadata, rank=None, kind="metadata", digest=digest))
    record = CommitRecord(
        step=draft.step, attempt=draft.attempt, world_size=world_size, created_unix_s=time.time(), files=files,
        root=root_of(files, digest=digest), redundancy=redundancy, digest=digest,
    )  # fmt: skip
    store.put(METADATA, [metadata])
    for name in (COMMIT + TWIN, COMMIT):
        store.put(name, [encode(record)])
    return record


def _done_before(draft: Draft) -> CommitRecord | None:
    """Return the record of this very attempt's commit, where it was cut short after the rename."""
    record = CommittedCheckpoint(draft.step, draft.target).record
    if record is None or (record.step, record.attempt) != (draft.step, draft.attempt):
        return None
    sync_folder(draft.root)
    return record


def publish(draft: Draft, *, replace: bool = False) -> None:
    """Rename a whole draft to its checkpoint; make that durable. See `commit`."""
    try:
        os.rename(draft.path, draft.target)
    except OSError as cause:
        if cause.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not replace:
            raise StepTakenError(_taken(draft)) from None
        _exchange(draft.path, draft.target)
        sync_folder(draft.root)
        remove_tree(draft.path)
    sync_folder(draft.root)


def _taken(draft: Draft) -> str:
    return (
        f"{draft.target} is committed already; a checkpoint is never written over. Remove it first, or save another "
        "step."
    )


def _exchange(first: Path, second: Path) -> None:
    """Let two folders change places in one act (renameat2); where the system cannot, move the old one aside first."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2 is not None and renameat2(here, os.fsencode(first), here, os.fsencode(second), swap) == 0:
        return
    aside = second.with_name(f".{second.name}.{uuid.uuid4().hex[:12]}.trash")
    os.rename(second, aside)
    os.rename(first, second)
    remove_tree(aside)


def _files(store: Store, manifests: Iterable[RankManifest]) -> Iterable[FileEntry]:
    """Return the entries of what the ranks wrote."""
    for manifest in manifests:
        folder = rank_folder(manifest.rank)
        for name, kind in ((DIGESTS_FILE, "digests"), (MANIFEST, "manifest")):
            if manifest.image is not None or kind == "manifest":
                data = bytes(store.read(f"{folder}/{name}"))
                yield small_entry(f"{folder}/{name}", data, rank=manifest.rank, kind=kind, digest=manifest.digest)
        if manifest.image is not None:
            yield manifest.image


def check_whole(
    manifests: Sequence[RankManifest], step: int, attempt: str, world_size: int, sizes: Mapping[str, int]
) -> None:
    """Raise unless the manifests are of this save and make up a whole state; see `commit`.

    `sizes` are the files that were written: name -> bytes.
    """
    for manifest in manifests:
        told = (manifest.step, manifest.attempt, manifest.world_size)
        if told != (step, attempt, world_size):
            raise InputError(
                f"rank {manifest.rank} wrote for step, attempt and world size {told}; the commit is for "
                f"{(step, attempt, world_size)}. Start all ranks with the same world size and attempt."
            )
        image = manifest.image
        if image is not None and sizes.get(image.name) != image.num_bytes:
            raise DamageError(
                f"{image.name} of step {step} has {sizes.get(image.name, 'no')} bytes; its manifest says "
                f"{image.num_bytes}. Save again."
            )
    if len({manifest.digest for manifest in manifests}) > 1:
        raise InputError("the ranks hash with different digests. Start all ranks with the same digest.")
    _check_tensors(manifests)
    _check_replicas(manifests)


def _check_tensors(manifests: Sequence[RankManifest]) -> None:
    """Raise unless the pieces of every tensor agree on dtype and shape, and tile it."""
    pieces: dict[str, list[tuple[int, Piece]]] = {}
    for manifest in manifests:
        for piece in manifest.pieces:
            pieces.setdefault(piece.fqn, []).append((manifest.rank, piece))
    for fqn, found in pieces.items():
        facts = {(piece.dtype, piece.shape): rank for rank, piece in reversed(found)}
        if len(facts) > 1:
            told = "; ".join(f"rank {rank}: {dtype} {list(shape)}" for (dtype, shape), rank in facts.items())
            raise InputError(f"ranks differ on the tensor {fqn!r}: {told}. Save the same tensor on all ranks.")
        fault = cover_fault(found[0][1].shape, [Box(piece.offsets, piece.lengths) for _, piece in found])
        if fault is not None:
            who = "".join(f"; box {index} is rank {found[index][0]}'s" for index in fault.indices[:4])
            raise InputError(
                f"the pieces of the tensor {fqn!r} are not the whole of it: {fault}{who}. Check which ranks hold it: "
                "what every rank has whole is replicated, anything else needs its place (DTensor, FlatShard)."
            )


def _check_replicas(manifests: Sequence[RankManifest]) -> None:
    """Raise unless all ranks that tell the digest of a replicated tensor tell the same."""
    told: dict[str, dict[str, int]] = {}
    for manifest in reversed(manifests):
        for fqn, digest in manifest.replicas.items():
            told.setdefault(fqn, {})[digest] = manifest.rank
    differ = {fqn: sorted(ranks.values()) for fqn, ranks in told.items() if len(ranks) > 1}
    if differ:
        fqn, ranks = next(iter(differ.items()))
        more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        raise InputError(
            f"the tensor {fqn!r}{more} was taken to be equal on all ranks, but ranks {ranks[0]} and {ranks[1]} hold "
            "different values. Make them equal before the first save, or, to store each rank's own, pass "
            "replicated=None and give the object another name on every rank."
        )


def remove(checkpoint: CommittedCheckpoint) -> None:
    """Remove a checkpoint: it vanishes in one act, its files afterwards."""
    aside = checkpoint.path.with_name(f".{checkpoint.path.name}.{uuid.uuid4().hex[:12]}.trash")
    os.rename(checkpoint.path, aside)
    sync_folder(aside.parent)
    remove_tree(aside)


def recover(root: str | Path, *, keep: Draft | None = None) -> list[Path]:
    """Remove what dead writers left under `root`: drafts and half-removed checkpoints; return what was removed.

    A draft whose process lives (also one of an older attempt, which may still finish) stays, and so does `keep`.
    """
    removed = []
    for path in sorted(Path(root).glob(".step-*")):
        match = LEFTOVER.fullmatch(path.name)
        if match is None or (keep is not None and path == keep.path):
            continue
        if match[3] == "trash" or is_stale(path):
            remove_tree(path)
            removed.append(path)
    return removed


# The small files of a checkpoint, from whichever place still has them whole.

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
