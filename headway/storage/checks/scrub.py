"""Checking stored checkpoints again, in the background, at a bounded rate.

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
from pathlib import Path

import msgspec

from headway.core.errors import InputError
from headway.core.files.bounded_json import read_json
from headway.storage.checks.verification import VerifyReport, verify
from headway.storage.commits.commit import CommittedCheckpoint, committed, is_own
from headway.storage.stored.durable import write_durably
from headway.storage.stored.manifest import METADATA
from headway.storage.stored.objects import url_of

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
