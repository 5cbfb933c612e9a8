"""Restore a checkpoint into live objects, whatever layout it was saved in and whatever layout they have now.

`restore_into(place, {"model": model, "opt": optimizer, ...})` reads ours and
stock DCP checkpoints alike. Every rank reads what its own shards need,
straight from the places of the elements in the files, in several threads,
and verifies the blocks it touches before a byte reaches a tensor. With
`group`, ranks that hold equal copies read each byte once between them and
exchange. Nothing is touched before it is known that names, shapes and types
fit. Objects that are no tensors are unpickled: with torch's restricted
unpickler where that suffices, else only from a commit of ours that verified
(digests find damage, not forgery: whoever may write to the root may run code
here, as with any pickle) or with `trust_objects`.

>>> import tempfile, torch.distributed.checkpoint as dcp, warnings
>>> warnings.simplefilter("ignore")
>>> saved, model = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
>>> folder = tempfile.mkdtemp()
>>> _ = dcp.save({"model": saved.state_dict()}, checkpoint_id=folder, no_dist=True)
>>> report = restore_into(folder, {"model": model})
>>> torch.equal(model.weight, saved.weight), report.missing, report.source
(True, (), 'local')
"""

from __future__ import annotations

import difflib
import io
import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from headway.checkpoint.fetch import ELEMENT, Fetcher, Files, Mend, Source, aligned_buffer, fetch
from headway.checkpoint.mending import Mending
from headway.checkpoint.reads import GAP_BYTES, Shard, Transfer, plan_reads
from headway.checkpoint.runtime.exchange import agreed, exchange
from headway.checkpoint.runtime.shards import Leaf, LocalShard, local_shards
from headway.checkpoint.runtime.states import States
from headway.checkpoint.runtime.unpack import unpack
from headway.checkpoint.stored import Stored, open_stored
from headway.core.errors import DamageError, InputError
from headway.core.units import MIB
from headway.storage.manifest import StoredObject
from headway.storage.store import Store
from headway.storage.verification import verify as verify_all
from headway.storage.verification import verify_store

if TYPE_CHECKING:
    from numpy.typing import NDArray

Verify = Literal["off", "read", "full"]
"""Compare no digests; those of the blocks that are read; or first all of the checkpoint."""

SAME_SIZE = {size: getattr(torch, np.dtype(kind).name) for size, kind in ELEMENT.items()}
"""Bytes per element -> torch's name for `ELEMENT`'s type."""

NAMED = 5
"""Names that an error lists."""

REMOTE_GAP_BYTES = 1 * MIB
"""Unwanted bytes that are read through where a read is a request over a network."""


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore did on this rank."""

    step: int | None
    """Step of the checkpoint; None where a foreign one does not say."""

    path: str
    """Where it was read from."""

    source: Source
    """`memory`, `local`, `parity` (damage was rebuilt) or `remote`."""

    read_bytes: int
    """Bytes that this rank read."""

    hashed_bytes: int
    """Bytes whose digests were compared before use."""

    duration_s: float
    """Wall time."""

    missing: tuple[str, ...] = ()
    """Wanted, but not in the checkpoint; () when strict."""

    unexpected: tuple[str, ...] = ()
    """In the checkpoint under a restored object's name, but wanted by nothing."""

    repaired: tuple[str, ...] = ()
    """Blocks that were rebuilt from parity while reading: `file at byte n (tensor)`."""

    skipped: tuple[str, ...] = ()
    """Newer checkpoints that could not be used, and why."""


