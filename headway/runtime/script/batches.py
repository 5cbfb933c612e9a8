"""What a batch holds, read without any code of the script's: no method of its classes, no operator of torch.

A look in the training process must not be seen: a class of the script's may draw or empty itself when it is looped
over, decode in `values()`, count in `__torch_function__`; a mode or a profiler sees operators. So containers are read
by the methods of Python's own classes, attributes by their descriptor, tensors and arrays where they lie in memory.

>>> class Once(list):
...     def __iter__(self):
...         while len(self):
...             yield self.pop()
>>> batch = Once([1, "a"])
>>> checksum(batch) == checksum([1, "a"]), len(batch)
(True, 2)
"""

from __future__ import annotations

import ctypes
import sys
import zlib
from collections.abc import Iterable
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.runtime.script.object_graph import items_of

if TYPE_CHECKING:
    from torch import Tensor

IntMatrix = np.ndarray[tuple[int, ...], np.dtype[np.integer]]

DEEPEST = 16
"""Levels of a batch that are looked into; an object may hold itself."""

SHALLOW = 4
"""Levels of containers whose tensors and arrays are counted."""

SHORTEST_ROW, PADDED_ALIKE = 8, 0.9
"""Positions of the shortest rows that may be padded, and how many of those that seem to be end alike."""

LONGEST_LOOK = 1 << 20
"""Bytes of a tensor in which padding is looked for."""

WHOLE: dict[str, str] = {
    "torch.int64": "i8", "torch.int32": "i4", "torch.int16": "i2", "torch.uint8": "u1", "torch.bool": "u1",
}  # fmt: skip

FLOATS: dict[str, type[ctypes.c_float | ctypes.c_double]] = {
    "torch.float32": ctypes.c_float, "torch.float64": ctypes.c_double,
}  # fmt: skip


def batch_bytes(batch: Any, depth: int = 0) -> int:
    """Return the bytes of the tensors and arrays in a batch of nested lists, tuples and mappings.

    What does not say how large it is, as a sparse tensor, counts as 0.

    >>> batch_bytes({"x": [np.zeros(3), np.float32(1)], "y": "text"})
    28
    """
    kind, torch = type(batch), sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        with torch._C.DisableTorchFunction():
            is_plain = torch._C.TensorBase.layout.__get__(batch) is torch.strided
            return int(torch._C.TensorBase.nbytes.__get__(batch)) if is_plain else 0
    if issubclass(kind, np.ndarray):
        return int(np.ndarray.nbytes.__get__(batch))
    if issubclass(kind, np.generic):
        return int(np.generic.nbytes.__get__(batch))
    return sum(batch_bytes(value, depth + 1) for value in _values(batch, kind)) if depth <= SHALLOW else 0


def checksum(batch: Any, crc: int = 0, depth: int = 0) -> int:
    """Return a checksum of the content of a batch: of tensors, arrays and texts in containers and objects.

    What it cannot look into, or lies deeper than `DEEPEST`, counts by its type.

    >>> checksum([1, "a"]) == checksum([1, "a"]), checksum([1, "a"]) == checksum([1, "b"])
    (True, False)
    """
    torch, kind = sys.modules.get("torch"), type(batch)
    if depth > DEEPEST:
        return zlib.crc32(kind.__name__.encode(), crc)
    if issubclass(kind, (dict, list, tuple)):
        for value in _values(batch, kind, keys=True):
            crc = checksum(value, crc, depth + 1)
        return crc
    if (text := _text(batch, kind)) is not None:
        return zlib.crc32(text, crc)
    if torch is not None and issubclass(kind, torch.Tensor):
        if (parts := _sparse(batch)) is not None:
            return checksum(parts, crc, depth + 1)
        memory = tensor_memory(batch)
        return zlib.crc32(kind.__name__.encode() if memory is None else memory, crc)
    if issubclass(kind, np.ndarray) and np.ndarray.dtype.__get__(batch).hasobject:  # its bytes are addresses
        entries = np.ndarray.tolist(batch) if kind is np.ndarray else []
        return checksum(entries if isinstance(entries, list) else [entries], crc, depth + 1)
    if issubclass(kind, (np.ndarray, np.generic)):
        return zlib.crc32((np.ndarray if issubclass(kind, np.ndarray) else np.generic).tobytes(batch), crc)
    if kind.__module__.startswith(("PIL.", "array")) and hasattr(kind, "tobytes"):
        return zlib.crc32(batch.tobytes(), crc)
    # Graph libraries, for example, have a class of their own for a batch.
    return checksum(_attributes(batch, kind), zlib.crc32(kind.__name__.encode(), crc), depth + 1)


