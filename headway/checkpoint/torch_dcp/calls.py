"""`dcp.save`, `async_save` and `load` with headway's parts and a process group of their own.

    import headway.checkpoint as dcp                  # the calls stay as they are

    future = dcp.async_save(state, checkpoint_id="ckpts/step-40")
    dcp.load(state, checkpoint_id="ckpts/step-40")

`async_save` copies into memory of its own, and its thread talks over a gloo
group of its own: over the caller's its collectives would meet those of the
training thread in unlike orders, and the job would hang. The thread is a
plain one: nothing is imported anew. Errors of ours come as they are.

>>> import tempfile, torch, warnings
>>> warnings.simplefilter("ignore")
>>> place = tempfile.mkdtemp() + "/step-40"
>>> _ = async_save({"w": torch.ones(2)}, checkpoint_id=place).result()
>>> state = {"w": torch.zeros(2)}
>>> load(state, checkpoint_id=place)
>>> state["w"].tolist()
[1.0, 1.0]

Who writes what, for those who keep `dcp.save`: replicated tensors in even shares of rows, nothing is cached.

    dcp.save(state, storage_writer=HeadwayWriter(path), planner=HeadwayPlanner())

DCP's own planner gives each replicated tensor whole to one rank, so that a
rank may write several times the mean; and its cache of plans compares names
and shapes, but no types. This one cuts as `headway.checkpoint.layout.reads`
does, with the ranks' plans at hand, and plans every save anew. Plain tensors
are cut only where all their holders tell the same digest: where they differ,
the lowest rank's is stored whole, as it is of objects.

>>> planner = HeadwayPlanner()
>>> planner.set_up_planner({"w": torch.ones(2, 2)}, is_coordinator=True)
>>> plans, metadata = planner.create_global_plan([planner.create_local_plan()])
>>> metadata.state_dict_metadata["w"].size, planner.resolve_data(planner.finish_plan(plans[0]).items[0]).tolist()
(torch.Size([2, 2]), [[1.0, 1.0], [1.0, 1.0]])
"""

from __future__ import annotations

import io
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful

from headway.checkpoint.layout.reads import ReplicatedTensor, shares
from headway.checkpoint.restores.restore import Verify
from headway.checkpoint.saves.image import pickled
from headway.checkpoint.saves.image_file import host_bytes
from headway.checkpoint.state.shards import LocalShard, LocalState, local_shards
from headway.checkpoint.torch_dcp.plugins import HeadwayReader, HeadwayWriter, Place
from headway.checkpoint.torch_dcp.stager import HeadwayStager, Save
from headway.core.errors import FormatError, HeadwayError, InputError
from headway.runtime.in_rank import state_account
from headway.runtime.lane import separate_group
from headway.storage.boxes import Box
from headway.storage.digests import checksum

Paths = dict[str, tuple[str | int, ...]]
"""Name -> keys in the nested state dict."""


@dataclass(frozen=True, slots=True)
class RankMetadata:
    """What a rank tells the coordinator beside its items."""

    paths: Paths
    digests: dict[str, str] = field(default_factory=dict)
    """Plain tensor that other ranks may hold too -> digest of its elements."""


class _SharedBox(NamedTuple):
    """A box of a tensor that some ranks hold alike; boxes of one place and length are one part."""

    fqn: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


class HeadwayPlanner(SavePlanner):
    """Plans a `dcp.save`. One may serve any number of saves, one after the other."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._state = LocalState()
        self._held: dict[str, list[LocalShard]] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state that is saved. Raises `InputError` for what cannot be stored."""
        joined = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        self._state = local_shards(state_dict, rank=rank, world_size=world_size)
        self._held = {}
        for shard in self._state.shards:
            self._held.setdefault(shard.fqn, []).append(shard)

    def create_local_plan(self) -> SavePlan:
        """Return all that this rank holds."""
        items = [_item(shard.fqn, shard.shape, shard.box, shard.tensor) for shard in self._state.shards]
        items += [WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO) for fqn in self._state.objects]
        digests = {fqn: checksum(host_bytes(tensor)) for fqn, tensor in self._state.replicas.items()}
        return SavePlan(items, planner_data=RankMetadata(self._state.paths, digests))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return what each rank writes, and what there is altogether; the coordinator is asked."""
        mine: list[list[WriteItem]] = [[] for _ in all_plans]
        groups: dict[tuple[int, ...], dict[_SharedBox, WriteItem]] = {}
        for part, (item, holders) in _holders(all_plans).items():
            if item.type == WriteItemType.BYTE_IO:
                mine[holders[0]].append(item)
            else:
                groups.setdefault(holders, {})[part] = item
        for holders, items in groups.items():
            for rank, share in zip(holders, _shares(items, len(holders)), strict=True):
                mine[rank] += share
        plans = [replace(plan, items=items) for plan, items in zip(all_plans, mine, strict=True)]
        plans, metadata = create_default_global_save_plan(plans)
        paths: Paths = {}
        for plan in reversed(all_plans):
            paths |= plan.planner_data.paths
        metadata.planner_data = paths
        return [replace(plan, planner_data=plan.planner_data.paths) for plan in plans], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan as the coordinator made it."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the elements of an item, a view of the state, or an object as torch.save stores it."""
        fqn = write_item.index.fqn
        if write_item.tensor_data is None:
            return io.BytesIO(pickled(self._state.objects[fqn]))
        chunk = write_item.tensor_data.chunk
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        for shard in self._held[fqn]:
            if all(a <= b and c <= d for a, b, c, d in zip(
                shard.box.offsets, box.offsets, box.stops, shard.box.stops, strict=True
            )):  # fmt: skip
                return shard.tensor[box.within(shard.box)]
        raise InputError(f"this rank holds no {box} of '{fqn}'. Call dcp.save on all ranks with the same state.")


