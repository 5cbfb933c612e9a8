"""What a torch.save file holds, read without torch: its tensors, where their bytes lie, and its other values.

A record of a DCP checkpoint is such a file, at an offset of a `.distcp`.
The pickle inside is read by `safe_pickle`, so nothing that it names is
imported or called. Both of torch's forms are read: the zip archive (all of
today's files), and the stream of pickles that torch wrote before 1.6.
Offsets are bytes from the start of the file or record, strides and
`storage_offset` elements.

>>> transposed = PickledTensor("w", "float32", (2, 3), (1, 2), "0", 0)
>>> transposed.num_bytes, transposed.is_contiguous
(24, False)
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.core.errors import FormatError
from headway.core.files.inert import Room, StandIn
from headway.core.files.safe_files import RoomError
from headway.storage.digests import crc32
from headway.storage.formats.safe_pickle import load_from, loads, path_of
from headway.storage.formats.values import ATOMS, ITEM_BYTES, SHORT, STORAGE_DTYPES, StoredValue, plain
from headway.storage.formats.zip_files import ZipEntry, entries, has_checksums

if TYPE_CHECKING:
    from typing_extensions import Buffer

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_HEAD = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""A pickle of the magic number: how files of torch before 1.6 begin."""

QUANTIZED = "torch._utils._rebuild_qtensor"
"""Of a quantized tensor the scale and the zero point, of all or of each channel, are the fifth argument."""

STRIDED = {
    "torch._utils._rebuild_tensor": None, "torch._utils._rebuild_tensor_v2": None,
    "torch._utils._rebuild_tensor_v3": 6, QUANTIZED: None,
}  # fmt: skip
"""Functions that make a tensor from (storage, offset, size, stride, ...) -> which argument is its dtype, if any."""

MOST_DEPTH = 200
"""Containers in each other: a whole module that was pickled reaches 60."""

MOST_DIMS = 64
"""Dimensions that a tensor may have: torch's own limit."""

LEAF_BYTES, VISIT_BYTES = 150, 30
"""What a value or tensor that is found costs in memory beside its name, and what every look at a container counts."""


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor in a torch.save file."""

    fqn: str
    """The keys that lead to it, joined by dots; "" where the file is one tensor."""

    dtype: str
    """Name in torch."""

    shape: tuple[int, ...]
    """[d] Lengths."""

    strides: tuple[int, ...]
    """[d] Elements from one index to the next."""

    storage: str
    """Key of the storage that holds its elements: the zip entry `<archive>/data/<key>`."""

    storage_offset: int
    """Where in the storage it begins, in elements."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * ITEM_BYTES.get(self.dtype, 0)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in row-major order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != expected:
                return False
            expected *= max(size, 1)
        return True


@dataclass(frozen=True, slots=True)
class Saved:
    """A torch.save file: its tensors, where each storage lies, and its other values."""

    tensors: tuple[PickledTensor, ...]
    """Every tensor; views of one storage each have a line."""

    storages: dict[str, tuple[int, int]]
    """Key -> (offset, bytes) in the file."""

    values: tuple[StoredValue, ...] = ()
    """Every value that is no tensor; a list of plain values is one."""

    named: frozenset[str] = frozenset()
    """The globals that its pickle names, `module.name`: what a loader that trusts it imports and may call."""

    def place_of(self, tensor: PickledTensor) -> tuple[int, int]:
        """Return (offset, bytes) of a contiguous tensor's elements in the file.

        Raises `FormatError` when it is not contiguous, or its storage is missing or too short.
        """
        start, size = self.storages.get(tensor.storage, (0, -1))
        skip = tensor.storage_offset * ITEM_BYTES.get(tensor.dtype, 0)
        if not tensor.is_contiguous or skip + tensor.num_bytes > size:
            raise FormatError(
                f"the elements of {tensor.fqn or 'the tensor'!r} are no row-major run of bytes in the file. Load the "
                "record with torch instead."
            )
        return start + skip, tensor.num_bytes

    def names_of_storages(self) -> dict[str, str]:
        """Return key of a storage -> the names of the tensors in it, joined by a comma."""
        found: dict[str, list[str]] = {}
        for tensor in self.tensors:
            if tensor.fqn:
                found.setdefault(tensor.storage, []).append(tensor.fqn)
        return {key: ", ".join(names) for key, names in found.items()}


def is_legacy(head: Buffer) -> bool:
    """Say whether bytes begin as a file of torch before 1.6 does."""
    return bytes(memoryview(head)[: len(LEGACY_HEAD)]) == LEGACY_HEAD


def is_pickle(entry: ZipEntry) -> bool:
    """Say whether a zip entry is the pickle of a torch.save file."""
    return entry.name.rsplit("/", 1)[-1] == "data.pkl"


