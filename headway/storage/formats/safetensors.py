"""The head of a safetensors file: which tensors it holds, and whether its bytes add up.

A file is 8 bytes of length, a JSON header, and the elements of all tensors
without a gap. The format has no checksum, so a flipped bit in the elements
cannot be found; every rule that it does have is checked here. Offsets are
bytes from the start of the file.

>>> import json
>>> head = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
>>> header = read_header(struct.pack("<Q", len(head)) + head, len(head) + 16, "x.safetensors")
>>> header.tensors["w"].dtype, header.tensors["w"].offset == header.data_offset == len(head) + 8
('float32', True)
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from headway.core.errors import FormatError
from headway.core.files.safe_files import decode_json
from headway.storage.formats.values import FROM_SAFETENSORS, ITEM_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

LARGEST_HEADER_BYTES = 100_000_000
"""The format's own limit."""

MOST_DIMS = 64
"""Dimensions that a tensor may have: torch's own limit."""


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """One tensor of a safetensors file."""

    dtype: str
    """Name in torch."""

    shape: tuple[int, ...]
    """[d] Lengths."""

    offset: int
    """Where its elements begin in the file."""

    num_bytes: int
    """Bytes of its elements."""


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The head of a safetensors file."""

    data_offset: int
    """Where the elements of all tensors begin."""

    tensors: dict[str, HeaderTensor]
    """Name -> tensor, in the order of the file."""

    metadata: dict[str, str] = field(default_factory=dict)
    """What the writer noted."""


def is_safetensors(head: Buffer, num_bytes: int) -> bool:
    """Say whether bytes begin as a safetensors file of `num_bytes` does."""
    first = bytes(memoryview(head)[:9])
    return len(first) == 9 and first[8:] == b"{" and 8 + struct.unpack_from("<Q", first)[0] <= num_bytes


def read_header(head: Buffer, num_bytes: int, name: str) -> SafetensorsHeader:
    """Return the header of a file of `num_bytes`, from its first bytes `head`, which hold it.

    Raises `FormatError` naming the tensor and the rule when the file breaks one: a name once, a known dtype, bytes
    that match dtype and shape, no gap, no overlap, nothing left over.
    """
    view = memoryview(head).cast("B")
    size = struct.unpack_from("<Q", view)[0] if len(view) >= 8 else -1
    if not 2 <= size <= min(LARGEST_HEADER_BYTES, num_bytes - 8, len(view) - 8):
        raise FormatError(f"{name} has a header of {size} bytes in a file of {num_bytes}: cut short? Use another copy.")
    text = bytes(view[8 : 8 + size])
    header = decode_json(text, f"{name} has a header that cannot be read; it", dict[str, Any], file_bytes=num_bytes)
    metadata = _typed(header.pop("__metadata__", None), dict[str, str] | None, "__metadata__", name) or {}
    found = {fqn: _tensor(fqn, _typed(facts, _TensorFacts, fqn, name), 8 + size, name) for fqn, facts in header.items()}
    found = dict(sorted(found.items(), key=lambda pair: (pair[1].offset, pair[1].num_bytes)))
    at = 8 + size
    for fqn, tensor in found.items():
        if tensor.offset != at:
            raise FormatError(f"{name}: {fqn!r} begins at {tensor.offset}, not at {at} where the one before it ends. \
Use another copy.")  # fmt: skip
        at += tensor.num_bytes
    if at != num_bytes:
        raise FormatError(f"{name} has {num_bytes} bytes; its tensors end at {at}. Use another copy.")
    return SafetensorsHeader(8 + size, found, metadata)


class _TensorFacts(msgspec.Struct, forbid_unknown_fields=True):
    """What the header says of a tensor."""

    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]


def _typed(value: Any, kind: Any, fqn: str, name: str) -> Any:
    """Return a part of the header as the type that it must have; text is no number, true is none, 1.5 is none."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as cause:
        raise FormatError(f"{name}: {fqn!r} has facts that cannot be: {cause}. Use another copy.") from cause


def _tensor(fqn: str, facts: _TensorFacts, base: int, name: str) -> HeaderTensor:
    shape, (start, stop) = tuple(facts.shape), facts.data_offsets
    dtype = FROM_SAFETENSORS.get(facts.dtype)
    if dtype is None:
        raise FormatError(f"{name}: {fqn!r} has the dtype {facts.dtype!r}, which headway does not know. Install a \
newer one.")  # fmt: skip
    if len(shape) > MOST_DIMS or stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
        product = math.prod(shape[:MOST_DIMS]) * ITEM_BYTES[dtype]  # of so many digits that Python prints none of them
        needed = product if product < 1 << 64 else "more than any file has"
        raise FormatError(
            f"{name}: {fqn!r} has {stop - start} bytes; {facts.dtype} {list(shape[:8])} needs {needed}. "
            "Use another copy."
        )
    return HeaderTensor(dtype, shape, base + start, stop - start)