def restore_into(
    place: str | Path | Store | Files | Stored,
    objects: Mapping[str, Any],
    *,
    strict: bool = True,
    verify: Verify = "read",
    group: dist.ProcessGroup | None = None,
    trust_objects: bool = False,
    mend: Mend | None = None,
    num_threads: int | None = None,
) -> RestoreReport:
    """Fill `objects` in place from the checkpoint at `place`; every rank calls it, none waits for another.

    `group` is an exception to the second: its ranks read what they all hold once, and exchange it; all of them must
    call. `mend` rebuilds damaged blocks (by default from parity beside the checkpoint, where there is some). With
    `strict` off, what is missing is reported and left as it is.

    Raises
    ------
    InputError
        Names are missing, or shapes or types differ: the first five are named, before anything is changed.
    DamageError
        Stored bytes differ from what was written and could not be rebuilt; file, byte and tensor are named. Objects
        may then be partly restored: restore another step.
    """
    started_s = time.perf_counter()
    stored = place if isinstance(place, Stored) else open_stored(place, unpack=unpack)
    try:
        if verify == "full":
            verify_whole(stored)
        work = Reading(stored, verify, mend)
        with agreed(group):
            states = States(objects, stored)
            wanted = _Wanted(states, stored, strict=strict)
            values = wanted.objects(work, trust=trust_objects or (stored.ours and verify != "off"))
            alone, shared = wanted.shards(group)
            work.read(alone, num_threads)
        if group is not None and group.size() > 1:
            work.read_together(shared, group, num_threads)
        torch.autograd.graph.increment_version([shard.tensor for shard in (*alone, *shared)])
        for leaf, value in values:
            leaf.put(value)
        states.hand_back(strict=strict)
        return work.report(wanted, time.perf_counter() - started_s)
    finally:
        if stored is not place:
            stored.close()


class _Wanted:
    """The values that are to be restored, matched with what is stored. Raises before anything is changed."""

    def __init__(self, states: States, stored: Stored, *, strict: bool) -> None:
        self.stored, self.leaves = stored, states.leaves
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.local = local_shards(states.state, rank=self.rank, world_size=self.world_size)
        known = {*stored.tensors, *stored.objects}
        self.missing = tuple(fqn for fqn in self.leaves if fqn not in known)
        roots = tuple(f"{name}." for name in states.objects)
        self.unexpected = tuple(
            sorted(fqn for fqn in known - set(self.leaves) if fqn.startswith(roots) or fqn in states.objects)
        )
        surplus = [fqn for fqn in self.unexpected if states.is_exact(fqn)]
        if strict and self.missing:
            raise InputError(_missing(self.missing, known, stored))
        if strict and surplus:
            raise InputError(
                f"{stored.place} holds what the module lacks: {_list(surplus)}. Build the module as it was saved, or "
                "pass strict=False to leave them out."
            )
        differ = [
            text for fqn, (shape, dtype) in self.local.tensors.items() if (text := self._differs(fqn, shape, dtype))
        ]
        if differ:
            raise InputError(
                f"{stored.place} does not fit: {_list(differ, '; ')}. Build the model as it was saved, or convert the "
                "checkpoint first: headway ckpt export"
            )

    def _differs(self, fqn: str, shape: tuple[int, ...], dtype: str) -> str | None:
        """Say how a tensor differs from what is stored of it; None where it does not."""
        saved = self.stored.tensors.get(fqn)
        if saved is None or saved == (shape, dtype):
            return None
        return f"'{fqn}' was saved as {saved[1]} {list(saved[0])} and is {dtype} {list(shape)} here"

    def shards(self, group: dist.ProcessGroup | None) -> tuple[list[LocalShard], list[LocalShard]]:
        """Return the local memory that tensors go to: what this rank reads alone, and what all of `group` hold.

        A stored tensor where a plain value stands gets new memory.
        """
        found = [shard for shard in self.local.shards if shard.fqn in self.stored.tensors]
        # Tied tensors are one memory: the first of them is read, and all of them have it.
        found = [shard for shard in found if shard.same_as is None or shard.same_as not in self.stored.tensors]
        for fqn in self.local.objects:
            if fqn in self.stored.tensors:
                shape, dtype = self.stored.tensors[fqn]
                value = torch.zeros(shape, dtype=getattr(torch, dtype))
                self.leaves[fqn].put(value)
                found += local_shards({fqn: value}, rank=self.rank).shards
        together = set(dist.get_process_group_ranks(group)) if group is not None else set()
        alone: list[LocalShard] = []
        shared: list[LocalShard] = []
        for shard in found:
            if shard.box.num_elements:
                (shared if len(together) > 1 and together <= set(shard.holders) else alone).append(shard)
        return alone, shared

    def objects(self, work: Reading, *, trust: bool) -> list[tuple[Leaf, Any]]:
        """Return the stored objects, each with where it belongs."""
        return [
            (leaf, work.load(self._whose(fqn), trust=trust))
            for fqn, leaf in self.leaves.items()
            if fqn in self.stored.objects
        ]

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
            f"'{fqn}' was saved by each of {old} ranks for itself ({_list(f'rank {rank}' for rank in entries)}), "
            f"and there is none for rank {self.rank} of {self.world_size}. Restore on {old} ranks, or leave "
            f"'{fqn.partition('.')[0]}' out of the objects."
        )


