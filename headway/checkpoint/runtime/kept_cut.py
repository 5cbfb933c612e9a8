"""What a rank writes of a state that keeps its form from save to save: cut once, then only looked at.

Walking a state of some hundred tensors and cutting it takes as long as copying
tens of megabytes. The cut stays right while every tensor keeps its name,
kind, shape, strides, type and place in memory; then its parts are views of
the same places, made from the tensors of this save. Nothing of a tensor is
held between saves, and anything that differs is cut anew.

>>> state = {"model": {"w": torch.zeros(4)}}
>>> cut = KeptCut()
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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from headway.checkpoint.runtime.shards import (
    Holders,
    Leaf,
    LocalShard,
    LocalState,
    is_tensor,
    leaves,
    memory_of,
    pieces,
)
from headway.storage.boxes import Shape

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True, slots=True)
class _Part:
    """One part that is written: a view of the memory of the leaf `fqn`."""

    fqn: str
    shard: LocalShard
    """The part, but with an empty tensor in place of its own."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Of its first element in the memory's storage."""


class KeptCut:
    """The last cut of one state; call it from one thread."""

    def __init__(self) -> None:
        self._form: list[Any] | None = None
        self._parts: list[_Part] = []
        self._tensors: dict[str, tuple[Shape, str]] = {}
        self._replicas: tuple[str, ...] = ()
        self.num_made = 0
        """How often a state was cut anew."""

    def pieces(
        self, state: Mapping[str, Any], *, rank: int = 0, world_size: int = 1, holders: Holders = None
    ) -> LocalState:
        """Return the same as `shards.pieces`."""
        with torch.no_grad():
            found = list(leaves(state))
            form = _form(found, (rank, world_size), holders)
            if form is not None and form == self._form:
                return self._again(found)
        made = pieces(state, rank=rank, world_size=world_size, holders=holders)
        self.num_made += 1
        self._keep(made, form)
        return made

    def _again(self, found: list[Leaf]) -> LocalState:
        """Return the kept cut of a state of the same form."""
        values = {leaf.fqn: leaf.value for leaf in found}
        memory = {fqn: memory_of(fqn, _local(values[fqn])) for fqn in {part.fqn for part in self._parts}}
        shards = [
            replace(part.shard, tensor=memory[part.fqn].as_strided(part.size, part.stride, part.offset))
            for part in self._parts
        ]
        objects = {leaf.fqn: value for leaf in found if not is_tensor(value := leaf.value)}
        paths = {leaf.fqn: leaf.path for leaf in found}
        replicas = {fqn: values[fqn].detach() for fqn in self._replicas}
        return LocalState(shards, objects, paths, dict(self._tensors), replicas)

    def _keep(self, made: LocalState, form: list[Any] | None) -> None:
        """Keep how a state was cut, without its memory."""
        nothing = torch.empty(0)
        self._form = form
        self._parts = [
            _Part(
                shard.fqn, replace(shard, tensor=nothing), tuple(shard.tensor.shape), shard.tensor.stride(),
                int(shard.tensor.storage_offset()),
            )
            for shard in made.shards
        ]  # fmt: skip
        self._tensors, self._replicas = made.tensors, tuple(made.replicas)


def _form(found: list[Leaf], world: tuple[int, int], holders: Holders) -> list[Any] | None:
    """Return all that a cut depends on; None where that cannot be told, and the cut is not kept."""
    form: list[Any] = [world, tuple(holders) if holders is not None and not isinstance(holders, Mapping) else None]
    for leaf in found:
        value = leaf.value
        if not is_tensor(value):
            form.append(leaf.path)
            continue
        local = _local(value)
        if type(local) not in PLAIN or local.is_conj() or local.is_neg() or local.is_meta:
            return None
        form.append((
            leaf.path, type(value), value.dtype, value.shape, local.shape, local.stride(), local.data_ptr(),
            local.storage_offset(), local.device,
            holders.get(leaf.fqn) if isinstance(holders, Mapping) else None,
        ))  # fmt: skip
        if isinstance(value, DTensor):
            form.append((value.device_mesh, value.placements, getattr(value._spec, "shard_order", None)))
    return form


def _local(value: Any) -> Any:
    """Return the tensor of a leaf that lies on this rank."""
    return value.to_local() if isinstance(value, DTensor) else value
