"""What a rank writes of a state that keeps its form from save to save: cut once, then only looked at.

Walking a state of some hundred tensors and cutting it takes as long as copying
tens of megabytes. The cut stays right while every tensor keeps its name,
kind, shape, strides, type and place in memory; then its parts are views of
the same places, made from the tensors of this save. Nothing of a tensor is
held between saves, and anything that differs is cut anew.

>>> state = {"model": {"w": torch.zeros(4)}}
>>> cut = ShardingCache()
>>> first = cut.pieces(state, rank=0, world_size=1)
>>> again = cut.pieces(state, rank=0, world_size=1)
>>> again.shards[0].tensor.data_ptr() == first.shards[0].tensor.data_ptr(), cut.num_made
(True, 1)
>>> state["model"]["w"] = torch.ones(5)
>>> str(cut.pieces(state, rank=0, world_size=1).shards[0].box), cut.num_made
('[0:5]', 2)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from headway.checkpoint.state.shards import PLAIN, Holders, Leaf, LocalShard, LocalState, is_tensor, leaves, pieces
from headway.storage.boxes import Box, Shape


class _WrittenPart(NamedTuple):
    """One part that is written: a `LocalShard`, and where its tensor lies in the memory of the leaf `fqn`."""

    fqn: str
    shape: Shape
    box: Box
    holders: tuple[int, ...]
    same_as: str | None
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Of its first element in the memory's storage."""


class ShardingCache:
    """The last cut of one state; call it from one thread."""

    def __init__(self) -> None:
        self._form: list[Any] | None = None
        self._parts: list[_WrittenPart] = []
        self._paths: dict[str, tuple[str | int, ...]] = {}
        self._tensors: dict[str, tuple[Shape, str]] = {}
        self._replicas: tuple[str, ...] = ()
        self.num_made = 0
        """How often a state was cut anew."""

    def pieces(
        self, state: Mapping[str, Any], *, rank: int = 0, world_size: int = 1, holders: Holders = None
    ) -> LocalState:
        """Return the same as `shards.pieces`."""
        with torch.no_grad():
            found = leaves(state)
            form, local, objects = _form(found, rank, world_size, holders)
            if form is not None and form == self._form:
                return self._again(local, objects)
        made = pieces(state, rank=rank, world_size=world_size, holders=holders)
        self.num_made += 1
        self._keep(made, form)
        return made

    def _again(self, local: Mapping[str, torch.Tensor], objects: dict[str, Any]) -> LocalState:
        """Return the kept cut of a state of the same form: its tensors here, and what is no tensor, by name."""
        shards = [
            LocalShard(fqn, shape, box, local[fqn].as_strided(size, stride, offset), who, same_as)
            for fqn, shape, box, who, same_as, size, stride, offset in self._parts
        ]
        replicas = {fqn: local[fqn] for fqn in self._replicas}
        return LocalState(shards, objects, self._paths, dict(self._tensors), replicas)

    def _keep(self, made: LocalState, form: list[Any] | None) -> None:
        """Keep how a state was cut, without its memory."""
        self._form = form
        self._parts = [
            _WrittenPart(
                shard.fqn, shard.shape, shard.box, shard.holders, shard.same_as, tuple(shard.tensor.shape),
                shard.tensor.stride(), int(shard.tensor.storage_offset()),
            )
            for shard in made.shards
        ]  # fmt: skip
        self._paths, self._tensors, self._replicas = made.paths, made.tensors, tuple(made.replicas)


def _form(
    found: list[Leaf], rank: int, world_size: int, holders: Holders
) -> tuple[list[Any] | None, dict[str, torch.Tensor], dict[str, Any]]:
    """Return all that a cut depends on, None where that cannot be told and the cut is not kept; tensors; objects."""
    whose = holders if holders is None or isinstance(holders, Mapping) else tuple(holders)
    form: list[Any] = [rank, world_size, whose]
    local: dict[str, torch.Tensor] = {}
    objects: dict[str, Any] = {}
    for path, holder, key, fqn in found:
        value = holder[key]
        if not is_tensor(value):
            form.append(path)
            objects[fqn] = value
            continue
        mine = value
        if isinstance(value, DTensor):
            mine = value.to_local()
            form.append((value.shape, value.device_mesh, value.placements, getattr(value._spec, "shard_order", None)))
        if type(mine) not in PLAIN or mine.is_conj() or mine.is_neg() or mine.is_meta:
            return None, {}, {}
        local[fqn] = mine
        form.append((
            path, type(value), mine.dtype, mine.shape, mine.stride(), mine.data_ptr(), mine.storage_offset(),
            mine.device,
        ))  # fmt: skip
    return form, local, objects