class Reading:
    """Reading from one checkpoint: its fetcher, and the memory that elements go to."""

    def __init__(self, stored: Stored, verify: Verify, mend: Mend | None) -> None:
        self.stored = stored
        digests = stored.digests if stored.ours and verify != "off" else None
        if mend is None and digests is not None and stored.folder is not None:
            mend = Mending(stored.folder)
        self.fetcher = Fetcher(stored, digests, mend=mend)
        self.gap_bytes = REMOTE_GAP_BYTES if stored.source == "remote" else GAP_BYTES
        self._shards: Sequence[LocalShard] = ()
        self._arrays: list[NDArray[Any] | None] = []

    def read(self, shards: Sequence[LocalShard], num_threads: int | None) -> None:
        """Fill shards with what is stored of them."""
        plan = plan_reads([_want(shard) for shard in shards], self._have(shards), gap_bytes=self.gap_bytes)
        self._aim(shards)
        self.fetcher.flat = self._flat
        fetch(plan.reads, self.fetcher, self._place, num_threads=num_threads)

    def read_together(self, shards: Sequence[LocalShard], group: dist.ProcessGroup, num_threads: int | None) -> None:
        """Fill shards that all ranks of `group` hold: each byte is read by one of them."""
        want = [_want(shard) for shard in shards]
        plan = plan_reads(want, self._have(shards), group=group.size(), gap_bytes=self.gap_bytes)
        self._aim(shards)
        self.fetcher.flat = None  # what is read goes into a bucket first
        exchange(plan, self.fetcher, self._put, group, num_threads=num_threads)

    def record(self, entry: StoredObject) -> memoryview:
        """Return the bytes of one stored object, verified; valid until the next read."""
        start, stop = entry.record_offset, entry.record_offset + entry.record_bytes
        first, view = self.fetcher.span(entry.file, start, stop, named=lambda at: entry.fqn)
        return view[start - first : stop - first]

    def load(self, entry: StoredObject, *, trust: bool) -> Any:
        """Return one stored object."""
        record = io.BytesIO(self.record(entry))
        try:
            return torch.load(record, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as cause:
            if not trust:
                raise InputError(
                    f"'{entry.fqn}' of {self.stored.place} holds more than plain values, so that loading it may run "
                    "code of whoever wrote it. Pass trust_objects=True if that was you."
                ) from cause
        except (RuntimeError, EOFError) as cause:
            raise DamageError(
                f"'{entry.fqn}' of {self.stored.place} is no object that torch can read ({cause}). Restore an older "
                "step, or find the damage: headway ckpt verify"
            ) from cause
        record.seek(0)
        return torch.load(record, map_location="cpu", weights_only=False)

    def report(self, wanted: _Wanted, duration_s: float) -> RestoreReport:
        """Return what was done."""
        total = self.fetcher.total
        repaired = tuple(f"{file} at byte {at} ({tensor})" for file, at, tensor in sorted(total.mended))
        return RestoreReport(
            self.stored.step, self.stored.place, "parity" if repaired else self.stored.source,
            total.read_bytes, total.hashed_bytes, duration_s, wanted.missing, wanted.unexpected, repaired,
        )  # fmt: skip

    def _have(self, shards: Sequence[LocalShard]) -> dict[str, Any]:
        return {shard.fqn: self.stored.pieces(shard.fqn) for shard in shards}

    def _aim(self, shards: Sequence[LocalShard]) -> None:
        """Take the memory that the next reads go to."""
        self._shards, self._arrays = shards, [elements_of(shard.tensor) for shard in shards]
        on_cuda = any(shard.tensor.is_cuda for shard in shards)
        self.fetcher.room = _pinned if on_cuda else aligned_buffer

    def _index(self, transfer: Transfer) -> tuple[Any, ...]:
        # The ellipsis keeps a 0-dim result an array: a view, not a copy.
        return (*transfer.box.within(self._shards[transfer.want].box), ...)

    def _place(self, transfer: Transfer, elements: NDArray[Any]) -> None:
        """Copy elements that were read to where they belong."""
        array = self._arrays[transfer.want]
        if array is not None:
            np.copyto(array[self._index(transfer)], elements)
            return
        memory = np.ascontiguousarray(elements).reshape(elements.shape)
        memory = memory if memory.flags.writeable else memory.copy()  # torch has no read-only tensors
        self._put(transfer, torch.from_numpy(memory).view(self._shards[transfer.want].tensor.dtype))

    def _put(self, transfer: Transfer, elements: torch.Tensor) -> None:
        """Copy elements from any device to where they belong."""
        with torch.no_grad():
            self._shards[transfer.want].tensor[self._index(transfer)].copy_(elements)

    def _flat(self, transfer: Transfer) -> NDArray[np.uint8] | None:
        """Return the memory that takes elements as they lie in the file; None where their order differs."""
        array = self._arrays[transfer.want]
        part = None if array is None else array[self._index(transfer)]
        return part.reshape(-1).view(np.uint8) if part is not None and part.flags.c_contiguous else None


def elements_of(tensor: torch.Tensor) -> NDArray[Any] | None:
    """Return a tensor's memory as an array of `ELEMENT`'s types; None where it cannot be written from the host."""
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return None
    found: NDArray[Any] = tensor.detach().view(SAME_SIZE[tensor.element_size()]).numpy()
    return found


def _want(shard: LocalShard) -> Shard:
    return Shard(shard.fqn, shard.shape, shard.dtype, shard.box)


def _pinned(num_bytes: int) -> NDArray[np.uint8]:
    """Return host memory from which a device copies at full speed."""
    found: NDArray[np.uint8] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return found


def verify_whole(stored: Stored) -> None:
    """Raise `DamageError` when any byte of a checkpoint is damaged beyond repair."""
    if stored.folder is not None:
        report = verify_all(stored.folder)
    elif stored.store is not None:
        report = verify_store(stored.store)
    else:
        raise InputError("verify='full' needs a folder or a store. Pass verify='read': all that is read is compared.")
    if report.status == "lost":
        found = [f"{damage.file} at byte {damage.offset_bytes} ({damage.tensor})" for damage in report.damaged]
        raise DamageError(f"{stored.place} is damaged: {_list(found, '; ')}. Restore an older step.")


def _missing(missing: Sequence[str], known: Iterable[str], stored: Stored) -> str:
    """Say which names a checkpoint lacks, and which of its names are nearest."""
    known = sorted(known)
    near = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.6) for name in missing[:NAMED]}
    hints = [f"'{name}'" + (f" (nearest: '{found[0]}')" if found else "") for name, found in near.items()]
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    return (
        f"{stored.place} lacks {len(missing)} of the values that are to be restored: {', '.join(hints)}{more}. "
        "Name the objects as they were saved, or pass strict=False to leave them as they are."
    )


def _list(texts: Iterable[str], separator: str = ", ") -> str:
    """Join the first few texts, and say how many more there are."""
    every = list(texts)
    more = f" and {len(every) - NAMED} more" if len(every) > NAMED else ""
    return separator.join(every[:NAMED]) + more
