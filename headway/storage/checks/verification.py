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
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from headway.core.errors import InputError
from headway.core.files.bounded_json import read_json
from headway.core.files.regular_file import read_regular
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
from headway.storage.checks.own_checks import check_own
from headway.storage.commits.commit import CommittedCheckpoint, commit_record, committed, is_own, rebuild
from headway.storage.commits.draft import LEFTOVER
from headway.storage.commits.object_commit import checkpoint_at
from headway.storage.redundancy import parity
from headway.storage.stored.findings import Damage, Findings
from headway.storage.stored.manifest import COPIES, METADATA, CommitRecord
from headway.storage.stored.objects import url_of
from headway.storage.stored.store import LocalStore, Store, write_durably

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
        return {
            "schema": "headway.ckpt.verify/1",
            "path": self.path,
            "format": self.format,
            "status": self.status,
            "damaged": [damage.to_json() for damage in self.damaged],
            "checked_bytes": self.checked_bytes,
            "unchecked_bytes": self.unchecked_bytes,
            "root": self.root,
            "notes": list(self.notes),
        }


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
