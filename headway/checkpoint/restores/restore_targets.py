r"""What is to be restored, matched with what a checkpoint holds: names, shapes, types, ties, whose objects.

`RestoreTargets(states, stored)` raises before anything is read or changed. Tensors
that are tied here, one memory under several names, are read once. Where the
checkpoint holds several of their names, their values must be equal to the
bit: `StoredCheckpoint.is_alike` tells by checksums, and where it cannot, both are read
and compared.

>>> listed(f"w{n}" for n in range(7))
'w0, w1, w2, w3, w4 and 2 more'

Records whose elements do not lie row by row: compressed, transposed, or changed by one of DCP's extensions.

>>> import io
>>> from headway.storage.formats.dcp import Chunk, StoredTensor
>>> file = io.BytesIO()
>>> torch.save(torch.arange(4, dtype=torch.int16).view(2, 2).t(), file)
>>> chunk = Chunk("a", 0, 0, (), (0, 0), (2, 2))
>>> bytes(unpack(file.getvalue(), StoredTensor("int16", (2, 2), (chunk,)), chunk))
b'\x00\x00\x02\x00\x01\x00\x03\x00'
"""

from __future__ import annotations

import difflib
import io
import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

from headway.checkpoint.layout.stored import StoredCheckpoint
from headway.checkpoint.state.shards import Leaf, LocalShard, local_shards
from headway.checkpoint.state.states import States
from headway.core.errors import DamageError, FormatError, InputError
from headway.runtime.torch_state import RNG_STATE, branched
from headway.storage.formats.dcp import Chunk, StoredTensor
from headway.storage.manifest import StoredObject

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from headway.checkpoint.restores.restore import CheckpointReading

NAMED = 5
"""Names that an error lists."""


class RestoreTargets:
    """The values that are to be restored, matched with what is stored. Raises before anything is changed."""

    def __init__(self, states: States, stored: StoredCheckpoint, *, strict: bool) -> None:
        """Raise `InputError` for names that are missing, too many in a module, or of other shapes or types."""
        self.stored, self.leaves, self.asked, self.strict = stored, states.leaves, states.asked, strict
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.local = local_shards(states.state, rank=self.rank, world_size=self.world_size)
        known = {*stored.tensors, *stored.objects}
        self.missing = tuple(fqn for fqn in self.leaves if fqn not in known)
        """Wanted, but not stored."""
        roots = tuple(f"{name}." for name in states.objects)
        self.unexpected = tuple(
            sorted(fqn for fqn in known - set(self.leaves) if fqn.startswith(roots) or fqn in states.objects)
        )
        """Stored under the name of an object, but not wanted."""
        self.overruled: tuple[str, ...] = ()
        """Tied here, but stored with other values than the name that is read; known once there are `shards`."""
        self._check(known, surplus=[fqn for fqn in self.unexpected if states.is_exact(fqn)])

    def _check(self, known: set[str], surplus: list[str]) -> None:
        """Raise `InputError` where something does not fit."""
        if self.strict and self.missing:
            raise InputError(_missing(self.missing, known, self.stored))
        if self.strict and surplus:
            raise InputError(
                f"{self.stored.place} holds what the module lacks: {listed(surplus)}. Build the module as it was "
                "saved, or pass strict=False to leave them out."
            )
        folded = [shard.fqn for shard in self.local.shards if _is_folded(shard.tensor)]
        if folded:
            raise InputError(
                f"several elements of {listed(folded)} share one place in memory. Call .contiguous() on it first."
            )
        differ = [
            text for fqn, (shape, dtype) in self.local.tensors.items() if (text := self._differs(fqn, shape, dtype))
        ]
        if differ:
            raise InputError(
                f"{self.stored.place} does not fit: {listed(differ, '; ')}. Build the model as it was saved, or "
                "convert the checkpoint first: headway ckpt export"
            )

    def shards(self, reading: CheckpointReading) -> list[LocalShard]:
        """Return the local memory that tensors go to, each tied one once.

        Raises `InputError` where tied tensors were saved with unlike values; with `strict` off, the first of them is
        read.
        """
        groups: dict[str, dict[str, list[LocalShard]]] = {}
        for shard in self.local.shards:
            if shard.fqn in self.stored.tensors and shard.box.num_elements:
                groups.setdefault(shard.same_as or shard.fqn, {}).setdefault(shard.fqn, []).append(shard)
        found: list[LocalShard] = []
        unlike: dict[str, str] = {}
        for group in groups.values():
            # What is asked first needs its elements first.
            first, *others = sorted(group, key=lambda fqn: not self.is_asked(fqn))
            found += group[first]
            unlike |= {fqn: first for fqn in others if not reading.is_alike(group[first], fqn)}
        self.overruled = tuple(f"{fqn} (has the values of {first})" for fqn, first in unlike.items())
        if unlike and self.strict:
            pairs = [f"'{first}' and '{fqn}'" for fqn, first in unlike.items()]
            raise InputError(
                f"{self.stored.place} holds unlike values of what is tied here: {listed(pairs)}. Build the model as it "
                "was saved, untied, or pass strict=False to take the first of them."
            )
        return found

    def room(self) -> Iterator[tuple[Leaf, Any, list[LocalShard]]]:
        """Yield new memory for each stored tensor where a plain value stands: where, what, and what is to be read."""
        for fqn in self.local.objects:
            if fqn in self.stored.tensors:
                shape, dtype = self.stored.tensors[fqn]
                value = torch.zeros(shape, dtype=getattr(torch, dtype))
                shards = local_shards({fqn: value}, rank=self.rank).shards
                yield self.leaves[fqn], value, [shard for shard in shards if shard.box.num_elements]

    def objects(self, reading: CheckpointReading, *, trust: bool) -> list[tuple[Leaf, Any]]:
        """Return the stored objects, each with where it belongs."""
        return [
            (leaf, self._value(fqn, reading, trust=trust))
            for fqn, leaf in self.leaves.items()
            if fqn in self.stored.objects
        ]

    def _value(self, fqn: str, reading: CheckpointReading, *, trust: bool) -> Any:
        """Return what this rank takes of a stored object: a new rank has generators of its own.

        Unless the saved ranks' were in step, as where the script seeds all alike.
        """
        value, old = reading.load(self._whose(fqn), trust=trust), self.stored.world_size or 1
        in_step = old > 1 and None in self.stored.objects[fqn]  # what all ranks had alike is stored once
        is_new = fqn == RNG_STATE and self.rank >= old and not in_step
        return branched(value, self.rank) if is_new else value

    def is_asked(self, fqn: str) -> bool:
        """Whether a value belongs to an object that is asked before all others."""
        return self.leaves[fqn].path[0] in self.asked

    def _differs(self, fqn: str, shape: tuple[int, ...], dtype: str) -> str | None:
        """Say how a tensor differs from what is stored of it; None where it does not."""
        saved = self.stored.tensors.get(fqn)
        if saved is None or saved == (shape, dtype):
            return None
        return f"'{fqn}' was saved as {saved[1]} {list(saved[0])} and is {dtype} {list(shape)} here"

    def _whose(self, fqn: str) -> StoredObject:
        """Return the stored object that this rank takes. Raises `InputError` where none is meant for it."""
        entries, old = self.stored.objects[fqn], self.stored.world_size or 1
        if None in entries:
            return entries[None]
        if old == self.world_size and self.rank in entries:
            return entries[self.rank]
        kept = entries.get(min(self.rank, old - 1))
        if kept is not None and kept.any_world:
            return kept
        raise InputError(
            f"'{fqn}' was saved by each of {old} ranks for itself ({listed(f'rank {rank}' for rank in entries)}), "
            f"and there is none for rank {self.rank} of {self.world_size}. Restore on {old} ranks, or leave "
            f"'{fqn.partition('.')[0]}' out of the objects."
        )