def _item(fqn: str, shape: tuple[int, ...], box: Box, tensor: torch.Tensor) -> WriteItem:
    """Return the item of one box."""
    offsets = torch.Size(box.offsets)
    chunk = ChunkStorageMetadata(offsets, torch.Size(box.lengths))
    facts = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), torch.Size(shape))
    return WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=facts)


def _holders(plans: list[SavePlan]) -> dict[_SharedBox, tuple[WriteItem, tuple[int, ...]]]:
    """Return part -> an item of it, and the ranks that hold it, ascending; the lowest where they hold unlike values.

    Raises `InputError` when ranks tell unlike types or shapes of one tensor.
    """
    first: dict[_SharedBox, WriteItem] = {}
    found: dict[_SharedBox, list[int]] = {}
    facts: dict[str, tuple[Any, Any, int]] = {}
    unlike = _unlike(plans)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            fqn, data = item.index.fqn, item.tensor_data
            kind = (None, None) if data is None else (data.properties.dtype, data.size)
            *known, other = facts.setdefault(fqn, (*kind, rank))
            if known != list(kind):
                raise InputError(
                    f"ranks differ on '{fqn}': {known} on rank {other}, {list(kind)} on rank {rank}. Save the same "
                    "state on all ranks."
                )
            part = (
                _SharedBox(fqn, (), ())
                if data is None
                else _SharedBox(fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            )
            first.setdefault(part, item)
            ranks = found.setdefault(part, [])
            if not ranks or fqn not in unlike:
                ranks.append(rank)
    return {part: (first[part], tuple(ranks)) for part, ranks in found.items()}


def _unlike(plans: list[SavePlan]) -> set[str]:
    """Return the plain tensors whose values differ between ranks."""
    told: dict[str, str] = {}
    unlike = set()
    for plan in plans:
        for fqn, digest in plan.planner_data.digests.items():
            if told.setdefault(fqn, digest) != digest:
                unlike.add(fqn)
    return unlike


def _shares(items: dict[_SharedBox, WriteItem], num_holders: int) -> list[list[WriteItem]]:
    """Return what each of the holders of some parts writes of them."""
    if num_holders == 1:
        return [list(items.values())]
    by_name = {f"{part.fqn} {Box(part.offsets, part.lengths)}": (part, item) for part, item in items.items()}
    held = [ReplicatedTensor(name, part.lengths, _itemsize(item)) for name, (part, item) in by_name.items()]
    return [
        [
            _cut(by_name[name][1], box.shifted(by_name[name][0].offsets))
            for name, boxes in share.items()
            for box in boxes
        ]
        for share in shares(held, num_holders)
    ]


def _itemsize(item: WriteItem) -> int:
    assert item.tensor_data is not None, "objects are not cut"
    return item.tensor_data.properties.dtype.itemsize


def _cut(item: WriteItem, box: Box) -> WriteItem:
    """Return an item for a box of another one."""
    assert item.tensor_data is not None, "objects are not cut"
    offsets = torch.Size(box.offsets)
    data = replace(item.tensor_data, chunk=ChunkStorageMetadata(offsets, torch.Size(box.lengths)))
    return replace(item, index=MetadataIndex(item.index.fqn, offsets), tensor_data=data)


_NUMBERS = itertools.count(1)
"""Saves behind the training, in the order of their calls: what the record calls them by."""


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Place,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    redundancy: str = "none",
    overwrite: bool = True,
) -> Metadata:
    """Save as `dcp.save` does, into headway's files; all ranks (of `process_group`: by default of a gloo group of
    its own) call it. Returns once the checkpoint is committed. Raises the first rank's `HeadwayError` as it is.
    """
    writer = HeadwayWriter(checkpoint_id, redundancy=redundancy, overwrite=overwrite)
    return _saved(state_dict, writer, planner, process_group or own_group())


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Place,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    stager: HeadwayStager | None = None,
    redundancy: str = "none",
    overwrite: bool = True,
) -> Future[Metadata]:
    """Save as `save` does, behind the training: return once the state may be changed.

    What goes wrong afterwards is raised by the future, else by the next call. Group and `stager` are made at the
    first call and kept; the thread is a plain one: nothing is imported anew. Raises `InputError` for a group without
    a CPU backend: its collectives would run on the device, beside those of the training.
    """
    begun_ns = time.perf_counter_ns()
    stager, group = stager or _own_stager(), process_group or own_group()
    if group is not None and "cpu:" not in dist.get_backend_config(group):
        backend = dist.get_backend(group)
        raise InputError(f"a group of {backend} cannot save behind the training. Leave process_group out.")
    writer = HeadwayWriter(checkpoint_id, redundancy=redundancy, overwrite=overwrite)
    with state_account.inside("checkpoint.snapshot"):
        staged = [stager.stage(without_stateful(state_dict))]
    result, number, num_bytes = Save(), next(_NUMBERS), stager.num_bytes

    def write() -> None:
        start_ns = time.perf_counter_ns()
        try:
            done = _saved(_arrived(staged[0]), writer, planner, group)
            staged.clear()  # once it is written nobody holds the copy, and its memory serves the next one
        except BaseException as error:  # whatever it is, it is the caller's
            result.unsaved = staged
            result.set_exception(error)
            return
        end_ns = time.perf_counter_ns()
        state_account.background("checkpoint.persist", start_ns, end_ns, bytes=num_bytes, step=number)
        state_account.background("checkpoint.commit", end_ns, end_ns, bytes=0, step=number)
        result.set_result(done)

    state_account.snapshotted(begun_ns, time.perf_counter_ns(), bytes=num_bytes, step=number)
    stager.watch(result)
    # Not by way of torch's async_save: what it does per tensor before its thread begins would hold training up.
    # Last of all: whoever is told that this has failed may save in another way.
    threading.Thread(target=write, name="headway-checkpoint").start()
    return result


