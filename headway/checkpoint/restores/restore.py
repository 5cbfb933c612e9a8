"""Restore a checkpoint into live objects, whatever layout it was saved in and whatever layout they have now.

`restore_into(place, {"model": model, "opt": optimizer, ...})` reads ours and
stock DCP checkpoints alike. Every rank reads what its own shards need,
straight from the places of the elements in the files, in several threads,
and verifies the blocks it touches before a byte reaches a tensor. With
`group`, ranks that hold equal copies read each byte once between them and
exchange.

All or nothing, as far as that goes without a second copy of the tensors: a
`Restore` first asks all that can refuse (names, shapes, types, ties, groups
of parameters, the `load_state_dict` of small objects), on all ranks, and can
be undone until then; only then are modules, optimizers and large objects
filled in place and given their state. Who fails after that says that the
state is mixed.

Objects that are no tensors are unpickled: with torch's restricted unpickler
where that suffices, else only from a commit of ours that verified (digests
find damage, not forgery: whoever may write to the root may run code here, as
with any pickle) or with `trust_objects`.

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

import io
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from headway.checkpoint.layout.fetch import ELEMENT, Files, Mend, RangeFetcher, Source, aligned_buffer, fetch
from headway.checkpoint.layout.reads import GAP_BYTES, Shard, ShardTransfer, plan_reads
from headway.checkpoint.layout.stored import ParityRepair, StoredCheckpoint, open_stored
from headway.checkpoint.restores.exchange import agreed, exchange
from headway.checkpoint.restores.restore_targets import RestoreTargets, listed, unpack
from headway.checkpoint.state.shards import LocalShard
from headway.checkpoint.state.states import PLAIN, States
from headway.core.errors import DamageError, HeadwayError, InputError
from headway.core.units import MIB
from headway.storage.checks.verification import verify as verify_all
from headway.storage.checks.verification import verify_store
from headway.storage.manifest import StoredObject
from headway.storage.stores import Store

if TYPE_CHECKING:
    from numpy.typing import NDArray

Verify = Literal["off", "read", "full"]
"""Compare no digests; those of the blocks that are read; or first all of the checkpoint."""

SAME_SIZE = {size: getattr(torch, np.dtype(kind).name) for size, kind in ELEMENT.items()}
"""Bytes per element -> torch's name for `ELEMENT`'s type."""

MIXED = (
    "The state is mixed now, partly of the checkpoint and partly as before: restore another step before going on, or "
    "start anew. verify='full' finds damage before anything is changed."
)
"""What is said when all-or-nothing could not be had."""

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

    overruled: tuple[str, ...] = ()
    """Tied here, but saved with other values than the name whose values all have now; () when strict."""


def restore_into(
    place: str | Path | Store | Files | StoredCheckpoint,
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
        Names are missing, shapes or types differ (the first five are named), tied tensors were saved unlike, or an
        object refuses its state: before anything is changed, unless the message says that the state is mixed.
    DamageError
        Stored bytes differ from what was written and could not be rebuilt; file, byte and tensor are named. Where
        the state is mixed then, the message says so: restore another step.
    """
    started_s = time.perf_counter()
    stored = place if isinstance(place, StoredCheckpoint) else open_stored(place, unpack=unpack)
    restore = Restore(stored, verify, strict=strict, group=group, mend=mend, num_threads=num_threads)
    try:
        try:
            with agreed(group):
                restore.ask(objects, trust=trust_objects)
        except BaseException:
            restore.undo()
            raise
        return replace(restore.fill(), duration_s=time.perf_counter() - started_s)
    finally:
        if stored is not place:
            stored.close()


