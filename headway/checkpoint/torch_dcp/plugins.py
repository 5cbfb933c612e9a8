"""Headway's files under torch's own `dcp.save` and `dcp.load`: for those who keep their calls.

    dcp.save(state, storage_writer=HeadwayWriter("ckpts/step-40"), planner=HeadwayPlanner())
    dcp.load(state, storage_reader=HeadwayReader("ckpts/step-40"))

What is written is a checkpoint like `headway.Checkpointer`'s: digests, a
commit by one rename, an older checkpoint of the same name whole until then;
what is read is verified block by block. `dcp.async_save` wants a process
group of its own beside (`headway.checkpoint.own_group()`);
`headway.checkpoint.async_save` has one. All of DCP's collectives remain; a
`Checkpointer` has none, and writes from another process.

>>> import tempfile, warnings
>>> import torch.distributed.checkpoint as dcp
>>> from headway.checkpoint import HeadwayPlanner
>>> warnings.simplefilter("ignore")
>>> place = tempfile.mkdtemp() + "/step-40"
>>> _ = dcp.save({"w": torch.ones(2)}, storage_writer=HeadwayWriter(place), planner=HeadwayPlanner())
>>> state = {"w": torch.zeros(2)}
>>> dcp.load(state, storage_reader=HeadwayReader(place))
>>> state["w"].tolist()
[1.0, 1.0]
"""

from __future__ import annotations

import io
import os
import re
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future as TorchFuture

from headway.checkpoint.layout.stored import StoredCheckpoint, open_stored
from headway.checkpoint.restores.restore import CheckpointReading, Verify, verify_whole
from headway.checkpoint.restores.restore_targets import unpack
from headway.checkpoint.saves.image import Part
from headway.checkpoint.saves.image_file import SerializedObject, write_image
from headway.checkpoint.state.shards import LocalShard, dtype_name
from headway.core.errors import InputError
from headway.storage.boxes import Box
from headway.storage.commit import commit, recover
from headway.storage.draft import Draft, abandon, finish_rank, open_draft
from headway.storage.manifest import COMMIT, METADATA, TWIN, Piece, RankManifest, StoredObject
from headway.storage.redundancy.erasure import scheme_of
from headway.storage.redundancy.parity import encode_rank

Place = str | os.PathLike[str]

RANKS_S = 60.0
"""How long the coordinator waits to see the files of ranks that have said that they wrote them."""

PARTS = re.compile(rf"{re.escape(METADATA)}|{re.escape(COMMIT)}({re.escape(TWIN)})?|rank-\d+|__\d+_\d+\.distcp")
"""What the folder of a checkpoint holds, ours or stock DCP's: a folder with anything else is not replaced."""


@dataclass(frozen=True, slots=True)
class _Seat:
    """What the coordinator tells a rank beside its plan."""

    attempt: str
    rank: int
    world_size: int


