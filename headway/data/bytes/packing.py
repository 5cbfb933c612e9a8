"""Examples and batches as plain memory: nested values in a buffer of the caller's, and views of them on the other side.

Use it to put a batch into a slot of shared memory, or an example into a cache
of bytes. Dicts, lists, tuples (named ones too), str, bytes, int, float, bool,
None, numpy arrays and scalars are what may be inside. `pack` measures, so that
the room can be found first; `write` copies each array once, to where it stays;
`unpack` copies no array. There is no pickle: who can write the bytes can send
data, not code.

    buffer: length of the head (4 bytes) | head (MessagePack) | arrays, each at a multiple of 64

A `Stacked` is an array that does not exist yet: rows that are written one
behind the other. A `Marked` array says what it was (a tensor); `unpack` hands
both to a function of the caller's.

>>> parcel = pack({"image": np.arange(3, dtype=np.uint8), "size": (2, 3.5, None)})
>>> room = bytearray(parcel.num_bytes)
>>> parcel.write(room)
>>> unpack(room)
{'image': array([0, 1, 2], dtype=uint8), 'size': (2, 3.5, None)}
>>> pack({"meta": [object()]})
Traceback (most recent call last):
headway.core.errors.InputError: ['meta'][0] is of type object, which cannot be sent as plain memory. Make it a ...

What torch's default collate function makes of examples, planned without torch: rows stay rows until written.

A server collates straight into a slot of shared memory. The result is a tree
for `headway.data.bytes.packing`: each tensor to be is a `Marked` stack of rows. What
torch would refuse, or nobody is sure of, is left to torch itself, which then
runs on the examples where they arrive.

>>> tree = collated([{"x": np.zeros(2, np.uint8), "label": 1}, {"x": np.ones(2, np.uint8), "label": 7}])
>>> tree["label"].array.tolist(), len(tree["x"].array.rows), tree["x"].mark
([1, 7], 2, 'tensor')
>>> collated([1, None]) is None
True
"""

from __future__ import annotations

import struct
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DamageError, InputError

ALIGN = 64
"""Arrays begin at multiples of this many bytes, a cache line."""

MOST_DEPTH = 50
"""Containers inside each other."""

_KINDS = "biufcmMSU"
"""Kinds of numpy types that are plain memory."""

_HEAD = struct.Struct("<I")
_LIST, _TUPLE, _NAMED, _DICT, _ARRAY, _SCALAR, _INTEGER = range(7)
_WORD = 1 << 63

Array = NDArray[Any]


class Marked(NamedTuple):
    """An array (or rows of one) that stands for something else; `mark` says what."""

    array: Any
    mark: str


@dataclass(frozen=True, slots=True)
class Stacked:
    """[len(rows), ...] An array to be: rows of one shape and type, written straight to their place."""

    rows: Sequence[Array]

    def __post_init__(self) -> None:
        """Raise `InputError` on no rows, or rows that differ in shape or type."""
        if not self.rows:
            raise InputError("there are no rows to stack. Pass at least one.")
        first = self.rows[0]
        for place, row in enumerate(self.rows):
            if row.shape != first.shape or row.dtype != first.dtype:
                raise InputError(
                    f"row {place} is {row.dtype}{list(row.shape)}, row 0 is {first.dtype}{list(first.shape)}. "
                    "Make them one shape and type, or pass a collate_fn."
                )


@dataclass(slots=True)
class Parcel:
    """A value measured and ready to be written."""

    head: bytes = b""
    num_bytes: int = 0
    """Room that `write` needs."""
    parts: list[tuple[int, Array | Stacked]] = field(default_factory=list)
    """Offset behind the head, and what goes there."""

    def to_bytes(self) -> bytes:
        """Return everything as bytes of its own, in one copy."""
        begin = _aligned(_HEAD.size + len(self.head))
        pieces: list[Any] = [_HEAD.pack(len(self.head)), self.head]
        at = _HEAD.size + len(self.head)
        for offset, source in self.parts:
            array = np.stack(source.rows) if isinstance(source, Stacked) else source
            pieces += [bytes(begin + offset - at), array.reshape(-1).view(np.uint8).data]
            at = begin + offset + array.nbytes
        return b"".join([*pieces, bytes(self.num_bytes - at)])

    def write(self, buffer: bytearray | memoryview) -> None:
        """Copy everything into `buffer`. Raises `InputError` when it is shorter than `num_bytes`."""
        if len(buffer) < self.num_bytes:
            raise InputError(f"{self.num_bytes} bytes do not fit into {len(buffer)}. Pass a larger buffer.")
        _HEAD.pack_into(buffer, 0, len(self.head))
        buffer[_HEAD.size : _HEAD.size + len(self.head)] = self.head
        begin = _aligned(_HEAD.size + len(self.head))
        for offset, source in self.parts:
            rows = source.rows if isinstance(source, Stacked) else (source,)
            shape, dtype = (len(rows), *rows[0].shape), rows[0].dtype
            place: Array = np.ndarray(shape, dtype, buffer, begin + offset)
            for row, found in zip(place, rows, strict=True) if rows[0].ndim else ((place, np.stack(rows)),):
                np.copyto(row, found)


