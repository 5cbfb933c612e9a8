"""Records whose elements do not lie row by row: compressed, transposed, or changed by one of DCP's extensions.

>>> import io
>>> from headway.storage.formats.dcp import Chunk, StoredTensor
>>> file = io.BytesIO()
>>> torch.save(torch.arange(4, dtype=torch.int16).view(2, 2).t(), file)
>>> chunk = Chunk("a", 0, 0, (), (0, 0), (2, 2))
>>> bytes(unpack(file.getvalue(), StoredTensor("int16", (2, 2), (chunk,)), chunk))
b'\\x00\\x00\\x02\\x00\\x01\\x00\\x03\\x00'
"""

from __future__ import annotations

import io
import pickle
from typing import IO, TYPE_CHECKING, cast

import torch
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

from headway.core.errors import DamageError, FormatError
from headway.storage.formats.dcp import Chunk, StoredTensor

if TYPE_CHECKING:
    from typing_extensions import Buffer


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
