"""Whether a checkpoint is what was written: ours, stock DCP's, torch.save's or safetensors'.

Use it before trusting a checkpoint, and from time to time on those that are
kept. It never imports torch and never unpickles but by `safe_pickle`, so it
is safe on files of strangers. Ours is held to its digests, the others to
the checksums that they carry, and to their structure; what has no checksum
is reported as unchecked. Sizes and offsets are bytes.

>>> import tempfile
>>> verify(tempfile.mkdtemp()).status
'not_a_checkpoint'

Checking stored checkpoints again, in the background, at a bounded rate.

Disks and memories lose bits in what nobody reads. A scrub verifies every
checkpoint under a folder, the one that was verified longest ago first, and
notes when it did in `.verified.json` beside them, so that an interrupted
scrub goes on where it was, and `headway ckpt ls` can say how old the last
look is.

>>> import tempfile
>>> scrub(tempfile.mkdtemp())
[]

Whether a checkpoint of ours is as it was committed: every file, every block.

The commit record says what files there are and their roots; `digests.bin`
says which block of an image differs; the manifest says whose bytes those
are. Small files are held to their roots. What was written after the commit
(parity, copies) is checked by who wrote it: `parity.check`.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import read_json, read_regular
from headway.core.wire.pace import RateLimiter
from headway.storage.checks.foreign_checks import (
    DCP_SUFFIX,
    INDEX,
    check_dcp,
    check_file,
    check_folder,
    read_index,
    refuse,
)
from headway.storage.commit import (
    STRIDE_BYTES,
    CommittedCheckpoint,
    commit_record,
    committed,
    digests_of,
    hash_file,
    is_own,
    manifests_of,
    matches,
    rebuild,
    whole_record,
)
from headway.storage.digests import damaged_blocks
from headway.storage.draft import LEFTOVER
from headway.storage.formats.records import read_saved
from headway.storage.formats.safe_pickle import what_runs
from headway.storage.formats.zip_files import faults
from headway.storage.manifest import (
    COMMIT,
    COPIES,
    METADATA,
    TWIN,
    CommitRecord,
    Damage,
    FileEntry,
    Findings,
    Piece,
    RankManifest,
    StoredObject,
)
from headway.storage.object_commit import checkpoint_at
from headway.storage.redundancy import parity
from headway.storage.stores import LocalStore, Store, url_of, write_durably


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


Status = Literal["good", "repairable", "lost", "not_a_checkpoint"]

EXIT_CODES: dict[Status, int] = {"good": 0, "repairable": 3, "lost": 3, "not_a_checkpoint": 2}
"""Status -> what `headway ckpt verify` exits with."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found."""

    path: str
    """What was verified: the checkpoint itself, also where a folder of checkpoints was named."""

    format: str
    """`headway`, `dcp`, `torch.save`, `safetensors`; "" where it is no checkpoint."""

    status: Status
    """`good`; `repairable`: damaged, and what is needed to rebuild it is there; `lost`: damaged for good."""

    damaged: tuple[Damage, ...] = ()
    """Every place that differs from what was written."""

    checked_bytes: int = 0
    """Bytes that were held to a checksum or to the rules of the format."""

    unchecked_bytes: int = 0
    """Bytes that have no checksum."""

    root: str | None = None
    """Merkle root of a checkpoint of ours, as it was committed."""

    notes: tuple[str, ...] = ()
    """What a person should know, and what is no damage."""

    @property
    def exit_code(self) -> int:
        """What the command exits with: 0 good, 3 damaged, 2 no checkpoint."""
        return EXIT_CODES[self.status]

    def to_json(self) -> dict[str, Any]:
        """Return the object that `headway ckpt verify --json` prints."""
        return {"schema": "headway.ckpt.verify/1", **msgspec.to_builtins(self)}


def verify(path: str | Path, *, deep: bool = True, bytes_per_s: float = 0.0) -> VerifyReport:
    """Check a checkpoint, or the newest one in a folder of `step-<n>`.

    `path` is a folder (ours, stock DCP, or of torch.save or safetensors files), one such file, an index of several, or
    a URL. Without `deep` elements are not read: sizes, metadata and containers only. `bytes_per_s` bounds the rate of
    reading; 0 does not.
    Raises `InputError` when there is nothing at `path`.
    """
    url = url_of(path)
    if url is not None:
        return verify_store(checkpoint_at(url), deep=deep, bytes_per_s=bytes_per_s)
    path, findings = Path(path), Findings(RateLimiter(bytes_per_s))
    refuse(path)
    if path.is_file():
        store, size = LocalStore(path.parent), path.stat().st_size
        if path.name.endswith(INDEX):
            names = {path.name, *read_index(read_regular(path), str(path)).values()}
            sizes = {name: at.stat().st_size for name in sorted(names) if (at := path.parent / name).is_file()}
            return _report(path, check_folder(store, sizes, findings, deep=deep), findings)
        return _report(path, check_file(store, path.name, size, findings, deep=deep), findings)
    if LEFTOVER.fullmatch(path.name):
        return _report(path, None, Findings(notes=["it is a save that was never committed"]))
    if is_own(path) or (path / METADATA).exists() or next(path.glob(f"*{DCP_SUFFIX}"), None):
        return _verify_stored(LocalStore(path), path, findings, deep=deep)
    steps = committed(path)
    if steps:
        return verify(steps[-1].path, deep=deep, bytes_per_s=bytes_per_s)
    sizes = {entry.name: entry.stat().st_size for entry in sorted(path.iterdir()) if entry.is_file()}
    kind = check_folder(LocalStore(path), sizes, findings, deep=deep)
    if any(LEFTOVER.fullmatch(entry.name) for entry in path.iterdir()):
        findings.notes.append("there is only a save that was never committed")
    return _report(path, kind, findings)


