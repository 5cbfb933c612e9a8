"""Parity across the ranks of a committed checkpoint: made after the commit, by the agents that wrote it.

A checkpoint is `durable` once it is committed, and `redundant` once every
rank's agent has called `encode_rank`. From then on any m rank directories may
be lost, with all that is in them (with rank 0's, also what lies beside them),
or any m blocks of each row of a stripe. `judge` says whether given damage is
within that, and names what is lost where it is not; `repair` undoes it. Files
of the commit are never written here.

>>> judge("nowhere", []).status
'lost'
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DamageError, FormatError
from headway.core.files.private import check_links
from headway.core.units import MIB
from headway.core.wire.pace import RateLimiter
from headway.storage.commit import commit_record, read_guarded
from headway.storage.digests import Digested, Digester, damaged_blocks, pack_digests
from headway.storage.manifest import (
    COMMIT,
    COPIES,
    DIGESTS_FILE,
    MANIFEST,
    METADATA,
    PARITY,
    PARITY_FACTS,
    CommitRecord,
    Damage,
    encode,
    rank_folder,
    read_record,
)
from headway.storage.redundancy.erasure import RS, Stripes, scheme_of
from headway.storage.redundancy.parity_files import (
    Images,
    Judgement,
    Losses,
    LostBytes,
    ParityFacts,
    State,
    StoredParity,
    hosts_of,
    judged,
    newest_parity,
    parities,
    plan,
    record_of,
    state,
)
from headway.storage.stores import LocalStore, durable_file, make_folder, write_durably

__all__ = [
    "Judgement",
    "LostBytes",
    "ParityFacts",
    "State",
    "assess",
    "check",
    "encode_rank",
    "judge",
    "state",
    "warnings",
]

QUIET_S = 60.0
"""A draft that nobody has written to for so long has no writer."""

STRIDE_BYTES = MIB
"""Bytes of each member that are coded at a time: a multiple of every block size; k + m of them stay near the core."""


def encode_rank(checkpoint: str | Path, rank: int, *, pace: RateLimiter | None = None) -> ParityFacts | None:
    """Write the parity and the copies that `rank` keeps; return what parity.json says, None without redundancy.

    Reads m segments' stripes from the other ranks' images, every block of
    them verified, at the rate of `pace`. The files appear whole and durable,
    parity.json last; calling it again writes them anew. Where ranks have
    parity already, theirs decides the scheme and the stripes.

    Raises `DamageError` when an image is damaged: parity is never made of bytes that are not what was saved;
    `InputError` when a link leads from the rank's folder out of the checkpoint.
    """
    path = Path(checkpoint)
    record = record_of(path)
    scheme = scheme_of(record.redundancy, record.world_size)
    images = Images(path, record)
    kept = next(iter(newest_parity(path, record).values()), None)
    if kept is None and scheme is None:
        return None
    stripes, code = (kept.facts.stripes, kept.facts.code) if kept else plan(images, scheme or (1, 1))
    check_links(path, [rank_folder(rank)])
    make_folder(path / rank_folder(rank))
    sweep(path / rank_folder(rank))
    write_copies(images, stripes, rank)
    digester = Digester(images.row_bytes)
    with durable_file(path / rank_folder(rank) / PARITY) as file:
        for slot in range(stripes.m):
            for data in data_of(images, stripes, stripes.stripe_of_parity(rank, slot), pace=pace):
                made = code.rebuild(dict(enumerate(data)), [stripes.k + slot])[0]
                file.write(made.data)
                digester.update(made.data)
    facts = facts_of(record, stripes, code, rank, digester.finish())
    write_facts(images, facts)
    return facts


def sweep(folder: Path) -> None:
    """Remove what a killed writer of parity left in a rank directory; one that lives wrote to its draft just now."""
    for draft in folder.glob(".parity*.draft"):
        with suppress(FileNotFoundError):
            if time.time() - draft.stat().st_mtime > QUIET_S:
                draft.unlink()


def facts_of(record: CommitRecord, stripes: Stripes, code: RS, rank: int, written: Digested) -> ParityFacts:
    """Return what the `parity.json` of a rank says of the parity that was `written`."""
    return ParityFacts(
        step=record.step, attempt=record.attempt, rank=rank, k=stripes.k, m=stripes.m, w=code.w,
        matrix=tuple(tuple(row) for row in code.matrix.tolist()), circle=stripes.circle,
        segment_bytes=stripes.segment_bytes, digests=pack_digests(written),
    )  # fmt: skip


def data_of(
    images: Images, stripes: Stripes, stripe: int, *, stride_bytes: int = STRIDE_BYTES, pace: RateLimiter | None = None
) -> Iterator[list[NDArray[np.uint8]]]:
    """Yield the k data of a stripe, `stride_bytes` of each at a time, verified; the arrays are filled anew."""
    rows = np.empty((stripes.k, min(stride_bytes, stripes.segment_bytes)), np.uint8)
    for first in range(0, stripes.segment_bytes, stride_bytes):
        size = min(stride_bytes, stripes.segment_bytes - first)
        for (rank, segment), row in zip(stripes.data(stripe), rows, strict=True):
            if pace is not None:
                pace.wait(size)
            bad = images.read(rank, segment * stripes.segment_bytes + first, row[:size])
            if bad:
                raise DamageError(
                    f"block {bad[0]} of {images.entries[rank].name} is damaged; no parity is made of it. "
                    "Run: headway ckpt repair"
                )
        yield [row[:size] for row in rows]


def copies_kept(stripes: Stripes, rank: int) -> list[str]:
    """Return the small files of the checkpoint that `rank` keeps a copy of.

    The record of the commit; of the m + 1 ranks before it manifests and digests, and after rank 0, whose agent wrote
    it, DCP's metadata. One more than m: after one loss too many these still say what is missing.
    """
    names = [COMMIT]
    for other in sorted(stripes.circle):
        if rank in stripes.guardians(other, stripes.m + 1):
            names += [f"{rank_folder(other)}/{name}" for name in (MANIFEST, DIGESTS_FILE)]
            names += [METADATA] if other == 0 else []
    return names


def write_copies(images: Images, stripes: Stripes, rank: int) -> None:
    """Copy what `copies_kept` lists, each from a place where it is whole; copies that are right stay."""
    folder = images.path / rank_folder(rank) / COPIES
    committed = {entry.name for entry in images.record.files}
    for name in copies_kept(stripes, rank):
        if name == COMMIT:
            data: bytes | None = encode(images.record)
        elif name in committed:
            data = read_guarded(images.store, images.record, name, images.names)
        else:
            continue  # a rank without an image has no digests
        if data is None:
            raise DamageError(f"{name} of {images.path} is damaged, and no copy is whole. Run: headway ckpt repair")
        _write_other(folder / name, data)


def write_facts(images: Images, facts: ParityFacts) -> None:
    """Write a rank's parity.json, its copy first; one that is right stays."""
    for place in (COPIES, ""):
        _write_other(images.path / rank_folder(facts.rank) / place / PARITY_FACTS, encode(facts))


