"""Checkpoints made for tests, through the same draft and commit that the engine uses; records come from torch.save."""

import io
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from headway.checkpoint.layout.fetch import Room, Source, too_short
from headway.core.errors import DamageError
from headway.storage.commit import commit
from headway.storage.digests import digest_of
from headway.storage.draft import Draft, finish_rank, open_draft
from headway.storage.formats.records import read_saved
from headway.storage.manifest import Piece, RankManifest, StoredObject, entry_of, image_name
from headway.storage.stores import write_durably

ALIGN = 4096

Part = tuple[str, torch.Tensor, Sequence[int], Sequence[int]]
"""Name, the local box, the whole tensor's shape, and where the box begins."""


def flip(path: Path, at: int, bits: int = 1) -> None:
    """Flip bits of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= bits
    path.write_bytes(data)


def record_of(value: object) -> bytes:
    """Return what torch.save writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def image_of(rank: int, parts: Sequence[Part], objects: Mapping[str, object] = {}) -> tuple[bytes, list, list]:
    """Return a rank's image with its pieces and objects; every record starts at a multiple of 4 KiB."""
    image, pieces, stored, name = bytearray(), [], [], image_name(rank)
    for fqn, tensor, shape, offsets in parts:
        image += bytes(-len(image) % ALIGN)
        record = record_of(tensor)
        saved = read_saved(record, fqn)
        start, size = saved.place_of(saved.tensors[0])
        pieces.append(
            Piece(
                fqn, str(tensor.dtype).removeprefix("torch."), tuple(shape), tuple(offsets), tuple(tensor.shape), name,
                len(image), len(record), len(image) + start, size, zlib.crc32(record[start : start + size]),
            )
        )  # fmt: skip
        image += record
    for fqn, value in objects.items():
        image += bytes(-len(image) % ALIGN)
        record = record_of(value)
        stored.append(StoredObject(fqn, rank, name, len(image), len(record), zlib.crc32(record)))
        image += record
    return bytes(image), pieces, stored


def write_rank(
    draft: Draft, rank: int, world_size: int, parts: Sequence[Part], objects: Mapping[str, object] = {}, **more: object
) -> RankManifest:
    """Write one rank's part of a draft; return its manifest."""
    image, pieces, stored = image_of(rank, parts, objects)
    entry = written = None
    if image:
        write_durably(draft.path / image_name(rank), [image])
        written = digest_of(image)
        entry = entry_of(image_name(rank), written, rank=rank, kind="image")
    paths = {fqn: tuple(fqn.split(".")) for fqn in [*(part[0] for part in parts), *objects]}
    manifest = RankManifest(
        draft.step, draft.attempt, rank, world_size, entry, tuple(pieces), tuple(stored), paths=paths, **more
    )
    finish_rank(draft, manifest, written)
    return manifest


def rows_of(state: Mapping[str, torch.Tensor], world_size: int) -> list[list[Part]]:
    """Split every tensor by rows over the ranks; a 0-dim one goes to rank 0."""
    found: list[list[Part]] = [[] for _ in range(world_size)]
    for fqn, tensor in state.items():
        if not tensor.dim():
            found[0].append((fqn, tensor, (), ()))
            continue
        at = 0
        for rank, rows in enumerate(tensor.tensor_split(world_size)):
            if len(rows) or (not len(tensor) and rank == 0):
                found[rank].append((fqn, rows.clone(), tensor.shape, (at, *[0] * (tensor.dim() - 1))))
            at += len(rows)
    return found


def unsynced():
    """Leave out fsync, for tests that are not about durability: a busy disk takes seconds for it."""
    return mock.patch.object(os, "fsync")


def write_checkpoint(
    root: Path,
    step: int,
    state: Mapping[str, torch.Tensor],
    *,
    world_size: int = 2,
    objects: Mapping[str, object] = {},
    attempt: str = "a",
    sync: bool = False,
    **options: object,
) -> Path:
    """Commit `state`, split by rows over `world_size` ranks; return the checkpoint's folder."""
    with nullcontext() if sync else unsynced():
        for rank, parts in enumerate(rows_of(state, world_size)):
            draft = open_draft(root, step, attempt, rank=rank)
            write_rank(draft, rank, world_size, parts, objects)
        commit(draft, world_size=world_size, deadline_s=5.0, **options)
    return draft.target


def some_state(seed: int = 0, rows: int = 40) -> dict[str, torch.Tensor]:
    """Return a small state with the kinds of tensors that models have."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "model.weight": torch.randn(rows, 33, generator=draw),
        "model.bias": torch.randn(rows, generator=draw).bfloat16(),
        "opt.step": torch.tensor(7.0),
        "model.mask": torch.rand(rows, 3, generator=draw) > 0.5,
        "model.empty": torch.zeros(0, 4),
    }


class Caller:
    """What an attacker puts into a pickle: who loads it runs a shell."""

    def __init__(self, command: str = "exit 1") -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """Return the call that loading makes."""
        return os.system, (self.command,)


@dataclass(slots=True)
class MemoryFiles:
    """Files whose bytes are at hand: name -> anything with a buffer."""

    files: Mapping[str, Any]
    """Path inside the checkpoint -> bytes, or a mapping of shared memory."""

    source: Source = "memory"

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        """Return bytes of a file."""
        if name not in self.files:
            raise FileNotFoundError(name)
        return memoryview(self.files[name]).cast("B")[start:stop]

    def span(self, name: str, start: int, stop: int, room: Room) -> memoryview:
        """Return a view of a file."""
        if name not in self.files:
            raise DamageError(f"{name} is not in memory. Restore from the stored copy.")
        found = memoryview(self.files[name]).cast("B")[start:stop]
        if len(found) < stop - start:
            raise too_short(f"{name} in memory", start + len(found), stop)
        return found