class HeadwayWriter(StorageWriter):
    """Writes what DCP plans as a checkpoint of headway's, committed by one rename. All ranks see the same folder."""

    def __init__(self, path: Place | None = None, *, redundancy: str = "none", overwrite: bool = True) -> None:
        """Write to the folder `path` (or the `checkpoint_id` of the call): `root/step-<n>`, or any other name.

        `redundancy` adds parity over the ranks' files after the commit ("none", "xor", "+m", "k+m"). With
        `overwrite` a checkpoint of that name changes places with the new one in one act; a folder that holds
        anything else is never replaced.
        """
        scheme_of(redundancy, 2)
        self._redundancy, self._overwrite = redundancy, overwrite
        self._draft: Draft | None = None
        self.checkpoint_id: Place | None = None
        """The folder of the checkpoint, as it was given."""
        self._folder: Path | None = None
        self.reset(path)

    def reset(self, checkpoint_id: Place | None = None) -> None:
        """Begin a save, to another folder where one is given."""
        self.abandon()
        if checkpoint_id is not None:
            if not self.validate_checkpoint_id(checkpoint_id):
                raise InputError(f"{checkpoint_id} is no folder. Save to one that all ranks share, then upload it.")
            # Absolute from here on: the script may change its working directory while a thread writes.
            self.checkpoint_id, self._folder = checkpoint_id, Path(os.path.abspath(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Place) -> bool:
        """Tell whether this can be the folder of a checkpoint."""
        return "://" not in os.fspath(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise `InputError` where there is no folder, or ranks would not plan together."""
        if self.checkpoint_id is None:
            raise InputError("there is no folder to save to. Pass HeadwayWriter a path, or the call a checkpoint_id.")
        if not kwargs.get("use_collectives", True):
            raise InputError(
                "use_collectives=False leaves every rank with metadata of its own, which no other layout can load. "
                "Leave it out; headway.Checkpointer saves without collectives."
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the rank's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans with a seat for each rank; look first whether the folder may be written."""
        target = self._target()
        check_target(target, overwrite=self._overwrite)
        if target.parent.is_dir():
            recover(target.parent)
        attempt = f"dcp-{uuid.uuid4().hex[:16]}"
        self._draft = draft_at(target, attempt)
        seats = [_Seat(attempt, rank, len(plans)) for rank in range(len(plans))]
        return [replace(plan, storage_data=seat) for plan, seat in zip(plans, seats, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write this rank's image, digests and manifest; the future is done on return."""
        seat = plan.storage_data
        if getattr(planner, "_enable_plan_caching", False) or not isinstance(seat, _Seat):
            raise InputError(
                "the plan comes from a cache, which compares no types and tells nothing of this save. Plan with "
                "HeadwayPlanner(), or without enable_plan_caching."
            )
        target = self._target()
        draft = draft_at(target, seat.attempt)
        open_draft(draft.root, draft.step, draft.attempt, rank=seat.rank)
        results = _write(draft, seat, plan, planner)
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: check the whole, write `.metadata`, make the checkpoint visible; then add parity."""
        assert self._draft is not None, "the coordinator has planned this save"
        metadata.storage_data = {result.index: result.storage_data for each in results for result in each}
        metadata.storage_meta = self.storage_meta()
        try:
            commit(
                self._draft, world_size=len(results), redundancy=self._redundancy, replace=self._overwrite,
                deadline_s=RANKS_S,
            )  # fmt: skip
        except BaseException:
            self.abandon()
            raise
        target, self._draft = self._draft.target, None
        for rank in range(len(results)) if self._redundancy != "none" else ():
            encode_rank(target, rank)

    def abandon(self) -> None:
        """Remove what a save that failed has left; only the coordinator knows of it."""
        if self._draft is not None:
            abandon(self._draft)
            self._draft = None

    def _target(self) -> Path:
        assert self._folder is not None, "set_up_storage_writer looks for it"
        return self._folder


def check_target(target: Path, *, overwrite: bool = True) -> None:
    """Raise `InputError` unless a checkpoint may come to stand at `target`."""
    if not target.exists():
        return
    if not target.is_dir():
        raise InputError(f"{target} is a file. Name a folder that does not exist yet, or a checkpoint.")
    names = sorted(os.listdir(target))
    other = [name for name in names if not PARTS.fullmatch(name)]
    if other:
        raise InputError(
            f"{target} holds {other[0]!r}, which is no part of a checkpoint and would be lost. Save to a folder of "
            "its own."
        )
    if names and not overwrite:
        raise InputError(f"{target} is a checkpoint already. Save to another folder, or pass overwrite=True.")


def draft_at(target: Path, attempt: str) -> Draft:
    """Return the draft of a checkpoint beside which it is written; a name without a number counts as step 0."""
    number = re.search(r"(\d+)$", target.name)
    return Draft(target.parent, int(number[1]) if number else 0, attempt, target.name)


def _write(draft: Draft, seat: _Seat, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
    """Write one rank's part of a draft; return DCP's account of it."""
    tensors = [item for item in plan.items if item.tensor_data is not None]
    others = [item for item in plan.items if item.tensor_data is None]
    values = [SerializedObject(item.index.fqn, _bytes(planner.resolve_data(item))) for item in others]
    written = write_image(
        draft, seat.rank, [_part(item) for item in tensors], lambda index: _elements(planner, tensors[index]), values
    )
    paths = plan.planner_data if isinstance(plan.planner_data, dict) else {}
    names = {item.index.fqn for item in plan.items}
    finish_rank(
        draft,
        RankManifest(
            draft.step, draft.attempt, seat.rank, seat.world_size, written.entry if written else None,
            written.pieces if written else (), written.objects if written else (),
            paths={fqn: tuple(path) for fqn, path in paths.items() if fqn in names}, host=socket.gethostname(),
        ),
        written.digested if written else None,
    )  # fmt: skip
    if written is None:
        return []
    records: list[tuple[WriteItem, Piece | StoredObject]] = [
        *zip(tensors, written.pieces, strict=True),
        *zip(others, written.objects, strict=True),
    ]
    return [
        WriteResult(item.index, at.record_bytes, _StorageInfo(at.file, at.record_offset, at.record_bytes))
        for item, at in records
    ]


def _part(item: WriteItem) -> Part:
    assert item.tensor_data is not None, "a tensor's item says of what"
    data = item.tensor_data
    chunk = data.chunk
    return Part(item.index.fqn, data.properties.dtype, tuple(data.size), tuple(chunk.offsets), tuple(chunk.sizes))


def _elements(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    """Return the elements of an item. Raises `InputError` for what has none in a row."""
    found = planner.resolve_data(item)
    if not isinstance(found, torch.Tensor) or found.layout != torch.strided or found.is_quantized:
        kind = getattr(found, "layout", type(found).__name__)
        raise InputError(
            f"'{item.index.fqn}' ({kind}) has no plain elements. Plan with HeadwayPlanner(), which stores such tensors "
            "as objects."
        )
    return found


def _bytes(data: Any) -> Any:
    return data.getbuffer() if isinstance(data, io.BytesIO) else data


class HeadwayReader(StorageReader):
    """Reads checkpoints of headway's and of stock DCP; what has digests is verified before a tensor sees it."""

    def __init__(self, path: Place | None = None, *, verify: Verify = "read") -> None:
        """Read from the folder `path`, or the `checkpoint_id` of the call; `verify` as `restore_into` has it."""
        self._verify = verify
        self._stored: StoredCheckpoint | None = None
        self.checkpoint_id: Place | None = None
        """The folder of the checkpoint."""
        self.reset(path)

    def reset(self, checkpoint_id: Place | None = None) -> None:
        """Begin a load, from another folder where one is given."""
        self.close()
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Place) -> bool:
        """Tell whether this can be the folder of a checkpoint."""
        return "://" not in os.fspath(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what there is, by way of a restricted unpickler: nothing that the file names is called.

        Raises `FormatError` for what is no checkpoint, `DamageError` for a damaged one.
        """
        stored = self._opened()
        facts: dict[str, Any] = {fqn: BytesStorageMetadata() for fqn in stored.objects}
        for fqn, (shape, dtype) in stored.tensors.items():
            boxes = {(piece.offsets, piece.lengths) for piece in stored.pieces(fqn)}
            chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in sorted(boxes)]
            properties = TensorProperties(dtype=getattr(torch, dtype))
            facts[fqn] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
        return Metadata(facts, planner_data=stored.paths or None)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Look that the checkpoint is open; with verify="full" compare all of it first."""
        stored = self._opened()
        if self._verify == "full" and is_coordinator:
            verify_whole(stored)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        """Fill what the plan wants; the future is done on return.

        Raises `DamageError` naming file, byte and tensor when stored bytes differ from what was written, `InputError`
        when tensors that are tied here were saved with unlike values.
        """
        stored = self._opened()
        reading = CheckpointReading(stored, self._verify, None)
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        targets = [planner.resolve_tensor(item).detach() for item in tensors]
        shards = [_shard(stored, item, target) for item, target in zip(tensors, targets, strict=True)]
        _check_ties(reading, tensors, targets, shards)
        reading.read([shard for shard in shards if shard.box.num_elements], None)
        for item, target, shard in zip(tensors, targets, shards, strict=True):
            if shard.tensor is not target:  # stored in another type than it is wanted
                target.copy_(shard.tensor)
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(reading.record(_whose(stored, item))))
        self.close()
        done: TorchFuture[None] = TorchFuture()
        done.set_result(None)
        return done

    def close(self) -> None:
        """Close the files of the checkpoint."""
        if self._stored is not None:
            self._stored.close()
            self._stored = None

    def _opened(self) -> StoredCheckpoint:
        if self.checkpoint_id is None:
            raise InputError("there is no folder to load. Pass HeadwayReader a path, or the call a checkpoint_id.")
        if self._stored is None:
            self._stored = open_stored(Path(self.checkpoint_id), unpack=unpack)
        return self._stored


def _shard(stored: StoredCheckpoint, item: ReadItem, target: torch.Tensor) -> LocalShard:
    """Return what an item wants of a tensor, in memory of the stored type."""
    fqn, start = item.storage_index.fqn, item.storage_index.offset
    shape, dtype = stored.tensors[fqn]
    offsets = tuple(a + b for a, b in zip(start or (0,) * len(shape), item.storage_offsets, strict=True))
    if dtype_name(target.dtype) != dtype:
        target = torch.empty(target.shape, dtype=getattr(torch, dtype), device=target.device)
    return LocalShard(fqn, shape, Box(offsets, tuple(item.lengths)), target, ())


def _check_ties(
    reading: CheckpointReading, items: Sequence[ReadItem], targets: Sequence[torch.Tensor], shards: Sequence[LocalShard]
) -> None:
    """Raise `InputError` unless all that goes to one memory is stored with the same elements."""
    tied: dict[tuple[Any, ...], dict[str, list[LocalShard]]] = {}
    for item, target, shard in zip(items, targets, shards, strict=True):
        if shard.box.num_elements:
            # Where the tensor begins of which this is a part: names of one tensor may be stored in unlike parts.
            skip = sum(at * stride for at, stride in zip(item.dest_offsets, target.stride(), strict=True))
            start = target.data_ptr() - skip * target.element_size()
            place = target.device, start, target.dtype, target.stride(), shard.shape
            tied.setdefault(place, {}).setdefault(shard.fqn, []).append(shard)
    for (first, parts), *others in (group.items() for group in tied.values()):
        for fqn, _ in others:
            if not reading.is_alike(parts, fqn):
                raise InputError(
                    f"'{first}' and '{fqn}' are tied here, but the checkpoint holds unlike values. Build the model as "
                    "it was saved, untied, or leave one of them out of the state."
                )


def _whose(stored: StoredCheckpoint, item: ReadItem) -> StoredObject:
    """Return the stored object that this rank takes: its own where each has one, else the lowest rank's."""
    entries = stored.objects[item.storage_index.fqn]
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return entries.get(rank) or next(iter(entries.values()))
