"""A rank's checkpoint file, laid out in shared memory before anything is saved: a save is a copy into its slots.

The image is the `.distcp` file byte for byte: one torch.save zip per piece of a
tensor, each at a multiple of 4 KiB, its elements 64-byte aligned. The zips come
from the installed torch, written without their elements, so their size costs
nothing; each piece's elements are a slot, a tensor that views the memory. Only
the CRC-32s of the elements are missing: the agent puts them in while it
writes. Objects are pickled into the tail, anew at each save. Offsets are bytes.

>>> image = Image(plan([Part("w", torch.float32, (3,), (0,), (3,))]), tail_bytes=0)
>>> _ = image.slots[0].copy_(torch.tensor([1.0, 2.0, 3.0]))
>>> record = bytes(image.memory[: image.plan.slots[0].record_bytes])
>>> torch.load(io.BytesIO(record), weights_only=True)
tensor([1., 2., 3.])
"""

from __future__ import annotations

import io
import logging
import math
import mmap
import os
import zipfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.serialization import skip_data

from headway.checkpoint.agent.messages import Slot
from headway.checkpoint.agent.saving import payloads, persist
from headway.checkpoint.saves.image_space import take_room
from headway.checkpoint.state.shards import dtype_name
from headway.core.errors import FormatError, HeadwayError
from headway.core.machine.arena import shared_memory
from headway.core.wire.pace import RateLimiter

if TYPE_CHECKING:
    from typing_extensions import Buffer

LOG = logging.getLogger(__name__)
LOG.addHandler(logging.NullHandler())

RECORD_BYTES = 4096
"""Records begin at multiples of this."""

SPARE_TAIL_BYTES = 1 << 16
"""Room for objects beyond what they take at first: their pickles vary in length."""

_CUDA: Any = torch.cuda
"""Its runtime library, which torch does not type."""

_DESCRIPTOR = b"PK\x07\x08"
_CENTRAL_BYTES, _CENTRAL_CRC = 46, 16
"""Length of an entry of a zip's central directory without its texts, and where its CRC lies."""

PINNED_BYTES = 1 << 30
"""Memory is registered with CUDA in pieces of about this: one takes some tenths of a second, under a lock of the driver
that others wait for."""

_POPULATE = 23
"""MADV_POPULATE_WRITE: map all pages now rather than one fault at a time (Linux 5.14)."""


class Part(NamedTuple):
    """What one rank stores of one tensor: a box of it."""

    fqn: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """[d] Shape of the whole tensor."""
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    """[d] Of the box."""


@dataclass(frozen=True, slots=True)
class Template:
    """One record without its elements."""

    num_bytes: int
    """Length of the record."""
    fragments: tuple[tuple[int, bytes], ...]
    """What torch wrote: (offset, bytes), everything else being zero."""
    payload_offset: int
    payload_bytes: int
    crc_offsets: tuple[int, ...]
    """Where the payload's CRC-32 goes: data descriptor, central directory; () where there are no elements."""


class _Sparse(io.RawIOBase):
    """A file in memory that keeps only what was written: the elements that torch seeks over take no room."""

    def __init__(self) -> None:
        self.fragments: list[tuple[int, bytes]] = []
        self.num_bytes = self._at = 0

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.num_bytes}[whence]
        return self._at

    def write(self, data: Buffer, /) -> int:
        piece = bytes(data)
        self.fragments.append((self._at, piece))
        self._at += len(piece)
        self.num_bytes = max(self.num_bytes, self._at)
        return len(piece)

    def read(self, size: int | None = -1, /) -> bytes:
        end = self.num_bytes if size is None or size < 0 else min(self._at + size, self.num_bytes)
        found = bytearray(max(end - self._at, 0))
        for offset, piece in self.fragments:
            begin, stop = max(offset, self._at), min(offset + len(piece), end)
            if begin < stop:
                found[begin - self._at : stop - self._at] = piece[begin - offset : stop - offset]
        self._at += len(found)
        return bytes(found)


