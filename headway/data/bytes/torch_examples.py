"""Examples as bytes, and bytes as fresh copies of them.

A cached example must come back as its own copy, equal to the last bit and of
the same types. Tensors and arrays travel as raw memory; everything else is
pickled. `equal` is the strict comparison that the purity probe rests on.

>>> example = {"image": torch.arange(3, dtype=torch.uint8), "label": 7}
>>> copy = decode(encode(example))
>>> equal(copy, example), copy["image"] is example["image"]
(True, False)

A batch's tensors, filled row by row as examples come, so that torch's default collate function has nothing to copy.

Each tensor or array of an example is copied once, while it is warm, into its
row of the batch; what `default_collate` would have stacked is there already.
Everything else (numbers, text, structure) is left to `default_collate`, whose
results are matched to the last bit, type and stride.

>>> rows = BatchRows(2, BatchMemory())
>>> examples = [rows.placed(k, (torch.full((1024,), k), k)) for k in range(2)]
>>> data, labels = rows.collated(examples)
>>> data.shape, labels, torch.equal(data, default_collate([torch.full((1024,), k) for k in range(2)]))
(torch.Size([2, 1024]), tensor([0, 1]), True)
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map
from torch.utils.data.dataloader import default_collate as default_collate

from headway.core.machine.interruptions import pass_on


def encode(example: object) -> bytes:
    """Serialise an example; raises what `pickle` raises when a part cannot be."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(example)
    return buffer.getvalue()


def encode_plain(example: object, most_bytes: int) -> bytes | None:
    """Serialise what is plain data with little memory: None for more, and for tensors that are more than their values.

    Two tensors on the same memory, for example, would not share it any more. Raises nothing.
    """
    buffer = io.BytesIO()
    try:
        _PlainPickler(buffer, most_bytes).dump(example)
    except Exception as cause:  # what else cannot be serialised is for the caller to find
        pass_on(cause)
        return None
    return buffer.getvalue() if buffer.tell() <= most_bytes else None


def decode(payload: bytes | memoryview) -> Any:
    """Return a fresh copy of what `encode` was given. The bytes are our own process family's, never a stranger's."""
    return pickle.loads(payload)