class Restore:
    """One restore in two acts: `ask` all that may refuse, which can be undone; then `fill` the tensors in place."""

    def __init__(
        self,
        stored: StoredCheckpoint,
        verify: Verify,
        *,
        strict: bool = True,
        group: dist.ProcessGroup | None = None,
        mend: Mend | None = None,
        num_threads: int | None = None,
    ) -> None:
        """Take what `restore_into` takes; do nothing yet."""
        self._started_s = time.perf_counter()
        self._stored, self._verify, self._strict, self._num_threads = stored, verify, strict, num_threads
        self._group = group if group is not None and group.size() > 1 else None
        self._reading = CheckpointReading(stored, verify, mend)
        self._asked: States | None = None

    def ask(self, objects: Mapping[str, Any], *, trust: bool = False) -> None:
        """Match `objects` with what is stored, and give those that may refuse their state.

        Raises as `restore_into` does, and has undone itself then. Where another rank has failed, `undo`.
        """
        try:
            self._ask(objects, trust or (self._stored.ours and self._verify != "off"))
        except BaseException:
            self.undo()
            raise

    def _ask(self, objects: Mapping[str, Any], trust: bool) -> None:
        if self._verify == "full":
            verify_whole(self._stored)
        self._states = states = States(objects, self._stored)
        self._wanted = wanted = RestoreTargets(states, self._stored, strict=self._strict)
        shards = wanted.shards(self._reading)
        values = wanted.objects(self._reading, trust=trust)
        for leaf, value, shard in wanted.room():
            values.append((leaf, value))
            shards += shard
        # What is its own state is the caller's: it is filled last, and only asked here whether it can be.
        own = {name for name, thing in objects.items() if isinstance(thing, PLAIN)}
        self._own = [(leaf, value) for leaf, value in values if leaf.path[0] in own]
        for leaf, value in values:
            leaf.put(leaf.value if leaf.path[0] in own else value)
        states.check()
        asked = [shard for shard in shards if wanted.is_asked(shard.fqn)]
        self._shards = [shard for shard in shards if not wanted.is_asked(shard.fqn)]
        self._asked = states
        self._read(asked)
        states.ask()

    def undo(self) -> None:
        """Put back what was asked. Raises `InputError` where an object refuses the state that it had."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.put_back()

    def fill(self) -> RestoreReport:
        """Fill what `ask` has found to fit. Whatever is raised here says that the state is mixed."""
        with mixing():
            self._fill()
        total, wanted = self._reading.fetcher.total, self._wanted
        repaired = tuple(f"{file} at byte {at} ({tensor})" for file, at, tensor in sorted(total.mended))
        return RestoreReport(
            self._stored.step, self._stored.place, "parity" if repaired else self._stored.source,
            total.read_bytes, total.hashed_bytes, time.perf_counter() - self._started_s,
            wanted.missing, wanted.unexpected, repaired, overruled=wanted.overruled,
        )  # fmt: skip

    def _fill(self) -> None:
        together = set(dist.get_process_group_ranks(self._group)) if self._group is not None else set()
        alone, shared = list[LocalShard](), list[LocalShard]()
        for shard in self._shards:
            (shared if together and together <= set(shard.holders) else alone).append(shard)
        with agreed(self._group):
            self._read(alone)
        if self._group is not None:
            self._reading.read_together(shared, self._group, self._num_threads)
            torch.autograd.graph.increment_version([shard.tensor for shard in shared])
        for leaf, value in self._own:
            leaf.put(value)
        self._states.hand_back(strict=self._strict)

    def _read(self, shards: Sequence[LocalShard]) -> None:
        """Fill shards that this rank reads alone."""
        self._reading.read(shards, self._num_threads)
        torch.autograd.graph.increment_version([shard.tensor for shard in shards])


@contextmanager
def mixing() -> Iterator[None]:
    """Let whatever is raised inside say that the state is mixed: an error of ours in its message, others in a note."""
    try:
        yield
    except HeadwayError as error:
        if MIXED in str(error):
            raise
        raise type(error)(f"{error} {MIXED}") from error
    except Exception as error:
        error.add_note(MIXED)
        raise


class CheckpointReading:
    """Reading from one checkpoint: its fetcher, and the memory that elements go to."""

    def __init__(self, stored: StoredCheckpoint, verify: Verify, mend: Mend | None) -> None:
        self.stored = stored
        digests = stored.digests if stored.ours and verify != "off" else None
        if mend is None and digests is not None and stored.folder is not None:
            mend = ParityRepair(stored.folder)
        self.fetcher = RangeFetcher(stored, digests, mend=mend)
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

    def is_alike(self, shards: Sequence[LocalShard], fqn: str) -> bool:
        """Tell whether the tensor `fqn` is stored with the elements that `shards`, all of one other tensor, are.

        Both are read where checksums cannot tell.
        """
        told = self.stored.is_alike(shards[0].fqn, fqn)
        if told is not None:
            return told
        ours, others = (
            [replace(shard, fqn=name, tensor=torch.empty_like(shard.tensor, device="cpu")) for shard in shards]
            for name in (shards[0].fqn, fqn)
        )
        self.read([*ours, *others], None)
        return all(torch.equal(_bits(a.tensor), _bits(b.tensor)) for a, b in zip(ours, others, strict=True))

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
        try:
            return torch.load(record, map_location="cpu", weights_only=False)
        except Exception as cause:  # unpickling calls what it likes
            raise InputError(
                f"'{entry.fqn}' of {self.stored.place} cannot be made again ({type(cause).__name__}: {cause}). Run the "
                "code that saved it, or leave it out of the objects."
            ) from cause

    def _have(self, shards: Sequence[LocalShard]) -> dict[str, Any]:
        return {shard.fqn: self.stored.pieces(shard.fqn) for shard in shards}

    def _aim(self, shards: Sequence[LocalShard]) -> None:
        """Take the memory that the next reads go to."""
        self._shards, self._arrays = shards, [elements_of(shard.tensor) for shard in shards]
        on_cuda = any(shard.tensor.is_cuda for shard in shards)
        self.fetcher.room = _pinned if on_cuda else aligned_buffer

    def _index(self, transfer: ShardTransfer) -> tuple[Any, ...]:
        # The ellipsis keeps a 0-dim result an array: a view, not a copy.
        return (*transfer.box.within(self._shards[transfer.want].box), ...)

    def _place(self, transfer: ShardTransfer, elements: NDArray[Any]) -> None:
        """Copy elements that were read to where they belong."""
        array = self._arrays[transfer.want]
        if array is not None:
            np.copyto(array[self._index(transfer)], elements)
            return
        memory = np.ascontiguousarray(elements).reshape(elements.shape)
        memory = memory if memory.flags.writeable else memory.copy()  # torch has no read-only tensors
        self._put(transfer, torch.from_numpy(memory).view(self._shards[transfer.want].tensor.dtype))

    def _put(self, transfer: ShardTransfer, elements: torch.Tensor) -> None:
        """Copy elements from any device to where they belong."""
        with torch.no_grad():
            self._shards[transfer.want].tensor[self._index(transfer)].copy_(elements)

    def _flat(self, transfer: ShardTransfer) -> NDArray[np.uint8] | None:
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


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as bytes: NaN equals itself, and 0 is not -0."""
    return tensor.reshape(-1).view(torch.uint8)


def _want(shard: LocalShard) -> Shard:
    return Shard(shard.fqn, shard.shape, shard.dtype, shard.box)


def _pinned(num_bytes: int) -> NDArray[np.uint8]:
    """Return host memory from which a device copies at full speed."""
    found: NDArray[np.uint8] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return found


def verify_whole(stored: StoredCheckpoint) -> None:
    """Raise `DamageError` when any byte of a checkpoint is damaged beyond repair."""
    if stored.folder is not None:
        report = verify_all(stored.folder)
    elif stored.store is not None:
        report = verify_store(stored.store)
    else:
        raise InputError("verify='full' needs a folder or a store. Pass verify='read': all that is read is compared.")
    if report.status == "lost":
        found = [f"{damage.file} at byte {damage.offset_bytes} ({damage.tensor})" for damage in report.damaged]
        raise DamageError(f"{stored.place} is damaged: {listed(found, '; ')}. Restore an older step.")
