"""A rank's image written straight from tensors, record by record: no copy of the state, one pass over its bytes.

Use it where nobody waits for the save, or the tensors are a snapshot already
(DCP's plug-ins, conversion). The file is the same as the one that an agent
writes from an `Image`: records of torch's own making, each at a multiple of
4 KiB, their CRC-32s in place. Offsets are bytes.

>>> import tempfile
>>> from headway.storage.draft import open_draft
>>> draft = open_draft(tempfile.mkdtemp(), 7, "a", rank=0)
>>> written = write_image(draft, 0, [Part("w", torch.float32, (3,), (0,), (3,))], lambda index: torch.ones(3))
>>> written.pieces[0].payload_bytes, written.digested.num_bytes % 4096
(12, 0)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headway.checkpoint.agent.messages import Slot
from headway.checkpoint.agent.saving import WINDOW_BYTES, Sink
from headway.checkpoint.saves.image import Part, aligned, fits_torch, pickled, plan, template
from headway.core.errors import InputError
from headway.storage.digests import Digested, Digester, block_bytes_for, crc32
from headway.storage.draft import Draft
from headway.storage.manifest import FileEntry, Piece, StoredObject, entry_of, image_name
from headway.storage.stores import durable_file

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True)
class WrittenImage:
    """What one image holds."""

    name: str
    """Path inside the checkpoint."""

    rank: int
    """Whose it is."""

    digested: Digested
    """Digests of its blocks."""

    pieces: tuple[Piece, ...]
    """One per part, in their order."""

    objects: tuple[StoredObject, ...]
    """One per value, in their order."""

    @property
    def entry(self) -> FileEntry:
        """Return its entry in the manifest."""
        return entry_of(self.name, self.digested, rank=self.rank, kind="image")


@dataclass(frozen=True, slots=True)
class SerializedObject:
    """One object that is stored as bytes of torch.save."""

    fqn: str
    data: Buffer
    rank: int | None = None
    """Whose it is; None: everybody's."""
    any_world: bool = False


def write_image(
    draft: Draft,
    rank: int,
    parts: Sequence[Part],
    tensor_of: Callable[[int], torch.Tensor],
    values: Sequence[SerializedObject] = (),
) -> WrittenImage | None:
    """Write the image of `rank` into a draft, durably; None where there is nothing to write.

    `tensor_of(index)` returns the elements of a part, on any device; it is asked once for each, in their order.
    Raises `InputError` for a tensor of another type or shape than its part.
    """
    if not parts and not values:
        return None
    laid, name = plan(parts, rendered=not fits_torch()), image_name(rank)
    sizes = [memoryview(value.data).nbytes for value in values]
    num_bytes = laid.num_bytes + sum(map(aligned, sizes))
    with durable_file(draft.path / name) as file:
        stream = _Stream(file, Digester(block_bytes_for(num_bytes)))
        pieces = tuple(_record(stream, slot, tensor_of(index), name) for index, slot in enumerate(laid.slots))
        objects = []
        for value, size in zip(values, sizes, strict=True):
            at = stream.pad()
            objects.append(
                StoredObject(value.fqn, value.rank, name, at, size, stream.crc32_of(value.data), value.any_world)
            )
        stream.pad()
    return WrittenImage(name, rank, stream.digester.finish(), pieces, tuple(objects))


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's elements in row-major order, copied only where they do not lie so on the host."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array) if len(array) else memoryview(b"")


class _Stream:
    """A file that is written front to back, and digested on the way."""

    def __init__(self, file: Sink, digester: Digester) -> None:
        self._file, self.digester = file, digester
        self.num_bytes = 0

    def write(self, data: Buffer) -> None:
        """Append bytes, a window at a time: it is written while it is in cache."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), WINDOW_BYTES):
            window = view[start : start + WINDOW_BYTES]
            self.digester.update(window)
            self._file.write(window)
        self.num_bytes += len(view)

    def crc32_of(self, data: Buffer) -> int:
        """Append bytes; return their CRC-32."""
        self.digester.take_crc32()
        self.write(data)
        return self.digester.take_crc32()

    def pad(self) -> int:
        """Append zeros up to where a record may begin; return that place."""
        self.write(bytes(aligned(self.num_bytes) - self.num_bytes))
        return self.num_bytes


def _record(stream: _Stream, slot: Slot, tensor: torch.Tensor, name: str) -> Piece:
    """Append one record; return the piece."""
    kind: torch.dtype = getattr(torch, slot.dtype)
    if tensor.dtype != kind or tuple(tensor.shape) != slot.lengths:
        raise InputError(
            f"'{slot.fqn}' was planned as {kind} {list(slot.lengths)} and is {tensor.dtype} {list(tensor.shape)} now. "
            "Plan it again: save with HeadwayPlanner, and leave the state as it is meanwhile."
        )
    assert stream.pad() == slot.record_offset, "a record is written where the plan has it"
    payload = host_bytes(tensor)
    end = slot.payload_offset + slot.payload_bytes
    if slot.payload_bytes and not slot.crc_offsets:  # torch's records cannot be laid out ahead: it writes each
        stream.write(pickled(tensor.detach().cpu().contiguous()))
        crc = crc32(payload)
    else:
        frame = bytearray(slot.record_bytes - slot.payload_bytes)
        for at, fragment in template(kind, slot.lengths).fragments:
            at -= slot.payload_bytes if slot.record_offset + at >= end else 0
            frame[at : at + len(fragment)] = fragment
        cut = slot.payload_offset - slot.record_offset
        stream.write(frame[:cut])
        crc = stream.crc32_of(payload)
        for offset in slot.crc_offsets:
            at = offset - slot.record_offset - slot.payload_bytes
            frame[at : at + 4] = crc.to_bytes(4, "little")
        stream.write(frame[cut:])
    return Piece(
        slot.fqn, slot.dtype, slot.shape, slot.offsets, slot.lengths, name, slot.record_offset, slot.record_bytes,
        slot.payload_offset, slot.payload_bytes, crc,
    )  # fmt: skip