@lru_cache(maxsize=4096)  # of 2 kB each: shapes that change from save to save must not pile up
def template(dtype: torch.dtype, lengths: tuple[int, ...], *, skips: bool = True) -> Template:
    """Return the record of a contiguous tensor as the installed torch writes it; raises `FormatError`.

    With `skips` off torch writes the elements too, which takes as long as a save; the answer is the same.
    """
    file = _Sparse()
    with skip_data() if skips else nullcontext():
        torch.save(torch.empty(lengths, dtype=dtype), cast(IO[bytes], file))
    payload_offset, payload_bytes, crc_offsets = locate(file)
    expected = math.prod(lengths) * dtype.itemsize
    if payload_bytes != expected:
        raise FormatError(
            f"torch stores {lengths} {dtype} as {payload_bytes} bytes, not {expected}. Use another release of torch."
        )
    fragments = tuple((at, piece) for at, piece in file.fragments if at != payload_offset or not payload_bytes)
    return Template(file.num_bytes, fragments, payload_offset, payload_bytes, crc_offsets)


def locate(file: Any) -> tuple[int, int, tuple[int, ...]]:
    """Return offset and length of the elements in a record, and where their CRC-32 stands twice.

    Raises `FormatError` when the record is not the zip that torch has written since 1.6.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            central, data = archive.start_dir, None
            for info in archive.infolist():
                if info.filename.endswith("/data/0"):
                    data = info
                    break
                central += _CENTRAL_BYTES + len(info.filename.encode()) + len(info.extra) + len(info.comment)
    except zipfile.BadZipFile as cause:
        raise FormatError(f"torch wrote a record that is no zip ({cause}). Use a torch from 2.6 on.") from cause
    if data is None or data.compress_type != zipfile.ZIP_STORED:
        raise FormatError("torch wrote a record without plain elements. Use a torch from 2.6 on.")
    file.seek(data.header_offset + 26)
    name_bytes, extra_bytes = (int.from_bytes(file.read(2), "little") for _ in range(2))
    begin = data.header_offset + 30 + name_bytes + extra_bytes
    if not data.file_size:
        return begin, 0, ()  # nothing to checksum, and torch leaves the descriptor out
    file.seek(begin + data.file_size)
    if file.read(4) != _DESCRIPTOR:
        raise FormatError("torch wrote a record without a data descriptor. Use a torch from 2.6 on.")
    return begin, data.file_size, (begin + data.file_size + 4, central + _CENTRAL_CRC)


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """Where every piece lies."""

    slots: tuple[Slot, ...]
    """In the order of their offsets."""
    num_bytes: int
    """End of the last record, rounded up to where the next one may begin."""
    rendered: bool = False
    """Whether torch.save writes each record at each save: slow, for a torch whose records cannot be laid out ahead."""


def plan(parts: Sequence[Part], *, rendered: bool = False) -> ImagePlan:
    """Lay out one record after the other."""
    at, slots = 0, []
    for part in parts:
        record = template(part.dtype, part.lengths, skips=not rendered)
        crc_offsets = () if rendered else tuple(at + crc for crc in record.crc_offsets)
        slots.append(
            Slot(
                part.fqn, dtype_name(part.dtype), part.shape, part.offsets, part.lengths, at, record.num_bytes,
                at + record.payload_offset, record.payload_bytes, crc_offsets,
            )
        )  # fmt: skip
        at = aligned(at + record.num_bytes)
    return ImagePlan(tuple(slots), at, rendered)


def aligned(offset: int) -> int:
    """Return the next place where a record may begin."""
    return -(-offset // RECORD_BYTES) * RECORD_BYTES


def pickled(value: Any) -> bytes:
    """Return an object as torch.save stores it."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


