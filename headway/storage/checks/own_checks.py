"""Whether a checkpoint of ours is as it was committed: every file, every block.

The commit record says what files there are and their roots; `digests.bin`
says which block of an image differs; the manifest says whose bytes those
are. Small files are held to their roots. What was written after the commit
(parity, copies) is checked by who wrote it: `parity.check`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from headway.core.errors import FormatError
from headway.storage.commits.commit import (
    STRIDE_BYTES,
    commit_record,
    digests_of,
    hash_file,
    manifests_of,
    matches,
    whole_record,
)
from headway.storage.formats.records import read_saved
from headway.storage.formats.safe_pickle import what_runs
from headway.storage.formats.zip_files import faults
from headway.storage.stored.digests import damaged_blocks
from headway.storage.stored.findings import Findings
from headway.storage.stored.manifest import (
    COMMIT,
    COPIES,
    TWIN,
    CommitRecord,
    FileEntry,
    Piece,
    RankManifest,
    StoredObject,
)
from headway.storage.stored.store import LocalStore, Store


@dataclass(frozen=True, slots=True)
class Owners:
    """Whose bytes lie where in one image."""

    starts: list[int]
    """Where each record begins, ascending."""

    stops: list[int]
    """Where it ends."""

    names: list[str]
    """Name of the tensors or the object that it holds."""

    def of(self, start: int, stop: int) -> str | None:
        """Return the names of the records that meet bytes `[start, stop)`, joined by commas; None for padding."""
        found = self.names[bisect_right(self.stops, start) : bisect_left(self.starts, stop)]
        return ", ".join(found) or None


def owners_of(manifest: RankManifest | None) -> Owners:
    """Return whose bytes lie where in a rank's image; nobody's where the manifest is lost."""
    found: dict[tuple[int, int], list[str]] = {}
    entries: list[Piece | StoredObject] = [*manifest.pieces, *manifest.objects] if manifest else []
    for entry in entries:
        place = (entry.record_offset, entry.record_offset + entry.record_bytes)
        found.setdefault(place, []).append(entry.fqn)
    ordered = sorted(found.items())
    names = [", ".join(dict.fromkeys(fqns)) for _, fqns in ordered]
    return Owners([start for (start, _), _ in ordered], [stop for (_, stop), _ in ordered], names)


def check_own(store: Store, findings: Findings, *, deep: bool = True) -> CommitRecord | None:
    """Check a checkpoint of ours; return its commit record, or None when that is whole nowhere.

    Without `deep` images are held to their length only.
    """
    sizes = store.list()
    names = list(sizes)
    record = commit_record(store, names)
    if record is None:
        findings.add(COMMIT, None, 0, "checksum" if COMMIT in sizes else "missing")
        return None
    _check_record(store, record, sizes, findings)
    manifests = manifests_of(store, record, names)
    for entry in record.files:
        owners = owners_of(manifests.get(entry.rank)) if entry.rank is not None else owners_of(None)
        if entry.name not in sizes:
            _add_lost(entry, owners, 0, "missing", findings)
        elif entry.kind != "image":
            _check_small(store, record, entry, findings)
        else:
            _check_image(store, record, entry, sizes[entry.name], names, owners, findings, deep=deep)
    if deep and isinstance(store, LocalStore):  # from a bucket it would be a request for every object
        _note_objects(store, manifests.values(), findings)
    _note_extras(record, sizes, findings)
    return record


def _add_lost(entry: FileEntry, owners: Owners, start: int, what: str, findings: Findings) -> None:
    """Note that a file is gone from byte `start` on: a line per record that was there."""
    lost = [place for place in zip(owners.starts, owners.stops, owners.names, strict=True) if place[1] > start]
    for begin, end, name in lost if entry.kind == "image" else []:
        findings.add(entry.name, name, max(begin, start), what, end - max(begin, start))
    if entry.kind != "image" or not lost:
        findings.add(entry.name, None, start, what, entry.num_bytes - start)


def _check_record(store: Store, record: CommitRecord, sizes: Mapping[str, int], findings: Findings) -> None:
    """Check the commit record and the twins against the record that was found whole."""
    for name in (COMMIT, COMMIT + TWIN):
        if name not in sizes:
            if name == COMMIT:
                findings.add(COMMIT, None, 0, "missing")
            continue
        data = bytes(store.read(name))
        findings.checked_bytes += len(data)
        if whole_record(data) != record:
            findings.add(name, None, 0, "checksum", len(data))
    for entry in record.files:
        twin = entry.name + TWIN
        if entry.kind == "manifest" and twin in sizes:
            data = bytes(store.read(twin))
            findings.checked_bytes += len(data)
            if not matches(data, entry, record.digest):
                findings.add(twin, None, 0, "checksum", len(data))


def _check_small(store: Store, record: CommitRecord, entry: FileEntry, findings: Findings) -> None:
    data = bytes(store.read(entry.name))
    findings.pace.wait(len(data))
    findings.checked_bytes += len(data)
    if not matches(data, entry, record.digest):
        what = "truncated" if len(data) < entry.num_bytes else "checksum"
        findings.add(entry.name, None, 0, what, entry.num_bytes)


def _check_image(
    store: Store,
    record: CommitRecord,
    entry: FileEntry,
    size: int,
    names: list[str],
    owners: Owners,
    findings: Findings,
    *,
    deep: bool,
) -> None:
    """Check one image: its length, then every block."""
    if size > entry.num_bytes:
        findings.add(entry.name, None, entry.num_bytes, "extra", size - entry.num_bytes)
    if deep and entry.rank is not None:
        written = digests_of(store, record, entry.rank, names)
        if written is None:
            _check_without_digests(store, record, entry, min(size, entry.num_bytes), owners, findings)
        else:
            whole = size if size >= entry.num_bytes else size // entry.block_bytes * entry.block_bytes
            for start in range(0, min(whole, entry.num_bytes), STRIDE_BYTES):
                stop = min(start + STRIDE_BYTES, whole, entry.num_bytes)
                findings.pace.wait(stop - start)
                findings.checked_bytes += stop - start
                for index in damaged_blocks(store.read(entry.name, start, stop), written, start=start):
                    at = index * entry.block_bytes
                    end = min(at + entry.block_bytes, entry.num_bytes)
                    findings.add(entry.name, owners.of(at, end), at, "block", end - at)
    if size < entry.num_bytes:
        _add_lost(entry, owners, size // entry.block_bytes * entry.block_bytes, "truncated", findings)


def _check_without_digests(
    store: Store, record: CommitRecord, entry: FileEntry, size: int, owners: Owners, findings: Findings
) -> None:
    """Check an image whose digests are lost: by its root, and where that differs by the CRCs of its records."""
    findings.pace.wait(size)
    findings.checked_bytes += size
    if hash_file(store, entry.name, entry.block_bytes, size, digest=record.digest).root == entry.root:
        return
    before = len(findings.damaged)
    for start, stop, name in zip(owners.starts, owners.stops, owners.names, strict=True):
        if stop <= size:
            for fault in faults(store.read(entry.name, start, stop)):
                findings.add(entry.name, name, start + fault.offset, fault.what, fault.num_bytes)
    if len(findings.damaged) == before and size == entry.num_bytes:
        _add_lost(entry, owners, 0, "root", findings)


def _note_objects(store: Store, manifests: Iterable[RankManifest], findings: Findings) -> None:
    """Note what restoring the objects runs; what is damaged is named elsewhere."""
    for entry in (entry for manifest in manifests for entry in manifest.objects):
        with suppress(FormatError, FileNotFoundError):
            record = store.read(entry.file, entry.record_offset, entry.record_offset + entry.record_bytes)
            findings.note(what_runs(read_saved(record, entry.file).named, f"{entry.fqn!r}: restoring it"))


def _note_extras(record: CommitRecord, sizes: Mapping[str, int], findings: Findings) -> None:
    """Note files that no commit wrote."""
    known = {entry.name for entry in record.files} | {COMMIT, COMMIT + TWIN}
    known |= {entry.name + TWIN for entry in record.files if entry.kind == "manifest"}
    extra = [name for name in sizes if name not in known and not _is_redundancy(name) and not name.endswith(".draft")]
    if extra:
        more = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
        findings.notes.append(f"not part of the checkpoint: {', '.join(extra[:3])}{more}")


def _is_redundancy(name: str) -> bool:
    """Say whether a file is of those that are written after the commit."""
    parts = name.split("/")
    return len(parts) > 1 and parts[0].startswith("rank-") and (parts[1] == COPIES or parts[1].startswith("parity"))