def _write_other(path: Path, data: bytes) -> None:
    """Write a file, durably, unless it holds these bytes."""
    try:
        if path.read_bytes() == data:
            return
    except FileNotFoundError:
        make_folder(path.parent)
    write_durably(path, [data])


def check(checkpoint: str | Path) -> list[Damage]:
    """Return what is damaged of all that was written after the commit: parity, its facts, the copies.

    A rank that has no facts of its parity at all has not made it yet: that is no damage, see `state`.
    """
    path = Path(checkpoint)
    record = commit_record(LocalStore(path))
    if record is None:
        return []
    images = Images(path, record)
    found: list[Damage] = []
    for kept in (kept for ranks in parities(path).values() for kept in ranks.values()):
        name = str(kept.path.relative_to(path))
        found += [_block(name, block, kept) for block in bad_parity(kept)]
        found += _check_copies(images, kept)
    for facts_path in sorted(path.glob("rank-*/parity*.json")):
        try:
            read_record(facts_path, ParityFacts)
        except (DamageError, FormatError):
            found.append(Damage(str(facts_path.relative_to(path)), None, 0, "checksum"))
    return found


def _block(name: str, block: int, kept: StoredParity) -> Damage:
    size = kept.digested.block_bytes
    return Damage(name, None, block * size, "block" if kept.path.exists() else "missing", size)