def read_saved(data: Buffer, name: str, listed: Sequence[ZipEntry] | None = None) -> Saved:
    """Return what a torch.save zip holds; `listed` are its entries, where they are at hand.

    Raises `FormatError` when the archive or its pickle is broken, or is not torch's.
    """
    view = memoryview(data).cast("B")
    listed = entries(view, name) if listed is None else listed
    pickled = next((entry for entry in listed if is_pickle(entry)), None)
    if pickled is None or pickled.method:
        raise FormatError(f"{name} is a zip archive, but not torch.save's: it holds no data.pkl. Name another file.")
    prefix = pickled.name[: -len("data.pkl")] + "data/"
    storages = {
        entry.name[len(prefix) :]: (entry.payload_offset, entry.num_bytes)
        for entry in listed
        if entry.name.startswith(prefix) and not entry.method
    }
    content = bytes(view[pickled.payload_offset : pickled.payload_offset + pickled.num_bytes])
    if has_checksums(listed) and crc32(content) != pickled.crc32:  # a flipped bit may ask for any amount of memory
        raise FormatError(f"{name} has a damaged data.pkl: its CRC-32 differs. Check it: headway ckpt verify")
    named: set[str] = set()
    room = Room(view.nbytes)
    value = loads(content, name, lenient=True, persistent=True, named=named, room=room)
    return _saved(value, storages, named, name, room)


def _saved(value: Any, storages: dict[str, tuple[int, int]], named: set[str], name: str, room: Room) -> Saved:
    """Sort what the file `name` was unpickled to into tensors and other values; they count against its `room` too."""
    try:
        found = list(_walk(value, (), frozenset(), room))
    except RoomError as cause:
        raise RoomError(f"{name} holds more values than headway reads: {cause}. Load it with torch.") from None
    except (TypeError, ValueError, IndexError, AttributeError, OverflowError, FormatError) as cause:
        raise FormatError(f"{name} holds a value that torch does not write ({cause}). Check it: headway ckpt verify") \
            from cause  # fmt: skip
    tensors = tuple(entry for entry in found if isinstance(entry, PickledTensor))
    return Saved(tensors, storages, tuple(entry for entry in found if isinstance(entry, StoredValue)), frozenset(named))


def _walk(
    value: Any, path: tuple[str, ...], above: frozenset[int], room: Room
) -> Iterator[PickledTensor | StoredValue]:
    """Yield what is below `value`; `above` are the containers around it, so that a circle ends.

    A pickle may name one container a million times, so every look at one counts against the `room` of the file.
    """
    if id(value) in above:
        return
    if len(above) > MOST_DEPTH:
        raise FormatError(f"more than {MOST_DEPTH} values in each other")
    room.spend(VISIT_BYTES)
    value, above = plain(value), above | {id(value)}
    if _is_storage(value):
        yield _storage(value, _fqn(path, room))
        return
    if isinstance(value, StandIn):
        yield from _of_object(value, path, above, room)
        return
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, (list, tuple, set, frozenset)) and not all(isinstance(entry, ATOMS) for entry in value):
        inner = enumerate(value)
    for key, entry in inner:
        yield from _walk(entry, (*path, _key(key)), above, room)
    if not inner:
        yield StoredValue(_fqn(path, room), value)


def _of_object(
    value: StandIn, path: tuple[str, ...], above: frozenset[int], room: Room
) -> Iterator[PickledTensor | StoredValue]:
    """Yield an object's tensors and attributes; the object itself where it has none."""
    if path_of(value) in STRIDED:
        yield _tensor(value, _fqn(path, room))
        if path_of(value) == QUANTIZED:
            yield from _walk(value.args[4], (*path, "quantizer"), above, room)
        return
    parts: list[PickledTensor | StoredValue] = []
    for entry in value.args:  # a parameter around a tensor, a user's own class: the same name goes on
        parts += (part for part in _walk(entry, path, above, room) if isinstance(part, PickledTensor))
    for key, entry in [*value.entries, *_attributes(value.state)]:
        if not (isinstance(entry, (dict, list, tuple, set)) and not entry):  # hooks that nobody set
            parts += _walk(entry, (*path, _key(key)), above, room)
    if isinstance(value.state, (tuple, list)) and not _attributes(value.state):
        parts += (part for part in _walk(value.state, (*path, "state"), above, room) if isinstance(part, PickledTensor))
    yield from parts or [StoredValue(_fqn(path, room), value)]


def _fqn(path: tuple[str, ...], room: Room) -> str:
    """Return the name of a value that is about to be kept."""
    room.spend(LEAF_BYTES + sum(map(len, path)))
    return ".".join(path)