class _Pickler(pickle.Pickler):
    """A pickler for which a plain CPU tensor is its memory, type and shape: 20 times cheaper than torch's own way."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_plain(obj):
            raw = obj.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if obj.numel() else b""
            shape, stride = tuple(obj.shape), obj.stride()
            # Dimensions of size 1 have any stride: torchvision's ToTensor leaves (1, 28, 1) on an image of one channel.
            odd = () if stride == _canonical_stride(shape) else (stride,)
            return _tensor, (raw, obj.dtype, shape, *odd)
        return NotImplemented


class _PlainPickler(_Pickler):
    """A pickler that gives up at what `encode_plain` does not take."""

    def __init__(self, buffer: io.BytesIO, most_bytes: int) -> None:
        super().__init__(buffer, protocol=5)
        self._left, self._memory = most_bytes, set[int]()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            memory = obj.untyped_storage().data_ptr()
            self._left -= obj.nbytes
            plain = type(obj) is torch.Tensor and _is_plain(obj) and obj.stride() == _canonical_stride(obj.shape)
            if self._left < 0 or memory in self._memory or not plain:
                raise ValueError("not plain")
            self._memory.add(memory)
        elif isinstance(obj, np.ndarray):
            self._left -= obj.nbytes
            if self._left < 0:
                raise ValueError("not little")
        return super().reducer_override(obj)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether memory, type and shape say all there is to say of `tensor`."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.is_contiguous()
        and not tensor.__dict__
    )


def _canonical_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides that torch gives a new tensor of this shape.

    >>> _canonical_stride((1, 28, 28)), _canonical_stride((2, 0, 3))
    ((784, 28, 1), (3, 3, 1))
    """
    stride, step = list[int](), 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _tensor(
    raw: bytes, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Rebuild a tensor on memory of its own; `stride` in elements, where it is not the one of a new tensor."""
    if not raw:
        empty = torch.empty(shape, dtype=dtype)
        return empty if stride is None else empty.as_strided(shape, stride)
    tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype)
    return tensor.view(shape) if stride is None else tensor.as_strided(shape, stride)


def equal(left: object, right: object) -> bool:
    """Tell whether two examples are the same: types, shapes, bits. What it cannot look into counts as unequal."""
    if type(left) is not type(right):
        return False
    for kind, same in _COMPARE:
        if isinstance(left, kind):
            return same(left, right)
    return False


PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, np.generic)
"""Types of values of which a copy is as good as the value itself."""


def is_plain_data(value: object) -> bool:
    """Tell whether a value consists of arrays, tensors, numbers and text, in lists, tuples and dicts.

    >>> from pathlib import Path
    >>> is_plain_data({"image": torch.zeros(2), "label": (7, "cat")}), is_plain_data([Path("a")])
    (True, False)
    """
    kind = type(value)
    if kind in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return all(map(is_plain_data, value))  # type: ignore[call-overload]  # a named tuple is one too
    if isinstance(value, dict):
        return kind is dict and all(map(is_plain_data, value)) and all(map(is_plain_data, value.values()))
    if isinstance(value, np.ndarray):
        return kind is np.ndarray and not value.dtype.hasobject
    return (
        (isinstance(value, torch.Tensor) and kind is torch.Tensor and _is_plain(value))
        or kind in PLAIN_TYPES
        or (isinstance(value, np.generic))
    )


def memory(value: object) -> set[int]:
    """Return the addresses of the tensors and arrays in a batch: two batches with one in common share memory."""
    return {address for _, address in _places(value)}


def aliased(value: object) -> bool:
    """Tell whether two tensors or arrays of an example share memory, which their copies would not.

    >>> row = torch.zeros(2)
    >>> aliased([row, row[:1]]), aliased([row, row])
    (True, False)
    """
    found = _places(value)
    return len({address for _, address in found}) < len(found)


def lost_in_copy(value: object) -> str | None:
    """Say what another process could not hand over of a batch, or None: pickling loses it without a word.

    Lost are attributes that hang on a tensor or array, the class of an array, a lazy conjugation, and memory that an
    array shares with another part of the batch. Tensors that share memory go on sharing it.

    >>> row = torch.zeros(2)
    >>> lost_in_copy([row, row[:1]]), lost_in_copy([row, row.numpy()])
    (None, 'an array of it shares memory with another part')
    """
    parts = list(_arrays(value))
    for part in parts:
        if isinstance(part, np.ndarray) and type(part) not in (np.ndarray, np.memmap):
            return f"a {type(part).__name__} of it is more than an array"
        if isinstance(part, torch.Tensor) and (part.__dict__ or part.is_conj() or part.is_neg()):
            return "a tensor of it has attributes of its own, or is conjugated lazily"
    if any(isinstance(part, np.ndarray) for part in parts) and aliased(parts):
        return "an array of it shares memory with another part"
    return None


def _arrays(value: object) -> Iterator[Any]:
    """Yield the tensors and arrays in a batch, those of objects too."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        yield value
    elif isinstance(value, (str, bytes, int, float, type(None))):
        return
    else:
        inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
        for part in (*inside, *getattr(value, "__dict__", {}).values()):
            yield from _arrays(part)


def _places(value: object) -> set[tuple[int, int]]:
    """Return of each tensor and array its identity and its address."""
    if isinstance(value, torch.Tensor):
        own = value.device.type == "cpu" and value.layout is torch.strided and value.numel()
        found = {(id(value), value.untyped_storage().data_ptr())} if own else set()
    elif isinstance(value, np.ndarray):
        base = value
        while isinstance(base.base, np.ndarray):
            base = base.base
        found = {(id(value), base.__array_interface__["data"][0])} if value.size else set()
    elif isinstance(value, Mapping):
        found = _places(list(value.values()))
    elif isinstance(value, (list, tuple)):
        found = {place for part in value for place in _places(part)}
    else:
        found = {place for part in getattr(value, "__dict__", {}).values() for place in _places(part)}
    return found


def _equal_tensors(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape or left.layout != right.layout:
        return False
    if left.stride() != right.stride() or left.requires_grad != right.requires_grad or left.device != right.device:
        return False
    left_bytes, right_bytes = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (left, right))
    return torch.equal(left_bytes, right_bytes) if left.numel() else True


def _equal_arrays(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype.hasobject:
        return all(equal(a, b) for a, b in zip(left.ravel().tolist(), right.ravel().tolist(), strict=True))
    return left.tobytes() == right.tobytes() and left.flags.f_contiguous == right.flags.f_contiguous


def _equal_pickles(left: object, right: object) -> bool:
    """Compare objects without an equality of their own by their pickles."""
    try:
        return encode(left) == encode(right)
    except Exception as cause:  # an object that cannot be pickled cannot be cached either
        pass_on(cause)
        return False


_COMPARE: tuple[tuple[type | tuple[type, ...], Callable[[Any, Any], bool]], ...] = (
    (torch.Tensor, _equal_tensors),
    (np.ndarray, _equal_arrays),
    (Mapping, lambda left, right: list(left) == list(right) and all(equal(left[key], right[key]) for key in left)),
    ((str, bytes, bytearray, bool, int, type(None)), lambda left, right: bool(left == right)),
    (float, lambda left, right: struct.pack("<d", left) == struct.pack("<d", right)),  # NaN equals itself, 0.0 not -0.0
    ((list, tuple), lambda left, right: len(left) == len(right) and all(map(equal, left, right))),
    (object, _equal_pickles),
)
"""Kind of object -> how two of them are compared; the first match decides."""


# A batch's tensors, filled row by row as examples come, so that torch's default collate function has nothing to copy.

SMALL_BYTES = 4096
"""Smaller tensors are stacked as ever: that costs less than minding them."""

SPARE = 4
"""Arrays whose memory is kept for the next ones."""


class BatchMemory:
    """Memory of batches, used again once nobody has the batch any more: fresh pages cost 3 % of an image's CPU time."""

    def __init__(self) -> None:
        self._spare: deque[np.ndarray[Any, np.dtype[np.uint8]]] = deque(maxlen=SPARE)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, np.dtype[Any]]:
        """Return an array of whatever content; its memory comes back when it, and all tensors over it, are gone."""
        size = math.prod(shape) * dtype.itemsize
        raw = self._taken(size)
        array = raw[:size].view(dtype).reshape(shape)
        weakref.finalize(array, self._spare.append, raw).atexit = False
        return array

    def _taken(self, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        try:
            raw = self._spare.pop()  # the latest: it may be in a cache still
        except IndexError:
            return np.empty(size, np.uint8)
        return raw if size <= raw.size <= 2 * size else np.empty(size, np.uint8)

    def __reduce__(self) -> tuple[type[BatchMemory], tuple[()]]:
        """Leave the memory behind: another process has its own."""
        return BatchMemory, ()


class BatchRows:
    """Room for the examples of one batch, safe for threads."""

    def __init__(self, num_examples: int, memory: BatchMemory) -> None:
        self._num_examples, self._memory = num_examples, memory
        self._whole: dict[tuple[Any, ...], torch.Tensor] = {}
        """Place inside an example -> [num_examples, ...] tensor of the batch."""
        self._lock = threading.Lock()

    def placed(self, row: int, value: Any, place: tuple[Any, ...] = ()) -> Any:
        """Return `value`, the example for `row` or a part of it, with its large tensors and arrays moved into rows."""
        if type(value) is np.ndarray and value.dtype.kind in "biufc" and value.ndim and value.nbytes >= SMALL_BYTES:
            value = torch.as_tensor(value)
        if type(value) is torch.Tensor:
            return self._moved(row, value, place)
        if type(value) is dict:
            return {key: self.placed(row, part, (*place, key)) for key, part in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self.placed(row, part, (*place, k)) for k, part in enumerate(value))
        return value

    def collated(self, examples: list[Any]) -> Any:
        """Return what `default_collate` returns for the placed examples."""
        return collate(examples, collate_fn_map={**default_collate_fn_map, torch.Tensor: self._stacked})

    def _moved(self, row: int, tensor: torch.Tensor, place: tuple[Any, ...]) -> torch.Tensor:
        # A tensor of another layout would be stacked in that layout; one with a gradient keeps its history.
        if tensor.requires_grad or not _is_plain_row(tensor) or tensor.nbytes < SMALL_BYTES:
            return tensor
        whole = self._whole.get(place)
        if whole is None:
            with self._lock:
                whole = self._whole.get(place)
                if whole is None:
                    self._whole[place] = whole = self._new((self._num_examples, *tensor.shape), tensor.dtype)
        here = whole.select(0, row)
        return here.copy_(tensor) if tensor.shape == here.shape and tensor.dtype == here.dtype else tensor

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype not in _NUMPY:  # numpy has no such numbers
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(self._memory.array(shape, _NUMPY[dtype]))

    def _stacked(self, batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        """Return the tensor whose rows these are, in order; else stack them."""
        whole = batch[0]._base
        ours = [one for one in self._whole.values() if one is whole]
        if ours and len(batch) == len(ours[0]) and all(_is_row(part, ours[0], k) for k, part in enumerate(batch)):
            return ours[0]
        stacked: torch.Tensor = collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        return stacked


_NUMPY = {
    torch.from_numpy(np.empty(0, kind)).dtype: np.dtype(kind)
    for kind in ("?", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16")
}


def _is_row(part: object, whole: torch.Tensor, row: int) -> bool:
    return type(part) is torch.Tensor and part._base is whole and part.storage_offset() == row * whole.stride(0)


def _is_plain_row(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_quantized
