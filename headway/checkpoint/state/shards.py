"""Any state dict as named tensors in boxes of local memory, and as the boxes that this rank writes.

`local_shards(state)` says what this rank holds: each tensor of a nested
state dict under the name that stock DCP's `flatten_state_dict` gives it
(`model.0.weight`), as boxes of the whole tensor with the memory that holds
them. `pieces(state)` says what this rank writes of it, so that all ranks
together write every element once: replicated tensors are split by rows over
their holders (`headway.checkpoint.layout.reads`), tied tensors are written
once. Neither talks to other ranks.

- Plain tensors are replicated over `holders`: all ranks by default, else as
  the caller says, name by name (a rank that is its only holder writes it).
- DTensors: any `Shard`, `Replicate` and strided placements on meshes of any
  number of axes, uneven and empty shards. `ShardedTensor` too.
- `FlatShard` wraps an interval of a flattened tensor (ZeRO, flat FSDP).
- Everything else is an object: scalars, lists without tensors, sparse,
  quantised and wrapper-subclass tensors. They are pickled by who writes them.

>>> import torch
>>> state = {"model": {"0.weight": torch.zeros(4, 2)}, "opt": {"lr": 0.1}}
>>> mine = pieces(state, rank=0, world_size=1)
>>> [(shard.fqn, str(shard.box)) for shard in mine.shards], mine.objects
([('model.0.weight', '[0:4, 0:2]')], {'opt.lr': 0.1})
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate

from headway.checkpoint.layout.reads import ReplicatedTensor, Run, boxes_of, deal, owned
from headway.core.errors import InputError
from headway.storage.boxes import Box, Shape, flat_to_boxes, whole

Holders = Sequence[int] | Mapping[str, Sequence[int]] | None
"""Ranks that hold equal copies of the plain tensors: of all, name by name (others: all ranks), or None for all."""


PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Kinds of tensors that are nothing but elements."""


@dataclass(frozen=True, slots=True)
class FlatShard:
    """Elements `start` to `stop` of a tensor of `shape`, flattened row by row, as ZeRO and flat FSDP hold them."""

    tensor: torch.Tensor
    """[stop - start] The elements."""

    shape: tuple[int, ...]
    """[d] Shape of the whole tensor."""

    start: int
    """First element of the flattened tensor."""

    stop: int
    """One past the last."""

    def __post_init__(self) -> None:
        """Raise `InputError` when the tensor is not as long as the interval."""
        if self.tensor.ndim != 1 or self.tensor.numel() != self.stop - self.start:
            raise InputError(
                f"a flat shard of elements {self.start}:{self.stop} came with a tensor of shape "
                f"{tuple(self.tensor.shape)}. Pass a 1-d tensor of {self.stop - self.start} elements."
            )


