"""Another scheme of parity for a committed checkpoint: 4+2 becomes 8+2, and no byte of data moves.

PACEMAKER's transition of Type 2 (OSDI 2021): the code is systematic, so the
data are read once and only the new parity is written, at a rate that leaves
bandwidth to others. The old parity is removed once all of the new one is
durable; killed at any point, one of the two is whole, and the next call goes
on. Data files are opened for reading only.

>>> restripe("nowhere", "8+2")
Traceback (most recent call last):
headway.core.errors.FormatError: nowhere is no checkpoint of headway's: ...
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DamageError, InputError
from headway.core.files.private import check_links
from headway.core.wire.pace import RateLimiter
from headway.storage.digests import Digested, block_digests
from headway.storage.manifest import COPIES, PARITY, PARITY_FACTS, encode, rank_folder
from headway.storage.redundancy.erasure import RS, Stripes, scheme_of
from headway.storage.redundancy.parity import STRIDE_BYTES, data_of, facts_of, sweep, write_copies, write_facts
from headway.storage.redundancy.parity_files import Images, newest_parity, parities, plan, record_of
from headway.storage.stores import sync_folder, write_durably

TURNS_PER_S = 20
"""Reads and writes are cut so that about this many fit into a second of the cap."""

BURST_S = 0.15
"""Time lost to coding and to other processes is made up for, within 15 % above the cap in any second."""


@dataclass(frozen=True, slots=True)
class Restriped:
    """What a transition did."""

    path: str
    """The checkpoint."""

    before: str
    """Scheme of the parity that was there, `none` without."""

    after: str
    """Scheme of the parity that is there now."""

    read_bytes: int
    """Data read; 0 when the new parity was there already."""

    written_bytes: int
    """Parity written."""

    def to_json(self) -> dict[str, object]:
        """Return the fields by name."""
        return asdict(self)


def restripe(
    checkpoint: str | Path,
    to: str,
    *,
    cap_bytes_per_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Restriped:
    """Replace the parity of a committed checkpoint by that of the scheme `to` (`k+m`, `+m`, `xor`).

    Reads plus writes stay below `cap_bytes_per_s`; 0 is no cap. Raises `InputError` for a scheme that is none and
    where a link leads out of the checkpoint, `DamageError` when data are damaged: repair them while the old parity is
    there.
    """
    path = Path(checkpoint)
    record = record_of(path)
    scheme = scheme_of(to, record.world_size)
    if scheme is None:
        raise InputError(f"parity cannot become {to!r}. Name a scheme with parity, such as 8+2.")
    gone = [rank for rank in range(record.world_size) if not (path / rank_folder(rank)).is_dir()]
    if gone:
        raise DamageError(f"{path} has lost the directory of rank {gone[0]}. Run first: headway ckpt repair {path}")
    check_links(path)
    name = f"{scheme[0]}+{scheme[1]}"
    before = next((kept.facts.scheme for kept in newest_parity(path, record).values()), "none")
    images = Images(path, record)
    read = written = 0
    if len(parities(path).get(name, {})) < record.world_size:
        stripes, code = plan(images, scheme)
        pace = RateLimiter(cap_bytes_per_s, clock=clock, sleep=sleep, burst_s=BURST_S)
        read, written = _write_parity(images, stripes, code, pace)
    if before != name or _unfinished(path, name):
        _switch(images, name)
    return Restriped(str(path), before, name, read, written)


def _write_parity(images: Images, stripes: Stripes, code: RS, pace: RateLimiter) -> tuple[int, int]:
    """Write parity and facts of all ranks under the scheme's own names, durably; return bytes (read, written)."""
    name = f"parity-{stripes.k}+{stripes.m}"
    stride = STRIDE_BYTES
    if pace.bytes_per_s:
        rows = int(pace.bytes_per_s / TURNS_PER_S) // images.row_bytes
        stride = min(STRIDE_BYTES, max(1, rows) * images.row_bytes)
    per_rank = stripes.m * stripes.segment_bytes
    digests = {rank: np.zeros(per_rank // images.row_bytes, np.uint64) for rank in stripes.circle}
    drafts = {rank: images.path / rank_folder(rank) / f".{name}.bin.draft" for rank in stripes.circle}
    for draft in drafts.values():
        sweep(draft.parent)
        draft.write_bytes(b"")
        os.truncate(draft, per_rank)
    read = 0
    for stripe in range(len(stripes.circle)):
        at = 0
        for data in data_of(images, stripes, stripe, stride_bytes=stride, pace=pace):
            for (rank, slot), made in zip(stripes.parity(stripe), code.encode(data), strict=True):
                pace.wait(made.size)
                start = slot * stripes.segment_bytes + at
                _write_at(drafts[rank], start, made)
                row = start // images.row_bytes
                found = block_digests(made.data, images.row_bytes)
                digests[rank][row : row + found.size] = found
            at += data[0].size
            read += sum(part.size for part in data)
    for rank, draft in drafts.items():
        _publish(draft, draft.with_name(f"{name}.bin"))
        write_copies(images, stripes, rank)
        facts = facts_of(images.record, stripes, code, rank, Digested(per_rank, images.row_bytes, digests[rank]))
        write_durably(draft.with_name(f"{name}.json"), [encode(facts)])
    return read, per_rank * len(drafts)


def _write_at(path: Path, start: int, data: NDArray[np.uint8]) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.seek(start)
        file.write(data.data)


def _publish(draft: Path, target: Path) -> None:
    """Make a written draft durable, then rename it."""
    with open(draft, "rb") as file:
        os.fsync(file.fileno())
    os.replace(draft, target)
    sync_folder(target.parent)


def _unfinished(path: Path, name: str) -> bool:
    """Say whether anything of another scheme, or under a scheme's own name, is left."""
    return any(path.glob("rank-*/parity-*")) or len(parities(path)) > 1


def _switch(images: Images, name: str) -> None:
    """Remove all parity but that of the scheme `name`, and give it the usual names; every step leaves it whole."""
    for rank, kept in parities(images.path)[name].items():
        folder = images.path / rank_folder(rank)
        old = [
            path for path in (*folder.glob("parity*.json"), folder / COPIES / PARITY_FACTS) if path != kept.facts_path
        ]
        # Facts first: parity that nobody knows of cannot be taken for the new one's.
        for path in (*old, *(path for path in folder.glob("parity*.bin") if path != kept.path)):
            path.unlink(missing_ok=True)
        sync_folder(folder)
        if kept.path.name != PARITY:
            os.replace(kept.path, folder / PARITY)
        write_facts(images, kept.facts)
        if kept.facts_path.parent == folder and kept.facts_path.name != PARITY_FACTS:
            kept.facts_path.unlink()
        sync_folder(folder)