class Image:
    """A plan in shared memory of its own, every page of it taken: no save meets a page fault, or too little memory.

    Close it once no slot is in use any more.
    """

    def __init__(self, laid: ImagePlan, *, tail_bytes: int, pin: torch.device | None = None) -> None:
        """Write all records but their elements, with room for `tail_bytes` of objects.

        `pin` is the CUDA device, if any, for copies from which (and from all others) `pin()` will lock the pages.
        Raises `HeadwayError` when the host has no memory for it.
        """
        self.plan = laid
        self.num_bytes = aligned(max(laid.num_bytes + tail_bytes, RECORD_BYTES))
        """Of the memory."""
        self.tail_bytes = self.num_bytes - laid.num_bytes
        """Room for objects."""
        self._share = take_room(self.num_bytes)
        self.file, self.mapped = shared_memory("headway-image", self.num_bytes)
        self._pin_on, self._pinned = pin, list[int]()  # addresses of the pieces that are registered
        self._pieces = pinned_pieces(laid.slots, self.num_bytes) if pin is not None else []
        try:
            os.posix_fallocate(self.file.fileno(), 0, self.num_bytes)
        except OSError as cause:
            self._release()
            raise HeadwayError(
                f"no {self.num_bytes} bytes of host memory for a snapshot ({cause.strerror}). Save with inflight=1, on "
                "more ranks, or give the host or its /dev/shm limit more memory."
            ) from cause
        if pin is None:  # registering maps them too, and Python's other threads need not wait for it
            with suppress(OSError, ValueError):  # an older kernel maps them as they are first used
                self.mapped.madvise(_POPULATE)
        self._share.filled()
        self.memory = memoryview(self.mapped)
        self._whole = torch.frombuffer(self.mapped, dtype=torch.uint8)
        self.slots = [self._slot(slot) for slot in laid.slots]
        """[pieces] One tensor per slot of the plan, which views the memory."""
        self._write_records()

    @property
    def is_pinned(self) -> bool:
        """Whether nothing is left to be registered with CUDA: a copy into the rest holds the host up."""
        return not self._pieces

    def pin(self, *, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Register what is not registered with CUDA yet: copies from devices run at full speed, beside the computation.

        Between two pieces it may be stopped, and called again. It does nothing where no device was named.
        """
        while self._pieces and not is_stopped():
            offset, num_bytes = self._pieces.pop(0)
            if not self._register(self._whole.data_ptr() + offset, num_bytes):
                self._pieces = []
                self._unpin()

    def render(self) -> None:
        """Write the records of a plan that is `rendered`; the slots hold the elements."""
        if not self.plan.rendered:
            return
        for slot, tensor in zip(self.plan.slots, self.slots, strict=True):
            record = pickled(tensor)
            if len(record) != slot.record_bytes:
                raise FormatError(
                    f"torch wrote {slot.fqn!r} in {len(record)} bytes, then {slot.record_bytes}. Save again."
                )
            self.memory[slot.record_offset : slot.record_offset + len(record)] = record

    def place(self, values: Sequence[bytes]) -> list[int] | None:
        """Write objects behind the slots; return their offsets, or None when they do not fit."""
        offsets, at = [], self.plan.num_bytes
        for value in values:
            offsets.append(at)
            at = aligned(at + len(value))
        if values and offsets[-1] + len(values[-1]) > self.num_bytes:
            return None
        for offset, value in zip(offsets, values, strict=True):
            self.memory[offset : offset + len(value)] = value
        return offsets

    def close(self) -> None:
        """Give the memory back, in this process; slots must not be used any more."""
        self._unpin()
        self.slots = []
        del self._whole
        self.memory.release()
        self._release()

    def _release(self) -> None:
        with suppress(BufferError):  # a slot that somebody still holds keeps it mapped
            self.mapped.close()
        self.file.close()
        self._share.give_back()

    def _slot(self, slot: Slot) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, slot.dtype)
        if self.plan.rendered or not slot.payload_bytes:
            return torch.empty(slot.lengths, dtype=dtype)
        flat = self._whole[slot.payload_offset : slot.payload_offset + slot.payload_bytes]
        return flat.view(dtype).view(slot.lengths)

    def _write_records(self) -> None:
        if self.plan.rendered:
            return
        for slot in self.plan.slots:
            record = template(getattr(torch, slot.dtype), slot.lengths)
            for offset, piece in record.fragments:
                at = slot.record_offset + offset
                self.memory[at : at + len(piece)] = piece

    def _register(self, start: int, num_bytes: int) -> bool:
        """Register a piece; return whether that worked.

        With the state's own device current: another would get a context for it, some hundred megabytes of its memory.
        """
        with _CUDA.device(self._pin_on):
            code = _CUDA.cudart().cudaHostRegister(start, num_bytes, 0)
        if int(code) == 0:
            self._pinned.append(start)
            return True
        with suppress(RuntimeError):
            torch.ones(1, device=self._pin_on)  # takes the error: torch would find it at the next kernel of training
        LOG.warning("cudaHostRegister failed with %s: the host waits for copies from the device", code)
        return False

    def _unpin(self) -> None:
        while self._pinned:
            with _CUDA.device(self._pin_on):
                _CUDA.cudart().cudaHostUnregister(self._pinned.pop())


def pinned_pieces(
    slots: Sequence[Slot], num_bytes: int, *, most_bytes: int = PINNED_BYTES, page_bytes: int = mmap.PAGESIZE
) -> list[tuple[int, int]]:
    """Return (offset, length) of the pieces in which memory is registered, of `most_bytes` where records allow it.

    They are cut where a record begins, at the start of a page: a copy fills the elements of one record, and CUDA may
    refuse one whose memory lies in two registrations. A record larger than `most_bytes` is a piece of its own.
    """
    cuts = [0]
    for slot in slots:
        at, end = slot.record_offset, slot.record_offset + slot.record_bytes
        if at > cuts[-1] and at % page_bytes == 0 and end - cuts[-1] > most_bytes:
            cuts.append(at)
    return [(at, end - at) for at, end in pairwise([*cuts, num_bytes])]


def cuda_device_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the first CUDA device that a state lies on; None where it lies on none, which then is left alone."""
    return next((tensor.device for tensor in tensors if tensor.is_cuda), None)


@cache
def fits_torch() -> bool:
    """Whether the installed torch reads our image back, bit for bit: tried once per process, on a small one."""
    try:
        samples = [torch.arange(5, dtype=torch.float32), torch.ones((2, 3), dtype=torch.bfloat16), torch.tensor(7)]
        parts = [
            Part(str(k), t.dtype, tuple(t.shape), (0,) * t.ndim, tuple(t.shape)) for k, t in enumerate(samples)
        ]  # fmt: skip
        image = Image(plan(parts), tail_bytes=0)
        for slot, sample in zip(image.slots, samples, strict=True):
            slot.copy_(sample)
        found = io.BytesIO()
        persist(image.memory, payloads(image.plan.slots), found, RateLimiter())
        stored = found.getvalue()
        same = all(_loads(stored, slot, t) for slot, t in zip(image.plan.slots, samples, strict=True))
        image.close()
        return same
    except (FormatError, RuntimeError, OSError, ValueError, zipfile.BadZipFile):
        LOG.warning("torch %s stores tensors in another way than expected", torch.__version__, exc_info=True)
        return False


def _loads(stored: bytes, slot: Slot, sample: torch.Tensor) -> bool:
    """Whether a record holds `sample`, for torch and for whoever checks its CRCs."""
    record = stored[slot.record_offset : slot.record_offset + slot.record_bytes]
    loaded = torch.load(io.BytesIO(record), weights_only=True)
    return zipfile.ZipFile(io.BytesIO(record)).testzip() is None and torch.equal(loaded, sample)