def _key(key: Any) -> str:
    return key if isinstance(key, str) else SHORT.repr(key)


def _attributes(state: Any) -> list[tuple[str, Any]]:
    """Return the attributes that a state sets; torch keeps a module's tensors in three of them, left out of names."""
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        state = state[0] if isinstance(state[0], dict) else state[1]
    if not isinstance(state, dict):
        return []
    nested = [state[key] for key in ("_parameters", "_buffers", "_modules") if isinstance(state.get(key), dict)]
    rest = [(key, entry) for key, entry in state.items() if not any(entry is one for one in nested)]
    return [pair for one in nested for pair in one.items()] + rest


def _tensor(value: StandIn, fqn: str) -> PickledTensor:
    (_, kind, key, *_), offset, size, strides = value.args[:4]
    at = STRIDED[path_of(value)]
    dtype = path_of(value.args[at]).removeprefix("torch.") if at is not None else ""
    if not dtype:
        dtype = STORAGE_DTYPES.get(path_of(kind).rsplit(".", 1)[-1], "")
    made = PickledTensor(fqn, dtype, _ints(size), _ints(strides), str(key), *_ints((offset,)))
    if len(made.shape) != len(made.strides):
        raise ValueError(f"{fqn or 'the tensor'!r} has {len(made.shape)} lengths and {len(made.strides)} strides")
    return made


def _is_storage(value: Any) -> bool:
    """Say whether a value is a reference to a storage: ("storage", class, key, place, elements)."""
    return isinstance(value, tuple) and len(value) >= 5 and value[0] == "storage" and bool(path_of(value[1]))


def _storage(value: tuple[Any, ...], fqn: str) -> PickledTensor:
    """Return a storage that was saved by itself as the tensor of all its elements."""
    dtype = STORAGE_DTYPES.get(path_of(value[1]).rsplit(".", 1)[-1], "uint8")
    return PickledTensor(fqn, dtype, _ints(value[4:5]), (1,), str(value[2]), 0)


def _ints(size: Any) -> tuple[int, ...]:
    """Return lengths, strides or an offset; `ValueError` where one cannot be."""
    found = tuple(size.args[0] if isinstance(size, StandIn) else size)
    if len(found) > MOST_DIMS or not all(type(n) is int and 0 <= n < 1 << 63 for n in found):
        raise ValueError(f"a tensor has the lengths or strides {SHORT.repr(found)}")
    return found


def read_legacy(data: Buffer, name: str) -> Saved:
    """Return what a torch.save file of torch before 1.6 holds. It has no checksum of any kind.

    Raises `FormatError` when its parts do not fit each other, or bytes are missing or left over.
    """
    content = bytes(data)
    named, found, at, room = set[str](), list[Any](), 0, Room(len(content))
    for lenient in (True, True, True, True, False):  # magic, version, facts of the writer, value, keys of its storages
        value, at = load_from(content, at, name, lenient=lenient, persistent=lenient, named=named, room=room)
        found.append(value)
    magic, _, facts, value, keys = found
    if magic != LEGACY_MAGIC or not isinstance(facts, dict) or not isinstance(keys, list):
        raise FormatError(f"{name} is no torch.save file of the old form. Name another file.")
    try:
        sizes, storages = _legacy_sizes(value), dict[str, tuple[int, int]]()
        keys = [str(key) for key in keys]
    except ValueError as cause:
        raise FormatError(f"{name} holds a value that torch does not write ({cause}). Use another copy.") from cause
    view = memoryview(data).cast("B")
    for key in keys:
        if at + 8 > len(view):
            raise FormatError(
                f"{name} ends at {len(view)}, before its storage {key}. It is cut short: use another copy."
            )
        (count,) = struct.unpack_from("<q", view, at)
        if count < 0:
            raise FormatError(f"{name} says that its storage {key} has {count} elements. Use another copy.")
        storages[key] = (at + 8, count * sizes.get(key, 1))
        at += 8 + storages[key][1]
    if at != len(view):
        raise FormatError(f"{name} has {len(view)} bytes; its storages end at {at}. Use another copy.")
    return _saved(value, storages, named, name, room)


def _legacy_sizes(value: Any) -> dict[str, int]:
    """Return key -> bytes of an element, of every storage that a value refers to."""
    found, seen, ahead = dict[str, int](), set[int](), [value]
    while ahead:
        value = ahead.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _is_storage(value):
            found[str(value[2])] = ITEM_BYTES[_storage(value, "").dtype]
        elif isinstance(value, dict):
            ahead += value.values()
        elif isinstance(value, (list, tuple)):
            ahead += value
        elif isinstance(value, StandIn):
            ahead += [*value.args, value.state, *value.entries]
    return found