def _check_copies(images: Images, kept: StoredParity) -> Iterable[Damage]:
    """Yield the copies that a rank ought to keep and does not, or not whole."""
    folder = f"{rank_folder(kept.facts.rank)}/{COPIES}"
    wanted = {entry.name: entry for entry in images.record.files}
    for name in copies_kept(kept.facts.stripes, kept.facts.rank):
        whole = (
            encode(images.record) if name == COMMIT else read_guarded(images.store, images.record, name, images.names)
        )
        if whole is None or (name != COMMIT and name not in wanted):
            continue  # nowhere whole: the original is what is damaged; or a rank without an image
        yield from _differing(images.path, f"{folder}/{name}", whole)
    for place in (f"{folder}/{PARITY_FACTS}", f"{rank_folder(kept.facts.rank)}/{PARITY_FACTS}"):
        if kept.path.name == PARITY and kept.facts_path.name == PARITY_FACTS:
            yield from _differing(images.path, place, encode(kept.facts))


def _differing(path: Path, name: str, whole: bytes) -> Iterable[Damage]:
    try:
        if (path / name).read_bytes() != whole:
            yield Damage(name, None, 0, "checksum")
    except FileNotFoundError:
        yield Damage(name, None, 0, "missing")


def bad_parity(kept: StoredParity) -> list[int]:
    """Return the blocks of a rank's parity that are not as they were written; all of them where the file is gone."""
    digested = kept.digested
    try:
        with open(kept.path, "rb") as file:
            found: list[int] = []
            for start in range(0, digested.num_bytes, STRIDE_BYTES):
                part = file.read(min(STRIDE_BYTES, digested.num_bytes - start))
                part += bytes(min(STRIDE_BYTES, digested.num_bytes - start) - len(part))
                found += damaged_blocks(part, digested, start=start)
            return found
    except FileNotFoundError:
        return list(range(digested.digests.size))


def judge(checkpoint: str | Path, damage: Iterable[Damage]) -> Judgement:
    """Say whether damage to files of the commit can be undone from parity and copies, and name what cannot.

    The parity itself is read where the damage needs it.
    """
    path = Path(checkpoint)
    record = commit_record(LocalStore(path))
    if record is None:
        return Judgement("lost", (LostBytes(COMMIT, 0, None, None, 0, 0),))
    return best(Images(path, record), list(damage))[1]


def best(images: Images, damage: list[Damage]) -> tuple[Losses, Judgement]:
    """Return what damage means under the scheme that saves most (two lie there while one replaces the other)."""
    schemes = parities(images.path) or {"": {}}
    found = [
        (losses, judged(losses)) for losses in (Losses(images, damage, kept, bad_parity) for kept in schemes.values())
    ]
    return min(found, key=lambda one: sum(lost.num_bytes or 1 for lost in one[1].missing))


def assess(checkpoint: str | Path, damage: Iterable[Damage]) -> str:
    """Return `repairable` or `lost`, as `judge` says."""
    return judge(checkpoint, damage).status


def warnings(checkpoint: str | Path) -> list[str]:
    """Return where the parity protects from less than m losses: too few ranks, hosts or racks to place it apart."""
    path = Path(checkpoint)
    record = record_of(path)
    images = Images(path, record)
    kept = next(iter(newest_parity(path, record).values()), None)
    scheme = scheme_of(record.redundancy, record.world_size)
    if kept is None and scheme is None:
        return []
    stripes = kept.facts.stripes if kept else plan(images, scheme or (1, 1))[0]
    hosts = hosts_of(path, record)
    levels = {"rank directories": {rank: str(rank) for rank in hosts}}
    if all(hosts.values()):
        levels["hosts"] = hosts
    if all("/" in host for host in hosts.values()):
        levels["racks"] = {rank: host.split("/")[0] for rank, host in hosts.items()}
    told = []
    for name, domains in levels.items():
        count, tolerated = len({*domains.values()}), stripes.tolerated(domains)
        if count == 1 and name != "rank directories":
            told.append(f"all ranks are on one of the {name}: should it be lost, parity is lost with it.")
        elif tolerated < stripes.m:
            told.append(
                f"{stripes.k}+{stripes.m} over {count} {name}: {tolerated} of them may be lost, not {stripes.m}. "
                f"Spread the ranks over at least {stripes.k + stripes.m} {name}, or choose a smaller k."
            )
    return told