def verify_store(store: Store, *, deep: bool = True, bytes_per_s: float = 0.0) -> VerifyReport:
    """Check the checkpoint that a store is rooted at, wherever that is: see `verify`.

    Parity lies in folders only, so what is damaged elsewhere is repairable by the rest of the checkpoint alone.
    """
    findings = Findings(RateLimiter(bytes_per_s))
    if METADATA in store.list() or commit_record(store) is not None:
        return _verify_stored(store, None, findings, deep=deep)
    kind = check_folder(store, store.list(), findings, deep=deep)
    return _report(store.place, kind, findings)


def _verify_stored(store: Store, path: Path | None, findings: Findings, *, deep: bool) -> VerifyReport:
    """Check a checkpoint of ours, or a stock DCP one."""
    if is_own(path) if path is not None else commit_record(store) is not None:
        record = check_own(store, findings, deep=deep)
        findings.damaged += parity.check(path) if path is not None and _has_redundancy(path) else []
        status = _status(path, store, record, findings.damaged) if findings.damaged else "good"
        return _report(store.place, "headway", findings, status, root=record.root if record else None)
    check_dcp(store, findings, deep=deep)
    return _report(store.place, "dcp", findings)


def _has_redundancy(path: Path) -> bool:
    return any(next(path.glob(place), None) for place in ("rank-*/parity*", f"rank-*/{COPIES}"))


def _report(
    place: str | Path, kind: str | None, findings: Findings, status: Status | None = None, *, root: str | None = None
) -> VerifyReport:
    """Make the report; what is damaged and has no parity is lost, unless `status` says otherwise."""
    if kind is None:
        status = "not_a_checkpoint"
    return VerifyReport(
        str(place), kind or "", status or ("lost" if findings.damaged else "good"), tuple(findings.damaged),
        findings.checked_bytes, findings.unchecked_bytes, root, tuple(findings.notes),
    )  # fmt: skip


def _status(path: Path | None, store: Store, record: CommitRecord | None, damaged: list[Damage]) -> Status:
    """Say whether a damaged checkpoint of ours can be rebuilt."""
    if path is not None and _has_redundancy(path):
        return "repairable" if parity.assess(path, damaged) == "repairable" else "lost"
    if record is None:
        return "lost"
    names = {damage.file for damage in damaged if damage.what != "extra"}
    return "repairable" if all(rebuild(store, record, name) is not None for name in names) else "lost"


# Checking stored checkpoints again, in the background, at a bounded rate.

NOTES = ".verified.json"
"""Name of the notes, in the folder of the checkpoints."""


class Verified(msgspec.Struct, frozen=True):
    """When a checkpoint was last verified, and with what result."""

    unix_s: float
    """When."""

    status: str
    """See `verify.Report`."""

    root: str | None = None
    """Merkle root of what was verified: another checkpoint of the same step has another one."""


def verified(root: str | Path) -> dict[str, Verified]:
    """Return name of a checkpoint -> what the last scrub found; notes that cannot be read count as none."""
    try:
        found: dict[str, Verified] = read_json(Path(root) / NOTES, dict[str, Verified])
        return found
    except (OSError, InputError):
        return {}


def scrub(
    root: str | Path,
    *,
    bytes_per_s: float = 0.0,
    tell: Callable[[VerifyReport], None] = lambda report: None,
    now: Callable[[], float] = time.time,
) -> list[VerifyReport]:
    """Verify every checkpoint under `root`, the longest unverified first, reading at most `bytes_per_s` (0: no limit).

    `tell` is called with each report as it comes. A checkpoint that is removed meanwhile is left out.
    """
    url = url_of(root)
    if url is not None:
        raise InputError(f"{url} is a bucket; a scrub keeps notes in a folder. Use: headway ckpt verify {url} --all")
    if not Path(root).is_dir():
        raise InputError(f"{root} is no folder. Name the folder that holds the step-<n> of a run.")
    if (Path(root) / METADATA).exists() or is_own(Path(root)):
        raise InputError(f"{root} is a checkpoint itself. Name the folder above it.")
    reports = []
    for checkpoint in order(root):
        try:
            report = verify(checkpoint.path, bytes_per_s=bytes_per_s)
        except (InputError, FileNotFoundError):
            if checkpoint.path.exists():
                raise
            continue
        note(root, report, now())
        tell(report)
        reports.append(report)
    return reports


def order(root: str | Path) -> list[CommittedCheckpoint]:
    """Return the checkpoints under `root`, never verified ones first, then by how long ago it was."""
    notes = verified(root)
    return sorted(
        committed(root), key=lambda one: (notes[one.path.name].unix_s if one.path.name in notes else 0.0, one)
    )


def note(root: str | Path, report: VerifyReport, unix_s: float) -> None:
    """Note the result of a verification; what is noted of checkpoints that are gone is dropped."""
    known = {one.path.name for one in committed(root)}
    notes = verified(root) | {Path(report.path).name: Verified(unix_s, report.status, report.root)}
    kept = {name: entry for name, entry in notes.items() if name in known}
    write_durably(Path(root) / NOTES, [msgspec.json.encode(kept)])