def _arrived(staged: dict[str, Any] | Future[dict[str, Any]]) -> dict[str, Any]:
    """Return a staged state once its copies are there; the future is not kept."""
    return staged.result() if isinstance(staged, Future) else staged


def without_stateful(state_dict: dict[str, Any]) -> dict[str, object]:
    """Return a state in which the states of objects replace them, as DCP does before it saves."""
    return {key: part.state_dict() if isinstance(part, Stateful) else part for key, part in state_dict.items()}


def _saved(
    state: dict[str, Any], writer: HeadwayWriter, planner: SavePlanner | None, group: dist.ProcessGroup | None
) -> Metadata:
    """Save through DCP; leave nothing half-written behind."""
    with _plain_errors():
        try:
            done: Metadata = state_dict_saver.save(
                state, storage_writer=writer, planner=planner or HeadwayPlanner(), process_group=group
            )
            return done
        finally:
            writer.abandon()


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Place,
    process_group: dist.ProcessGroup | None = None,
    verify: Verify = "read",
) -> None:
    """Load as `dcp.load` does, from headway's checkpoints and stock ones; raises the first rank's error as it is."""
    if not Path(checkpoint_id).is_dir():
        raise FormatError(f"{checkpoint_id} is no folder. Name the folder of a checkpoint.")
    reader = HeadwayReader(checkpoint_id, verify=verify)
    with _plain_errors():
        reader.read_metadata()
        try:
            state_dict_loader.load(state_dict, storage_reader=reader, process_group=process_group or own_group())
        finally:
            reader.close()


def own_group() -> dist.ProcessGroup | None:
    """Return a gloo group over all ranks that nothing else uses; None without a process group.

    Made at the first call, which all ranks make together. Pass it to `dcp.async_save` as `process_group` where that
    is called itself.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return _group_beside(dist.group.WORLD)


@lru_cache(maxsize=1)
def _group_beside(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group of checkpoints that belongs to the job's group."""
    return separate_group("headway-checkpoint", backend="gloo")


@lru_cache(maxsize=1)
def _own_stager() -> HeadwayStager:
    return HeadwayStager()


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the error that a rank met, of ours or of the file system, rather than DCP's collection of tracebacks."""
    try:
        yield
    except CheckpointException as cause:
        for rank, (error, _) in sorted(cause.failures.items()):
            if isinstance(error, HeadwayError):
                raise type(error)(f"rank {rank}: {error}") from cause
            if isinstance(error, OSError):
                raise error from cause
        raise
