"""What redundancy leaves in a checkpoint: parity of each rank, its facts, and the images it protects.

    rank-<r>/parity.bin      m segments of parity over segments of k images each: see `stripes`
    rank-<r>/parity.json     the stripes, the code's matrix, digests of parity.bin; written last
    rank-<r>/copies/         small files of the ranks before it, of the whole checkpoint, and of its own parity.json

While `restripe` changes the scheme, parity of two schemes lies side by side:
the new one in `parity-<k>+<m>.bin` and `.json`. A parity is known by what its
facts say, not by its name.

>>> state(Path("nowhere")).status
'none'

What damage means for the stripes of a checkpoint: which rows still have k good members, and what is lost.

A row is one block of each member of a stripe, as long as the largest block
that has a digest. Up to m members of a row may be gone. `Losses` spreads
damage over rows; `judged` names the tensors that no row gives back.

>>> piece = Piece("w", "float32", (20, 10), (7, 0), (3, 10), "f", 0, 300, 100, 120, 0)
>>> rows_of(piece, 0, 4096), rows_of(piece, 139, 141)
((7, 9), (7, 8))
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DamageError, FormatError
from headway.storage.commit import commit_record, digests_of, manifests_of, rebuild
from headway.storage.digests import Digested, block_bytes_for, damaged_blocks, unpack_digests
from headway.storage.manifest import (
    COPIES,
    DIGESTS_FILE,
    PARITY,
    PARITY_FACTS,
    CommitRecord,
    Damage,
    FileEntry,
    Piece,
    RankManifest,
    rank_folder,
    read_record,
)
from headway.storage.redundancy.erasure import CELL_BYTES, RS, Stripes, circle, scheme_of
from headway.storage.stores import LocalStore

SCHEMA = "headway.ckpt.parity/1"


class ParityFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a `parity.json` says: how the parity beside it was made."""

    step: int
    """Step of the checkpoint."""

    attempt: str
    """The attempt that saved it."""

    rank: int
    """Whose parity this is."""

    k: int
    """Data members of a stripe."""

    m: int
    """Parity members of a stripe."""

    w: int
    """Bits per field element of the code."""

    matrix: tuple[tuple[int, ...], ...]
    """[m][k] Coefficients of the code."""

    circle: tuple[int, ...]
    """[world_size] See `stripes.circle`."""

    segment_bytes: int
    """Length of a segment."""

    digests: bytes
    """Digests of parity.bin, packed as in a `digests.bin`."""

    schema: str = SCHEMA

    @property
    def scheme(self) -> str:
        """`k+m`."""
        return f"{self.k}+{self.m}"

    @property
    def stripes(self) -> Stripes:
        """How the images are cut."""
        return Stripes(self.k, self.m, self.circle, self.segment_bytes)

    @property
    def code(self) -> RS:
        """The code that made the parity."""
        return RS(self.k, self.m, self.w, cell_bytes=CELL_BYTES, matrix=self.matrix)


@dataclass(frozen=True, slots=True)
class StoredParity:
    """Parity of one rank as it lies on disk, its facts whole; whether its bytes are is another matter."""

    facts: ParityFacts
    """From the `.json`."""

    facts_path: Path
    """The `.json`."""

    path: Path
    """The `.bin`; it may be missing."""

    @property
    def digested(self) -> Digested:
        """Digests of the `.bin` as it was written."""
        return unpack_digests(self.facts.digests, str(self.facts_path))


@dataclass(frozen=True, slots=True)
class State:
    """How far the redundancy of a checkpoint has come."""

    status: Literal["none", "durable", "redundant"]
    """`none`: nothing was asked for; `durable`: committed, parity not complete; `redundant`: all ranks have parity."""

    scheme: str
    """`k+m` of the parity, `none` without."""

    ranks_done: int
    """Ranks whose parity stands."""


