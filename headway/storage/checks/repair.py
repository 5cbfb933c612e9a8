"""Damage undone: what parity, copies and the rest of a checkpoint give back, put in place file by file.

Nothing is put in place before it is what the commit recorded: an image is
written beside the damaged one, held to its Merkle root, fsynced, renamed. So
a repair that is killed leaves every file as it was or whole, and can be run
again; good files are not written. Order: the record of the commit, the small
files, images, digests, parity. Nothing is written where anything is lost.

>>> import tempfile
>>> repair(tempfile.mkdtemp())
Traceback (most recent call last):
headway.core.errors.FormatError: ... is no checkpoint of headway's: ...
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DamageError, InputError
from headway.core.files.private import check_links
from headway.core.units import MIB
from headway.storage.checks.verification import verify
from headway.storage.commit import commit_record, is_own, rebuild
from headway.storage.digests import Digester
from headway.storage.manifest import (
    COMMIT,
    TWIN,
    CommitRecord,
    encode,
    rank_folder,
)
from headway.storage.redundancy.parity import bad_parity, best, encode_rank, judge, sweep, write_copies, write_facts
from headway.storage.redundancy.parity_files import (
    Images,
    Judgement,
    Losses,
    LostBytes,
    newest_parity,
    read_at,
    record_of,
    state,
)
from headway.storage.stores import LocalStore, durable_file, make_folder, write_durably

STRIDE_BYTES = MIB
"""Bytes of an image that are made at a time."""


@dataclass(frozen=True, slots=True)
class Repaired:
    """What `repair` found and did."""

    path: str
    """The checkpoint."""

    status: Literal["good", "repaired", "repairable", "lost"]
    """`good`: nothing to do; `repairable`: damaged, and left so by a dry run; `lost`: nothing was written."""

    files: tuple[str, ...] = ()
    """Files that were rebuilt, or would be."""

    rebuilt_bytes: int = 0
    """Bytes of images that came from parity."""

    missing: tuple[LostBytes, ...] = ()
    """What is lost."""

    @property
    def exit_code(self) -> int:
        """What the command exits with: 3 when the checkpoint is damaged still."""
        return 3 if self.status in ("lost", "repairable") else 0

    def to_json(self) -> dict[str, object]:
        """Return the object that `headway ckpt repair --json` prints."""
        judgement = Judgement("lost" if self.missing else "repairable", self.missing)
        return {
            "schema": "headway.ckpt.repair/1", "path": self.path, "status": self.status, "files": list(self.files),
            "rebuilt_bytes": self.rebuilt_bytes, "missing": judgement.to_json()["missing"],
        }  # fmt: skip


def repair(checkpoint: str | Path, *, dry_run: bool = False) -> Repaired:
    """Find what is damaged and rebuild it, bit for bit; see `Repaired`.

    Raises `FormatError` for what is no checkpoint of ours, `InputError` when something else lies in the place of a
    file or folder or a link leads out of the checkpoint, `DamageError` when a rebuilt file is not what was saved (it
    is then not put in place).
    """
    path = Path(checkpoint)
    record = commit_record(LocalStore(path))
    if record is None and is_own(path):
        return Repaired(str(path), "lost", missing=judge(path, []).missing)
    record = record or record_of(path)
    if not dry_run:
        check_links(path)
        for folder in path.glob("rank-*"):
            sweep(folder)
    damage = list(verify(path).damaged)
    unfinished = _without_parity(path, record)
    if not damage and not unfinished:
        return Repaired(str(path), "good")
    losses, judgement = best(Images(path, record), damage)
    names = {hurt.file for hurt in damage} | {f"{rank_folder(rank)}/parity.json" for rank in unfinished}
    if judgement.status == "lost" or dry_run:
        status: Literal["lost", "repairable"] = "lost" if judgement.status == "lost" else "repairable"
        return Repaired(str(path), status, () if status == "lost" else tuple(sorted(names)), 0, judgement.missing)
    made = _put_back(path, record, losses, names)
    return Repaired(str(path), "repaired", tuple(sorted(names)), made)


def _without_parity(path: Path, record: CommitRecord) -> list[int]:
    """Return the ranks that have no parity although redundancy was asked for."""
    if state(path).status != "durable":
        return []
    return sorted(set(range(record.world_size)) - set(newest_parity(path, record)))


def _put_back(path: Path, record: CommitRecord, losses: Losses, names: Iterable[str]) -> int:
    """Rebuild the files `names`; return how many bytes of images came from parity."""
    names = set(names)
    images = losses.images
    _check_places(path, record, names)
    for rank in range(record.world_size):
        make_folder(path / rank_folder(rank))
    committed = {entry.name: entry for entry in record.files}
    image_ranks = {entry.name: rank for rank, entry in images.entries.items()}
    for name in sorted(names & {COMMIT, COMMIT + TWIN}):
        write_durably(path / name, [encode(record)])
    for name in sorted(names):
        kind = committed[name.removesuffix(TWIN)].kind if name.removesuffix(TWIN) in committed else None
        if kind == "manifest":
            _write_small(images, name)
    for name in (COMMIT, *(entry.name for entry in record.files if entry.kind == "manifest")):
        if not (path / (name + TWIN)).exists():
            write_durably(path / (name + TWIN), [(path / name).read_bytes()])
    made = sum(rebuild_image(losses, image_ranks[name]) for name in sorted(names & set(image_ranks)))
    for name in sorted(names):
        if name in committed and committed[name].kind in ("digests", "metadata"):
            _write_small(images, name)
    kept = newest_parity(path, record)
    for rank in _touched(record, names):
        if rank not in kept or bad_parity(kept[rank]):
            encode_rank(path, rank)
        else:
            write_facts(images, kept[rank].facts)
            write_copies(images, kept[rank].facts.stripes, rank)
    return made


def _check_places(path: Path, record: CommitRecord, names: Iterable[str]) -> None:
    """Raise `InputError` where something that a repair must not remove lies in the place of a file or a folder."""
    folders = [path / rank_folder(rank) for rank in range(record.world_size)]
    taken = [folder for folder in folders if os.path.lexists(folder) and not folder.is_dir()]
    taken += [path / name for name in sorted(names) if (path / name).is_dir()]
    if taken:
        what = "a folder" if taken[0].is_dir() else "no folder"
        raise InputError(f"{taken[0]} is {what}, and what is rebuilt goes there. Move it away and run this again.")


def _write_small(images: Images, name: str) -> None:
    """Write a small file as it was committed, from wherever it comes."""
    data = rebuild(images.store, images.record, name)
    if data is None:
        raise DamageError(f"{name} of {images.path} is whole nowhere. Restore an older checkpoint: headway ckpt ls")
    write_durably(images.path / name, [data])


def _touched(record: CommitRecord, names: Iterable[str]) -> list[int]:
    """Return the ranks of whose parity, facts or copies something is to be made anew."""
    written = {entry.name for entry in record.files}
    written |= {name + TWIN for name in written} | {COMMIT, COMMIT + TWIN}
    ranks = {int(name.split("/")[0].removeprefix("rank-")) for name in names if name not in written and "/" in name}
    return sorted(ranks)


def rebuild_image(losses: Losses, rank: int) -> int:
    """Put a rank's image back as it was committed; return the bytes that came from parity.

    Good rows are copied from the damaged file, the others made from k good members of their stripes. Raises
    `DamageError`, with nothing put in place, when the whole is not what the commit recorded.
    """
    entry = losses.images.entries[rank]
    target = losses.images.path / entry.name
    digester, made = Digester(entry.block_bytes, digest=losses.images.record.digest), 0
    with durable_file(target) as file:
        for part, from_parity in _image_parts(losses, rank):
            file.write(part.data)
            digester.update(part.data)
            made += from_parity
        if digester.finish().root != entry.root:
            raise DamageError(
                f"{entry.name} as rebuilt is not what was saved; it was not put in place. Parity and data are not of "
                "one save: restore an older checkpoint (headway ckpt ls)."
            )
    return made


def _image_parts(losses: Losses, rank: int) -> Iterator[tuple[NDArray[np.uint8], int]]:
    """Yield the bytes of an image in order, each part with the number of its bytes that came from parity."""
    entry = losses.images.entries[rank]
    for start, stop, source in _runs(losses, rank):
        for first in range(start, min(stop, entry.num_bytes), STRIDE_BYTES):
            size = min(stop, first + STRIDE_BYTES) - first
            if source is None:
                part = np.zeros(size, np.uint8)
                read_at(losses.images.path / entry.name, first, part)
            else:
                part = made_from(losses, rank, first, size, source)
            part = part[: entry.num_bytes - first]
            yield part, 0 if source is None else len(part)


def _runs(losses: Losses, rank: int) -> Iterator[tuple[int, int, list[int] | None]]:
    """Yield (start, stop, source) over an image: the k members of a stripe that give these bytes; None: they are good.

    Rows that the same members give back are one run.
    """
    if rank not in losses.bad_rows:
        yield 0, losses.images.entries[rank].num_bytes, None
        return
    stripes, row = losses.stripes, losses.row_bytes
    assert stripes is not None
    for segment in range(stripes.k):
        begin = segment * stripes.segment_bytes
        if not losses.image_rows(rank, segment).any():
            yield begin, begin + stripes.segment_bytes, None
            continue
        gone = losses.gone(stripes.stripe_of_data(rank, segment))
        turns = np.flatnonzero((gone[:, 1:] != gone[:, :-1]).any(axis=0)) + 1
        for first, stop in pairwise([0, *turns.tolist(), gone.shape[1]]):
            good = np.flatnonzero(~gone[:, first])[: stripes.k].tolist()
            yield begin + first * row, begin + stop * row, good if gone[segment, first] else None


def rebuilt(losses: Losses, rank: int, start: int, stop: int) -> bytes | None:
    """Return bytes `start` to `stop` of a rank's image, at most one row of it, made from parity; None if it cannot."""
    if losses.stripes is None:
        return None
    for begin, end, source in _runs(losses, rank):
        if begin <= start < stop <= end:
            if source is None or len(source) < losses.stripes.k:
                return None
            return made_from(losses, rank, start, stop - start, source).tobytes()
    return None


def made_from(losses: Losses, rank: int, start: int, size: int, source: list[int]) -> NDArray[np.uint8]:
    """Return `size` bytes of a rank's image from `start` on, inside one segment, from the members `source`."""
    stripes, code = losses.stripes, losses.code
    assert stripes is not None
    assert code is not None
    segment, within = divmod(start, stripes.segment_bytes)
    stripe = stripes.stripe_of_data(rank, segment)
    parts = {}
    for member in source:
        parts[member] = np.zeros(size, np.uint8)
        if member < stripes.k:
            holder, place = stripes.data(stripe)[member]
            entry = losses.images.entries.get(holder)
            path = None if entry is None else losses.images.path / entry.name
        else:
            holder, place = stripes.parity(stripe)[member - stripes.k]
            path = losses.kept[holder].path
        if path is not None:  # a rank without an image has zeros
            read_at(path, place * stripes.segment_bytes + within, parts[member])
    made: NDArray[np.uint8] = code.rebuild(parts, [segment])[0]
    return made