def _is_folded(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor was expanded, so that it cannot be filled."""
    return any(not stride and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _missing(missing: Sequence[str], known: Iterable[str], stored: StoredCheckpoint) -> str:
    """Say which names a checkpoint lacks, and which of its names are nearest."""
    folded = {name.casefold(): name for name in sorted(known)}
    near = {name: difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.6) for name in missing[:NAMED]}
    hints = [f"'{name}'" + (f" (nearest: '{folded[found[0]]}')" if found else "") for name, found in near.items()]
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    return (
        f"{stored.place} lacks {len(missing)} of the values that are to be restored: {', '.join(hints)}{more}. "
        "Name the objects as they were saved, or pass strict=False to leave them as they are."
    )


def listed(texts: Iterable[str], separator: str = ", ") -> str:
    """Join the first few texts, and say how many more there are."""
    every = list(texts)
    more = f" and {len(every) - NAMED} more" if len(every) > NAMED else ""
    return separator.join(every[:NAMED]) + more


# Records whose elements do not lie row by row: compressed, transposed, or changed by one of DCP's extensions.


def unpack(record: Buffer, tensor: StoredTensor, chunk: Chunk) -> Buffer:
    """Return the elements of a record's box, row by row, as torch itself reads them.

    Raises `DamageError` when torch cannot read the record, `FormatError` when it is not a tensor of the box's shape
    and type.
    """
    file: IO[bytes] = io.BytesIO(record)
    for extension in reversed(ExtensionRegistry().from_descriptor_list(chunk.transforms)):
        file = cast("StreamTransformExtension", extension).transform_from(file)
    try:
        # An extension's stream may not seek, which torch.load needs.
        value = torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as cause:
        raise DamageError(
            f"{chunk.file} at byte {chunk.record_offset} is no tensor that torch can read ({cause}). Restore an older "
            "checkpoint, or find the damage: headway ckpt verify"
        ) from cause
    kind = str(getattr(value, "dtype", type(value))).removeprefix("torch.")
    if kind != tensor.dtype or tuple(value.shape) != chunk.lengths:
        raise FormatError(
            f"{chunk.file} at byte {chunk.record_offset} holds {kind} {list(getattr(value, 'shape', []))}; the "
            f"metadata says {tensor.dtype} {list(chunk.lengths)}. Check it: headway ckpt verify"
        )
    flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if value.numel() else b""