class Images:
    """The images of a checkpoint, and the committed digests of their blocks: reads bytes and says which are good."""

    def __init__(self, path: Path, record: CommitRecord) -> None:
        self.path, self.record = path, record
        self.store = LocalStore(path)
        self.names = list(self.store.list())
        self.entries: dict[int, FileEntry] = {
            entry.rank: entry for entry in record.files if entry.kind == "image" and entry.rank is not None
        }
        self._digests: dict[int, Digested | None] = {}

    @property
    def longest_bytes(self) -> int:
        """Length of the longest image."""
        return max((entry.num_bytes for entry in self.entries.values()), default=0)

    @property
    def row_bytes(self) -> int:
        """The largest block: damage is judged, and segments are cut, in units of it."""
        blocks = [entry.block_bytes for entry in self.entries.values()]
        return max([CELL_BYTES, block_bytes_for(self.longest_bytes), *blocks])

    def digests(self, rank: int) -> Digested | None:
        """Return the digests of a rank's image; None where they are whole nowhere and the image is not, either."""
        if rank not in self._digests:
            found = digests_of(self.store, self.record, rank, self.names)
            if found is None:
                name = f"{rank_folder(rank)}/{DIGESTS_FILE}"
                derived = rebuild(self.store, self.record, name)
                found = None if derived is None else unpack_digests(derived, name)
            self._digests[rank] = found
        return self._digests[rank]

    def read(self, rank: int, start: int, out: NDArray[np.uint8]) -> list[int]:
        """Fill `out` with an image's bytes from `start` on, zeros behind its end; return the blocks that are not good.

        `start` and the length of `out` are multiples of the block size. A file that is missing or short has bad blocks.
        """
        entry = self.entries.get(rank)
        out[:] = 0
        if entry is None or start >= entry.num_bytes:
            return []
        stop = min(start + len(out), entry.num_bytes)
        read_at(self.path / entry.name, start, out[: stop - start])
        digested = self.digests(rank)
        if digested is None:
            return list(range(start // entry.block_bytes, -(-stop // entry.block_bytes)))
        return damaged_blocks(out[: stop - start].data, digested, start=start)


def read_at(path: Path, start: int, out: NDArray[np.uint8]) -> int:
    """Fill `out` with a file's bytes from `start` on; return how many there were, 0 where there is no file."""
    try:
        with open(path, "rb", buffering=0) as file:
            view, done = out.data, 0
            while done < len(out):
                count = os.preadv(file.fileno(), [view[done:]], start + done)
                if count == 0:
                    break
                done += count
            return done
    except FileNotFoundError:
        return 0


def record_of(path: Path) -> CommitRecord:
    """Return the commit record of a checkpoint, from wherever it is whole. Raises `FormatError` where it is nowhere."""
    record = commit_record(LocalStore(path))
    if record is None:
        raise FormatError(
            f"{path} is no checkpoint of headway's: no commit record is in it. Name a step's folder; "
            "`headway ckpt verify` checks foreign ones."
        )
    return record


def hosts_of(path: Path, record: CommitRecord) -> dict[int, str]:
    """Return rank -> failure domain (`host` or `rack/host`), as the manifests have it."""
    manifests = manifests_of(LocalStore(path), record)
    return {rank: manifests[rank].host if rank in manifests else "" for rank in range(record.world_size)}


def plan(images: Images, scheme: tuple[int, int]) -> tuple[Stripes, RS]:
    """Return the stripes and the code of a scheme (k, m) over the images of a checkpoint."""
    k, m = scheme
    rows = -(-images.longest_bytes // (k * images.row_bytes))
    around = circle(hosts_of(images.path, images.record))
    return Stripes(k, m, around, rows * images.row_bytes), RS(k, m, cell_bytes=CELL_BYTES)


def parities(path: Path) -> dict[str, dict[int, StoredParity]]:
    """Return scheme -> rank -> parity that has whole facts. Two schemes lie there while one replaces the other."""
    found: dict[str, dict[int, StoredParity]] = {}
    for folder in sorted(path.glob("rank-*")):
        for facts_path in [*sorted(folder.glob("parity*.json")), folder / COPIES / PARITY_FACTS]:
            try:
                facts = read_record(facts_path, ParityFacts)
            except (OSError, DamageError, FormatError):
                continue
            own = facts_path.with_suffix(".bin") if facts_path.parent == folder else folder / PARITY
            kept = StoredParity(facts, facts_path, own if own.exists() else folder / PARITY)
            found.setdefault(facts.scheme, {}).setdefault(facts.rank, kept)
    return found


def newest_parity(path: Path, record: CommitRecord) -> dict[int, StoredParity]:
    """Return the parity to build on, rank -> parity: of the scheme most ranks have, of two the one asked for first."""
    schemes = parities(path)
    asked = scheme_of(record.redundancy, record.world_size)
    first = f"{asked[0]}+{asked[1]}" if asked else ""
    return max(
        schemes.values(), key=lambda kept: (len(kept), next(iter(kept.values())).facts.scheme == first), default={}
    )


def state(path: str | Path) -> State:
    """Return how far the redundancy of a checkpoint has come."""
    record = commit_record(LocalStore(path))
    kept = {} if record is None else newest_parity(Path(path), record)
    if record is None or (record.redundancy == "none" and not kept):
        return State("none", "none", 0)
    scheme = next((entry.facts.scheme for entry in kept.values()), record.redundancy)
    return State("redundant" if len(kept) == record.world_size else "durable", scheme, len(kept))


@dataclass(frozen=True, slots=True)
class LostBytes:
    """Bytes that nothing gives back."""

    file: str
    """Path inside the checkpoint."""

    rank: int
    """Whose directory it lies in; 0 for what lies beside them."""

    tensor: str | None
    """The tensor or object that the bytes belong to; None where they belong to none, or its manifest is lost."""

    rows: tuple[int, int] | None
    """First and last row (index along dimension 0 of the whole tensor) that is touched; None for what has no rows."""

    offset_bytes: int
    """Where in the file."""

    num_bytes: int
    """How many; 0: all of a small file."""

    def __str__(self) -> str:
        rows = "" if self.rows is None else f" rows {self.rows[0]}..{self.rows[1]}"
        what = f" ({self.tensor}{rows})" if self.tensor else ""
        return f"{self.file} bytes {self.offset_bytes}..{self.offset_bytes + self.num_bytes}{what}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether damage can be undone."""

    status: Literal["repairable", "lost"]
    """`lost` when anything is missing for good."""

    missing: tuple[LostBytes, ...] = ()
    """What is lost, in the order of files."""

    def to_json(self) -> dict[str, object]:
        """Return status and missing entries by name."""
        return {"status": self.status, "missing": msgspec.to_builtins(self.missing)}


class Losses:
    """Damage of the images and of one scheme's parity, row by row of each stripe that it touches."""

    def __init__(
        self,
        images: Images,
        damage: Sequence[Damage],
        kept: dict[int, StoredParity],
        bad_parity: Callable[[StoredParity], list[int]],
    ) -> None:
        """Spread `damage` over the rows; `bad_parity` tells the damaged blocks of a rank's parity."""
        self.images, self.kept = images, kept
        self.damage = damage
        facts = next(iter(kept.values())).facts if kept else None
        self.stripes: Stripes | None = facts.stripes if facts else None
        self.code = facts.code if facts else None
        self.row_bytes = images.row_bytes
        self.bad_rows: dict[int, NDArray[np.bool_]] = {}
        """rank -> [rows of its image] Which are damaged."""
        for rank, entry in images.entries.items():
            spans = _spans([hurt for hurt in damage if hurt.file == entry.name], entry.num_bytes)
            if spans and images.digests(rank) is None:
                spans = [(0, entry.num_bytes)]  # nobody knows which of its blocks are good
            if spans:
                self.bad_rows[rank] = _marked(spans, self.row_bytes, -(-entry.num_bytes // self.row_bytes))
        self._bad_parity = bad_parity
        self._parity_rows: dict[int, NDArray[np.bool_]] = {}

    def image_rows(self, rank: int, segment: int) -> NDArray[np.bool_]:
        """Return [rows of a segment] which rows of a rank's image segment are damaged; rows behind its end are not."""
        assert self.stripes is not None
        rows = self.stripes.segment_bytes // self.row_bytes
        found = np.zeros(rows, np.bool_)
        part = self.bad_rows.get(rank, found[:0])[segment * rows : (segment + 1) * rows]
        found[: len(part)] = part
        return found

    def parity_rows(self, rank: int, slot: int) -> NDArray[np.bool_]:
        """Return [rows of a segment] which rows of a rank's parity segment are damaged, or were never made."""
        assert self.stripes is not None
        rows = self.stripes.segment_bytes // self.row_bytes
        if rank not in self.kept:
            return np.ones(rows, np.bool_)
        if rank not in self._parity_rows:
            size = self.kept[rank].digested.block_bytes
            spans = [(block * size, (block + 1) * size) for block in self._bad_parity(self.kept[rank])]
            self._parity_rows[rank] = _marked(spans, self.row_bytes, self.stripes.m * rows)
        return self._parity_rows[rank][slot * rows : (slot + 1) * rows]

    def gone(self, stripe: int) -> NDArray[np.bool_]:
        """Return [k + m, rows] which members of a stripe are gone in which row."""
        assert self.stripes is not None
        data = [self.image_rows(*place) for place in self.stripes.data(stripe)]
        return np.array([*data, *(self.parity_rows(*place) for place in self.stripes.parity(stripe))])

    def lost_rows(self) -> Iterator[tuple[int, int]]:
        """Yield (rank, row of its image) of all that no parity gives back."""
        if self.stripes is None:
            yield from ((rank, int(row)) for rank, rows in self.bad_rows.items() for row in np.flatnonzero(rows))
            return
        rows = self.stripes.segment_bytes // self.row_bytes
        for stripe in range(len(self.stripes.circle)):
            places = self.stripes.data(stripe)
            if not any(rank in self.bad_rows and self.image_rows(rank, part).any() for rank, part in places):
                continue
            gone = self.gone(stripe)
            hopeless = gone.sum(axis=0) > self.stripes.m
            for (rank, segment), lost in zip(places, gone, strict=False):
                yield from ((rank, segment * rows + int(row)) for row in np.flatnonzero(lost & hopeless))


def judged(losses: Losses) -> Judgement:
    """Return whether the damage can be undone, and what is lost where it cannot."""
    images = losses.images
    manifests = manifests_of(images.store, images.record, images.names)
    lost: dict[int, list[int]] = {}
    for rank, row in losses.lost_rows():
        lost.setdefault(rank, []).append(row)
    missing = [
        found
        for rank, rows in sorted(lost.items())
        for start, stop in _joined(sorted(rows), losses.row_bytes, images.entries[rank].num_bytes)
        for found in _named(images.entries[rank].name, rank, manifests.get(rank), start, stop)
    ]
    images_of = {entry.name for entry in images.entries.values()}
    small = {entry.name: entry for entry in images.record.files if entry.name not in images_of}
    for name in sorted({hurt.file for hurt in losses.damage} & set(small)):
        # Digests follow from an image once it is whole; everything else needs a copy, or what it follows from.
        if small[name].kind != "digests" and rebuild(images.store, images.record, name) is None:
            missing.append(LostBytes(name, small[name].rank or 0, None, None, 0, 0))
    return Judgement("lost" if missing else "repairable", tuple(missing))


def _spans(damage: Sequence[Damage], num_bytes: int) -> list[tuple[int, int]]:
    """Return the byte ranges of an image that are in doubt; behind its end nothing is."""
    spans = []
    for hurt in damage:
        # Where a file is gone, or only its root says that it differs, what lies between the records is gone too.
        start = 0 if hurt.what in ("missing", "root") else hurt.offset_bytes
        to_the_end = hurt.what in ("missing", "root", "truncated") or not hurt.num_bytes
        spans.append((start, num_bytes if to_the_end else min(start + hurt.num_bytes, num_bytes)))
    return [span for span in spans if span[0] < span[1]]


def _marked(spans: Sequence[tuple[int, int]], row_bytes: int, num_rows: int) -> NDArray[np.bool_]:
    """Return [num_rows] which rows the byte ranges touch."""
    rows = np.zeros(num_rows, np.bool_)
    for start, stop in spans:
        rows[start // row_bytes : -(-stop // row_bytes)] = True
    return rows


def _joined(rows: Sequence[int], row_bytes: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of runs of neighbouring rows, cut at the end of the file."""
    first = last = rows[0]
    for row in [*rows[1:], -1]:
        if row != last + 1:
            yield first * row_bytes, min((last + 1) * row_bytes, num_bytes)
            first = row
        last = row


def _named(name: str, rank: int, manifest: RankManifest | None, start: int, stop: int) -> Iterator[LostBytes]:
    """Yield an entry for each tensor and object in bytes [start, stop) of an image; one without a name if none is."""
    told = False
    for piece in manifest.pieces if manifest else ():
        if piece.record_offset < stop and start < piece.record_offset + piece.record_bytes:
            told = True
            yield LostBytes(name, rank, piece.fqn, rows_of(piece, start, stop), start, stop - start)
    for stored in manifest.objects if manifest else ():
        if stored.record_offset < stop and start < stored.record_offset + stored.record_bytes:
            told = True
            yield LostBytes(name, rank, stored.fqn, None, start, stop - start)
    if not told:
        yield LostBytes(name, rank, None, None, start, stop - start)


def rows_of(piece: Piece, start: int, stop: int) -> tuple[int, int] | None:
    """Return the first and last row of the whole tensor whose elements lie in bytes [start, stop) of the image."""
    start, stop = max(start, piece.payload_offset), min(stop, piece.payload_offset + piece.payload_bytes)
    if not piece.lengths or start >= stop:
        return None
    row_bytes = piece.payload_bytes // piece.lengths[0]
    first, last = (piece.offsets[0] + (at - piece.payload_offset) // row_bytes for at in (start, stop - 1))
    return first, last