@dataclass(frozen=True, slots=True)
class LocalShard:
    """One box of one tensor, and the local memory that holds it."""

    fqn: str
    """Name, as stock DCP flattens the state dict."""

    shape: Shape
    """[d] Shape of the whole tensor."""

    box: Box
    """Which part of the whole."""

    tensor: torch.Tensor
    """[*box.lengths] View of the local memory; may be non-contiguous; no gradient."""

    holders: tuple[int, ...]
    """Ranks that hold this same part, in ascending order."""

    same_as: str | None = None
    """Name of the tensor that occupies the same memory (tied weights) and comes before; None: the first of them."""

    @property
    def dtype(self) -> str:
        """Name of the element type, as torch has it without the module."""
        return dtype_name(self.tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        return self.box.num_elements * self.tensor.element_size()


class Leaf(NamedTuple):
    """One value of a nested state dict, and where it stands."""

    path: tuple[str | int, ...]
    """Keys as DCP writes them: those of mappings as text, those of lists as numbers."""

    holder: Any
    """The mapping or list that holds it."""

    key: Any
    """Its key there: `holder[key]` is the value."""

    fqn: str
    """Name of the value: its path, joined by dots."""

    @property
    def value(self) -> Any:
        """The value now."""
        return self.holder[self.key]

    def put(self, value: Any) -> None:
        """Set the value where it stands."""
        if not isinstance(self.holder, MutableMapping | MutableSequence):
            raise InputError(
                f"'{self.fqn}' lies in a {type(self.holder).__name__}, which cannot be filled. Pass a dict or a list."
            )
        self.holder[self.key] = value


@dataclass(slots=True)
class LocalState:
    """What a rank holds, or writes, of a state dict."""

    shards: list[LocalShard] = field(default_factory=list)
    """Boxes of tensors; those of one tensor stand together, tied ones after the first of their kind."""

    objects: dict[str, Any] = field(default_factory=dict)
    """Name -> value that is no tensor."""

    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    """Name of every leaf -> its keys (DCP's `planner_data`)."""

    tensors: dict[str, tuple[Shape, str]] = field(default_factory=dict)
    """Name -> shape and element type of the whole tensor, also where this rank holds nothing of it."""

    replicas: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name -> plain tensor that is taken to be equal on several ranks: to be compared across them once."""


def leaves(state: Mapping[str, Any]) -> list[Leaf]:
    """Return the leaves of a nested state dict, as stock DCP flattens it (torch >= 2.4).

    Mappings are entered; a list is entered when it holds a tensor, a mapping, or a list that is entered; every
    other value is a leaf. Raises `InputError` when two leaves get one name.
    """
    found: list[Leaf] = []
    _walk((), "", state, [(str(key), key) for key in state], found)
    if len({leaf.fqn for leaf in found}) < len(found):
        name, _ = Counter(leaf.fqn for leaf in found).most_common(1)[0]
        raise InputError(f"two values of the state are named '{name}'. Name one of their keys otherwise.")
    return found


def local_shards(
    state: Mapping[str, Any], *, rank: int = 0, world_size: int = 1, holders: Holders = None
) -> LocalState:
    """Return everything that this rank holds of `state`. Raises `InputError` for what cannot be stored."""
    with torch.no_grad():  # else torch records every look at a local tensor
        return _local_shards(state, rank, world_size, holders)


def _local_shards(state: Mapping[str, Any], rank: int, world_size: int, holders: Holders) -> LocalState:
    result = LocalState()
    seen: dict[tuple[Any, ...], str] = {}
    layouts = _Layouts()
    for leaf in leaves(state):
        name, value = leaf.fqn, leaf.value
        result.paths[name] = leaf.path
        if not is_tensor(value):
            result.objects[name] = value
            continue
        everyone = _holders_of(name, holders, world_size)
        shards = list(_shards_of(name, value, rank, everyone, layouts))
        dtype = value.tensor.dtype if isinstance(value, FlatShard) else value.dtype
        result.tensors[name] = (tuple(value.shape), dtype_name(dtype))
        result.shards += _tied(shards, seen)
        if type(value) not in (DTensor, FlatShard, ShardedTensor) and len(everyone) > 1:
            result.replicas[name] = value.detach()
    return result


def pieces(state: Mapping[str, Any], *, rank: int = 0, world_size: int = 1, holders: Holders = None) -> LocalState:
    """Return what this rank writes of `state`: every element of it is written by one rank.

    A piece whose `same_as` is set lies in the same memory as that tensor's piece of the same box: one record holds
    both. Objects are returned as held: who writes them is the caller's choice.
    """
    held = local_shards(state, rank=rank, world_size=world_size, holders=holders)
    groups: dict[tuple[int, ...], dict[str, LocalShard]] = {}
    for shard in held.shards:
        if shard.same_as is None and len(shard.holders) > 1:
            groups.setdefault(shard.holders, {})[_part_name(shard)] = shard
    mine: dict[str, list[Box]] = {}
    for who, members in groups.items():
        copies = [
            ReplicatedTensor(name, shard.box.lengths, shard.tensor.element_size()) for name, shard in members.items()
        ]
        mine |= owned(copies, len(who), who.index(rank))
    held.shards = [
        part for shard in held.shards for part in ([shard] if len(shard.holders) == 1 else _parts(shard, mine))
    ]
    return held


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of an element type without the module.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def _walk(
    path: tuple[str | int, ...], prefix: str, holder: Any, keys: list[tuple[str | int, Any]], found: list[Leaf]
) -> None:
    """Add the leaves below a mapping or a list; `keys` pairs each key as written with the key itself."""
    for written, key in keys:
        value, here, name = holder[key], (*path, written), f"{prefix}{written}"
        if type(value) in PLAIN:  # most are
            found.append(Leaf(here, holder, key, name))
        elif isinstance(value, Mapping):
            _walk(here, f"{name}.", value, [(str(inner), inner) for inner in value], found)
        elif _is_entered(value):
            _walk(here, f"{name}.", value, [(index, index) for index in range(len(value))], found)
        else:
            found.append(Leaf(here, holder, key, name))


def _is_entered(value: Any) -> bool:
    """Tell whether DCP enters a list: it holds a tensor, a mapping, or a list that is entered."""
    return isinstance(value, list) and any(
        isinstance(entry, torch.Tensor | Mapping | FlatShard) or _is_entered(entry) for entry in value
    )


def is_tensor(value: Any) -> bool:
    """Tell whether a leaf is stored as elements: a dense tensor that torch itself understands."""
    if type(value) in PLAIN:
        return value.layout == torch.strided and not value.is_quantized
    return isinstance(value, (DTensor, FlatShard, ShardedTensor))


def _holders_of(name: str, holders: Holders, world_size: int) -> tuple[int, ...]:
    """Return the ranks that hold the plain tensor `name`, ascending."""
    everyone = holders.get(name) if isinstance(holders, Mapping) else holders
    return tuple(sorted(everyone)) if everyone is not None else tuple(range(world_size))


def _shards_of(name: str, value: Any, rank: int, everyone: tuple[int, ...], layouts: _Layouts) -> Iterator[LocalShard]:
    """Yield the boxes that this rank holds of one tensor."""
    if isinstance(value, DTensor):
        yield from _of_dtensor(name, value, layouts)
    elif isinstance(value, FlatShard):
        yield from _of_flat(name, value, rank)
    elif isinstance(value, ShardedTensor):
        for part in value.local_shards():
            box = Box(tuple(part.metadata.shard_offsets), tuple(part.metadata.shard_sizes))
            yield LocalShard(name, tuple(value.size()), box, memory_of(name, part.tensor), (rank,))
    else:
        if rank not in everyone:
            raise InputError(
                f"rank {rank} holds '{name}', but its holders are {everyone}. Name the rank among them, or leave the "
                "tensor out of its state."
            )
        yield LocalShard(name, tuple(value.shape), whole(value.shape), memory_of(name, value), everyone)


def _of_flat(name: str, value: FlatShard, rank: int) -> Iterator[LocalShard]:
    """Yield the boxes of an interval of a flattened tensor."""
    memory, begin = memory_of(name, value.tensor), 0
    # A tensor without elements has no interval: every holder tells of it, so that it is known.
    for box in flat_to_boxes(value.shape, value.start, value.stop) or [whole(value.shape)] * (not prod(value.shape)):
        part = memory[begin : begin + box.num_elements].view(box.lengths)
        begin += box.num_elements
        yield LocalShard(name, tuple(value.shape), box, part, (rank,))


class _Layouts:
    """Where DTensors lie on this rank. A state has few meshes and shapes, and torch takes its time to tell of one."""

    def __init__(self) -> None:
        self._boxes: dict[Any, tuple[list[tuple[Box, Box]], tuple[int, ...]]] = {}
        self._meshes: dict[int, tuple[Any, Any]] = {}

    def of(self, name: str, value: DTensor) -> tuple[list[tuple[Box, Box]], tuple[int, ...]]:
        """Return the boxes of a DTensor here, each in the local tensor and in the whole, and who holds the same."""
        key = id(value.device_mesh), value.placements, getattr(value._spec, "shard_order", None), value.shape
        if key not in self._boxes:
            self._boxes[key] = self._find(name, value)
        return self._boxes[key]

    def _find(self, name: str, value: DTensor) -> tuple[list[tuple[Box, Box]], tuple[int, ...]]:
        """Cut every dimension as the placements say, axis by axis.

        A part without elements is left out, except that the first coordinates of a tensor without any have one, so
        that the tensor is known.
        """
        mesh, placements = value.device_mesh, value.placements
        if id(mesh) not in self._meshes:
            self._meshes[id(mesh)] = mesh.get_coordinate(), mesh.mesh.numpy()
        coordinate, ranks = self._meshes[id(mesh)]
        if coordinate is None:
            return [], ()
        runs: list[list[Run]] = [[(0, size)] for size in value.shape]
        copies: list[Any] = list(coordinate)
        for axis in _in_order(value):
            placement = placements[axis]
            if isinstance(placement, Replicate):
                copies[axis] = slice(None)
            elif hasattr(placement, "dim"):
                factor = int(getattr(placement, "split_factor", 1))
                dim = placement.dim
                runs[dim] = deal(runs[dim], ranks.shape[axis], coordinate[axis], split_factor=factor)
            else:
                raise InputError(
                    f"'{name}' is placed as {placement} on mesh axis {axis}: its value is spread over ranks that hold "
                    "sums. Call redistribute() with Shard or Replicate before saving."
                )
        is_kept = not value.numel() and not any(place for place in copies if isinstance(place, int))
        boxes = [(local, box) for local, box in boxes_of(runs) if box.num_elements or is_kept]
        return boxes, tuple(sorted(ranks[tuple(copies)].flatten().tolist()))


def _of_dtensor(name: str, value: DTensor, layouts: _Layouts) -> Iterator[LocalShard]:
    """Yield the boxes of a DTensor's local part: one, or several where a placement is strided; none off its mesh."""
    boxes, holders = layouts.of(name, value)
    if boxes:
        memory = memory_of(name, value.to_local())
        for local, box in boxes:
            mine = memory if local.lengths == memory.shape else memory[local.within(whole(memory.shape))]
            yield LocalShard(name, tuple(value.shape), box, mine, holders)


def _in_order(value: DTensor) -> list[int]:
    """Return the mesh axes in the order in which they cut: as numbered, unless the tensor says otherwise."""
    entries = getattr(value._spec, "shard_order", None) or ()
    ordered = [axis for entry in entries for axis in entry.mesh_dims]
    return ordered + [axis for axis in range(value.device_mesh.ndim) if axis not in ordered]


def memory_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's own memory, without gradient; a lazily conjugated or negated one stays so."""
    wait = getattr(tensor, "wait", None)
    tensor = wait() if callable(wait) else tensor
    if tensor.is_meta:
        raise InputError(f"'{name}' is on the meta device and holds nothing. Give it memory with to_empty() first.")
    return tensor.detach()


def _part_name(shard: LocalShard) -> str:
    """Return a name for one box of a tensor that all of its holders agree on."""
    return f"{shard.fqn} {shard.box}"


def _tied(shards: list[LocalShard], seen: dict[tuple[Any, ...], str]) -> list[LocalShard]:
    """Mark a tensor all of whose boxes occupy the memory of one seen before."""
    place = tuple(
        (
            shard.tensor.device,
            shard.tensor.data_ptr(),
            shard.tensor.dtype,
            shard.tensor.stride(),
            shard.box,
            shard.holders,
        )
        for shard in shards
    )
    if not shards or not all(shard.box.num_elements for shard in shards):
        return shards
    first = seen.setdefault((shards[0].shape, place), shards[0].fqn)
    return shards if first == shards[0].fqn else [replace(shard, same_as=first) for shard in shards]


def _parts(shard: LocalShard, mine: Mapping[str, list[Box]]) -> Iterator[LocalShard]:
    """Yield the parts of a shard that this rank writes; a tied tensor is cut as the first of its kind."""
    first = shard if shard.same_as is None else replace(shard, fqn=shard.same_as)
    for local in mine.get(_part_name(first), []):
        memory = shard.tensor[local.within(whole(shard.box.lengths))]
        yield replace(shard, box=local.shifted(shard.box.offsets), tensor=memory)
