"""What redundancy leaves in a checkpoint: parity of each rank, its facts, and the images it protects.

    rank-<r>/parity.bin      m segments of parity over segments of k images each: see `stripes`
    rank-<r>/parity.json     the stripes, the code's matrix, digests of parity.bin; written last
    rank-<r>/copies/         small files of the ranks before it, of the whole checkpoint, and of its own parity.json

While `restripe` changes the scheme, parity of two schemes lies side by side:
the new one in `parity-<k>+<m>.bin` and `.json`. A parity is known by what its
facts say, not by its name.

>>> state(Path("nowhere")).status
'none'
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DamageError, FormatError
from headway.storage.commits.commit import commit_record, digests_of, manifests_of, rebuild
from headway.storage.redundancy.erasure import CELL_BYTES, RS
from headway.storage.redundancy.stripes import Stripes, circle, scheme_of
from headway.storage.stored.digests import Digested, block_bytes_for, damaged_blocks, unpack_digests
from headway.storage.stored.manifest import (
    COPIES,
    DIGESTS_FILE,
    PARITY,
    PARITY_FACTS,
    CommitRecord,
    FileEntry,
    rank_folder,
    read_record,
)
from headway.storage.stored.store import LocalStore

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