def tensor_memory(tensor: Any) -> bytes | None:
    """Return the numbers of a tensor in the order of its indices, as they lie in memory; None where they lie elsewhere.

    That is the case on a device, of a layout other than strided, of a tensor that only stands for others, or without
    any number. Of a tensor that is conjugated or negated when it is read, the mark is added.
    """
    torch: Any = sys.modules["torch"]
    base = torch._C.TensorBase
    with torch._C.DisableTorchFunction():
        is_plain = base.layout.__get__(tensor) is torch.strided and base.device.__get__(tensor).type == "cpu"
        if not is_plain or base.is_quantized.__get__(tensor) or base.is_nested.__get__(tensor):
            return None
        sizes, strides, width = tuple(base.size(tensor)), base.stride(tensor), int(base.element_size(tensor))
        address = base.data_ptr(tensor) if all(sizes) else 0
        marks = b"conjugated" * bool(base.is_conj(tensor)) + b"negated" * bool(base.is_neg(tensor))
    if not address:
        return None
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    memory = (ctypes.c_char * (span * width)).from_address(address)
    steps = [stride * width for stride in strides]
    read: bytes = np.ndarray(sizes, f"V{width}", memory, strides=steps).tobytes()
    return read + marks


def padding_share(tensors: Iterable[Tensor]) -> float:
    """Return how much of the rows [batch, positions] of whole numbers on a CPU is padding: the most of any tensor.

    Padding is one number that fills the ends, or the begins, of nearly all rows that end or begin with a number twice.

    Of a mask it is the value with the smaller share.

    >>> import torch
    >>> padding_share([torch.tensor([[5, 3, 8, 2, 7, 9, 4, 6], [5, 2, 0, 0, 0, 0, 0, 0], [4, 4, 9, 0, 0, 0, 0, 0]])])
    0.458
    """
    share = 0.0
    for tensor in tensors:
        dtype = WHOLE.get(str(tensor.dtype))
        if dtype is None or tensor.dim() != 2 or tensor.nbytes > LONGEST_LOOK:
            continue
        memory, (count, length) = tensor_memory(tensor), tensor.shape
        if memory is None or count < 2 or length < SHORTEST_ROW:
            continue
        rows = np.frombuffer(memory, dtype).reshape(count, length)
        # Of a mask either value may stand for padding, as either end of its rows is one number again and again.
        is_mask = len(np.unique(rows)) <= 2
        by_filler = _padding(rows, is_mask=is_mask)
        share = max(share, *(sorted([0.0, 0.0, *by_filler.values()])[-2:-1] if is_mask else by_filler.values()), 0.0)
    return round(share, 3)


def _padding(rows: IntMatrix, *, is_mask: bool) -> dict[int, float]:
    """Return filler -> its share of the numbers, as it fills rows [batch, positions] up at one end.

    A row of a mask that is one number all along has no end that would be filled up.
    """
    shares = dict[int, float]()
    for side in (rows, rows[:, ::-1]):
        differs = side[:, ::-1] != side[:, -1:]
        num_equal = np.where(
            differs.any(axis=1), differs.argmax(axis=1), 0 if is_mask else rows.shape[1]
        )  # alike at a row's end
        fillers, counts = np.unique(side[num_equal > 1, -1], return_counts=True)
        if counts.size and counts.max() >= PADDED_ALIKE * counts.sum():
            filler = int(fillers[counts.argmax()])
            shares[filler] = max(shares.get(filler, 0.0), float(num_equal[side[:, -1] == filler].sum() / rows.size))
    return shares


def _sparse(tensor: Any) -> list[Any] | None:
    """Return indices and values of a sparse tensor, where no mode of torch's listens; None for another one."""
    torch: Any = sys.modules["torch"]
    base = torch._C.TensorBase
    with torch._C.DisableTorchFunction():
        if base.layout.__get__(tensor) is not torch.sparse_coo or torch._C._len_torch_dispatch_stack():
            return None
        return [base._indices(tensor), base._values(tensor)]


def number_of(tensor: Any) -> float:
    """Return the one number of a plain tensor on the CPU; of float32 and float64 no operator reads it."""
    of_memory = FLOATS.get(str(tensor.dtype))
    return float(tensor.detach()) if of_memory is None else of_memory.from_address(tensor.data_ptr()).value


def _values(batch: Any, kind: type, *, keys: bool = False) -> list[Any]:
    """Return what a container holds, its keys before their values where asked for; nothing of anything else."""
    if issubclass(kind, dict):
        return [part for pair in items_of(batch) for part in (pair if keys else pair[1:])]
    return list((list if issubclass(kind, list) else tuple).__iter__(batch)) if issubclass(kind, (list, tuple)) else []


def _text(value: Any, kind: type) -> bytes | None:
    """Return a plain value as bytes, as its class of Python's has it; None for another one."""
    if issubclass(kind, str):
        return str.encode(value, errors="surrogatepass")
    if issubclass(kind, bytes):
        return bytes.__getitem__(value, slice(None))
    if issubclass(kind, int):
        return int.__repr__(value).encode()
    return float.__repr__(value).encode() if issubclass(kind, float) else b"None" if value is None else None


def _attributes(value: Any, kind: type) -> dict[str, object]:
    """Return an object's attributes, also where its class answers for `__dict__` itself."""
    if issubclass(kind, (type, FunctionType, ModuleType)):
        return {}
    held = next((vars(base)["__dict__"] for base in kind.__mro__ if "__dict__" in vars(base)), None)
    return held.__get__(value) if isinstance(held, (GetSetDescriptorType, MemberDescriptorType)) else {}