def pack(value: object) -> Parcel:
    """Measure `value`. Raises `InputError` naming the place and type of what cannot be sent."""
    parcel = Parcel()
    offset = [0]
    try:
        parcel.head = _ENCODER.encode(_noted(value, "", parcel.parts, offset, MOST_DEPTH))
    except UnicodeEncodeError as error:
        raise InputError(f"a text holds half a character ({error}). Use text that UTF-8 can write.") from error
    parcel.num_bytes = _aligned(_HEAD.size + len(parcel.head)) + offset[0]
    return parcel


def unpack(buffer: bytes | bytearray | memoryview, *, marked: Callable[[Array, str], object] = Marked) -> Any:
    """Return what was packed; arrays are views of `buffer`, read-only when it is.

    A marked array is what `marked` makes of (array, mark). Named tuples come
    back with their names, in a class of their own. Raises `DamageError` on
    bytes that `pack` did not make.
    """
    try:
        (length,) = _HEAD.unpack_from(buffer, 0)
        head = _DECODER.decode(memoryview(buffer)[_HEAD.size : _HEAD.size + length])
        return _value(head, buffer, _aligned(_HEAD.size + length), marked)
    except (struct.error, msgspec.DecodeError, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise DamageError(f"{len(buffer)} bytes hold no packed value ({error}). Pass what pack() wrote.") from error


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder()


def _noted(value: Any, place: str, parts: list[tuple[int, Array | Stacked]], offset: list[int], depth: int) -> Any:
    """Return the head's note of `value`, appending the arrays in it to `parts`. Raises `InputError`."""
    kind = type(value)
    if kind in (str, bytes, float, bool, type(None)):
        return value
    if kind is int:
        return value if -_WORD <= value < _WORD else [_INTEGER, str(value)]
    if depth == 0:
        raise InputError(f"{place} lies in more than {MOST_DEPTH} containers. Make the example flatter.")
    if isinstance(value, (list, tuple)) and kind not in (Marked,):
        notes = [_noted(part, f"{place}[{k}]", parts, offset, depth - 1) for k, part in enumerate(value)]
        if hasattr(value, "_fields"):
            return [_NAMED, kind.__name__, list(value._fields), notes]
        return [_TUPLE if isinstance(value, tuple) else _LIST, notes]
    if isinstance(value, Mapping):
        keys = [_noted(key, f"{place} key {key!r}", parts, offset, depth - 1) for key in value]
        return [_DICT, keys, [_noted(value[k], f"{place}[{k!r}]", parts, offset, depth - 1) for k in value]]
    if isinstance(value, np.generic):
        return [_SCALAR, _array(np.asarray(value), "", place, parts, offset)]
    mark = ""
    if kind is Marked:
        value, mark = value
    if isinstance(value, Stacked) or type(value) in (np.ndarray, np.memmap):
        return _array(value, mark, place, parts, offset)
    raise InputError(
        f"{place or 'it'} is of type {kind.__qualname__}, which cannot be sent as plain memory. Make it a number, "
        "a text, an array, or a list, tuple or dict of these."
    )


def _array(
    value: Array | Stacked, mark: str, place: str, parts: list[tuple[int, Array | Stacked]], offset: list[int]
) -> list[Any]:
    """Return the note of an array, and give it its place: [kind, type, shape, offset, axes, mark]."""
    one = value.rows[0] if isinstance(value, Stacked) else value
    if one.dtype.kind not in _KINDS or not one.dtype.isnative or one.dtype.metadata:
        raise InputError(
            f"{place or 'it'} is an array of {one.dtype}, which is not plain memory of this machine. "
            "Convert it with .astype() to a native numeric type."
        )
    axes: list[int] = []
    if isinstance(value, Stacked):
        shape = (len(value.rows), *one.shape)
    else:
        if not value.flags.c_contiguous:
            # What lies in memory in another order (channels last) keeps it: an order is part of a batch's speed.
            axes = [int(axis) for axis in np.argsort([-abs(stride) for stride in value.strides], kind="stable")]
            value = value.transpose(axes)
        shape = value.shape
    begin = _aligned(offset[0])
    offset[0] = begin + prod(shape) * one.dtype.itemsize
    parts.append((begin, value))
    return [_ARRAY, one.dtype.str, list(shape), begin, axes, mark]


def _value(note: Any, buffer: Any, begin: int, marked: Callable[[Array, str], object]) -> Any:
    """Return what `note` describes."""
    if not isinstance(note, list):
        return note
    kind, *rest = note
    if kind == _ARRAY:
        name, shape, offset, axes, mark = rest
        dtype = np.dtype(name)
        if dtype.kind not in _KINDS:
            raise ValueError(f"an array of {dtype}")
        array: Array = np.ndarray(shape, dtype, buffer, begin + offset)
        if axes:
            array = array.transpose(np.argsort(axes))
        return marked(array, mark) if mark else array
    if kind == _SCALAR:
        return _value(rest[0], buffer, begin, marked)[()]
    if kind == _INTEGER:
        return int(rest[0])
    inside = [_value(part, buffer, begin, marked) for part in rest[-1]]
    if kind == _DICT:
        keys = [_value(key, buffer, begin, marked) for key in rest[0]]
        return dict(zip(keys, inside, strict=True))
    if kind == _NAMED:
        return _named(rest[0], tuple(rest[1]))(*inside)
    if kind not in (_LIST, _TUPLE):
        raise ValueError(f"a note of kind {kind!r}")
    return tuple(inside) if kind == _TUPLE else inside


@lru_cache(256)
def _named(name: str, fields: tuple[str, ...]) -> Callable[..., Any]:
    """Return a class of named tuples; equal names share one."""
    return namedtuple(name, fields)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


# What torch's default collate function makes of examples, planned without torch: rows stay rows until written.

TENSOR = "tensor"
"""Mark of an array that is a torch tensor; "tensor:bfloat16" where numpy has no such type and holds its bits."""

_NUMBERS: dict[type, type] = {bool: np.bool_, int: np.int64, float: np.float64}
"""Python's numbers, and what torch makes of them."""

_TORCH_KINDS = "biufc"


class _LeaveItError(Exception):
    """Torch shall decide."""


def collated(examples: list[Any]) -> Any | None:
    """Return the tree of a batch, or None where the examples must be sent as they are."""
    try:
        return _collated(examples) if examples else None
    except (_LeaveItError, OverflowError):
        return None


def _collated(parts: Sequence[Any]) -> Any:
    first = parts[0]
    kind = type(first)
    if any(type(part) is not kind for part in parts):
        raise _LeaveItError
    if kind in _NUMBERS:
        return Marked(np.array(parts, _NUMBERS[kind]), TENSOR)
    if kind in (str, bytes):
        return parts  # a tuple inside of a sequence, else a list: as torch has it
    if kind is Marked:
        if any(part.mark != first.mark for part in parts):
            raise _LeaveItError
        return Marked(_stacked([part.array for part in parts]), first.mark)
    if kind is np.ndarray or isinstance(first, np.generic):
        return Marked(_stacked([np.asarray(part) for part in parts]), TENSOR)
    if kind is dict:
        return _mapping(parts)
    if isinstance(first, (tuple, list)):
        return _sequence(parts)
    raise _LeaveItError


def _stacked(rows: list[Any]) -> Stacked:
    first = rows[0]
    wide = first.dtype.itemsize > (16 if first.dtype.kind == "c" else 8)
    if (
        wide
        or first.dtype.kind not in _TORCH_KINDS
        or any(r.shape != first.shape or r.dtype != first.dtype for r in rows)
    ):
        raise _LeaveItError
    return Stacked(rows)


def _mapping(parts: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    first = parts[0]
    if any(key not in part for part in parts for key in first):
        raise _LeaveItError
    return {key: _collated([part[key] for part in parts]) for key in first}


def _sequence(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if any(len(part) != len(first) for part in parts):
        raise _LeaveItError
    columns = [_collated(column) for column in zip(*parts, strict=True)]
    made: Callable[..., Any] | None = type(first) if hasattr(first, "_fields") else None
    # Torch makes a list of a plain tuple, and keeps a named one.
    return made(*columns) if made is not None else columns
