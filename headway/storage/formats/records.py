"""What a torch.save file holds, read without torch: its tensors, where their bytes lie, and its other values.

A record of a DCP checkpoint is such a file, at an offset of a `.distcp`.
The pickle inside is read by `safe_pickle`, so nothing that it names is
imported or called. Both of torch's forms are read: the zip archive (all of
today's files), and the stream of pickles that torch wrote before 1.6.
Offsets are bytes from the start of the file or record, strides and
`storage_offset` elements.

>>> transposed = Stored("w", "float32", (2, 3), (1, 2), "0", 0)
>>> transposed.num_bytes, transposed.is_contiguous
(24, False)
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.core.errors import FormatError
from headway.storage.digests import crc32
from headway.storage.formats.dtypes import ITEM_BYTES, STORAGE_DTYPES
from headway.storage.formats.safe_pickle import StandIn, load_from, loads, path_of
from headway.storage.formats.values import ATOMS, SHORT, Value, plain
from headway.storage.formats.zip_files import Entry, entries, has_checksums

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

EMPTY: tuple[Any, ...] = ({}, [], (), set())
"""Attributes of objects that say nothing: hooks that nobody set."""

MOST_VISITS = 10_000_000
"""A pickle that says the same container again and again is followed no further."""


@dataclass(frozen=True, slots=True)
class Stored:
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

    tensors: tuple[Stored, ...]
    """Every tensor; views of one storage each have a line."""

    storages: dict[str, tuple[int, int]]
    """Key -> (offset, bytes) in the file."""

    values: tuple[Value, ...] = ()
    """Every value that is no tensor; a list of plain values is one."""

    named: frozenset[str] = frozenset()
    """The globals that its pickle names, `module.name`: what a loader that trusts it imports and may call."""

    def place_of(self, tensor: Stored) -> tuple[int, int]:
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

    def names_of(self, storage: str) -> str | None:
        """Return the names of the tensors in a storage, joined by a comma; None where there is none."""
        return ", ".join(tensor.fqn for tensor in self.tensors if tensor.storage == storage and tensor.fqn) or None


def is_legacy(head: Buffer) -> bool:
    """Say whether bytes begin as a file of torch before 1.6 does."""
    return bytes(memoryview(head)[: len(LEGACY_HEAD)]) == LEGACY_HEAD


def is_pickle(entry: Entry) -> bool:
    """Say whether a zip entry is the pickle of a torch.save file."""
    return entry.name.rsplit("/", 1)[-1] == "data.pkl"


def read_saved(data: Buffer, name: str, listed: Sequence[Entry] | None = None) -> Saved:
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
    value = loads(content, name, lenient=True, persistent=True, named=named)
    return _saved(value, storages, named, name)


def _saved(value: Any, storages: dict[str, tuple[int, int]], named: set[str], name: str) -> Saved:
    """Sort what the file `name` was unpickled to into tensors and other values."""
    try:
        found = list(_walk(value, (), set(), iter(range(MOST_VISITS))))
    except (TypeError, ValueError, IndexError, AttributeError, RecursionError) as cause:
        raise FormatError(f"{name} holds a value that torch does not write ({cause}). Check it: headway ckpt verify") \
            from cause  # fmt: skip
    tensors = tuple(entry for entry in found if isinstance(entry, Stored))
    return Saved(tensors, storages, tuple(entry for entry in found if isinstance(entry, Value)), frozenset(named))


def _walk(value: Any, path: tuple[str, ...], above: set[int], visits: Iterator[int]) -> Iterator[Stored | Value]:
    """Yield what is below `value`; `above` are the containers around it, so that a circle ends."""
    if id(value) in above:
        return
    if next(visits, None) is None:
        raise ValueError(f"more than {MOST_VISITS} values in each other")
    value, above = plain(value), above | {id(value)}
    if _is_storage(value):
        yield _storage(value, ".".join(path))
        return
    if isinstance(value, StandIn):
        yield from _of_object(value, path, above, visits)
        return
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, (list, tuple, set, frozenset)) and not all(isinstance(entry, ATOMS) for entry in value):
        inner = enumerate(value)
    for key, entry in inner:
        yield from _walk(entry, (*path, _key(key)), above, visits)
    if not inner:
        yield Value(".".join(path), value)


def _of_object(
    value: StandIn, path: tuple[str, ...], above: set[int], visits: Iterator[int]
) -> Iterator[Stored | Value]:
    """Yield an object's tensors and attributes; the object itself where it has none."""
    if path_of(value) in STRIDED:
        yield _tensor(value, ".".join(path))
        if path_of(value) == QUANTIZED:
            yield from _walk(value.args[4], (*path, "quantizer"), above, visits)
        return
    parts: list[Stored | Value] = []
    for entry in value.args:  # a parameter around a tensor, a user's own class: the same name goes on
        parts += (part for part in _walk(entry, path, above, visits) if isinstance(part, Stored))
    for key, entry in [*vars(value).get("entries", []), *_attributes(value.state)]:
        if entry not in EMPTY:
            parts += _walk(entry, (*path, _key(key)), above, visits)
    if isinstance(value.state, (tuple, list)) and not _attributes(value.state):
        parts += (part for part in _walk(value.state, (*path, "state"), above, visits) if isinstance(part, Stored))
    yield from parts or [Value(".".join(path), value)]


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


def _tensor(value: StandIn, fqn: str) -> Stored:
    (_, kind, key, *_), offset, size, strides = value.args[:4]
    at = STRIDED[path_of(value)]
    dtype = path_of(value.args[at]).removeprefix("torch.") if at is not None else ""
    if not dtype:
        dtype = STORAGE_DTYPES.get(path_of(kind).rsplit(".", 1)[-1], "")
    return Stored(fqn, dtype, _ints(size), _ints(strides), str(key), int(offset))


def _is_storage(value: Any) -> bool:
    """Say whether a value is a reference to a storage: ("storage", class, key, place, elements)."""
    return isinstance(value, tuple) and len(value) >= 5 and value[0] == "storage" and bool(path_of(value[1]))


def _storage(value: tuple[Any, ...], fqn: str) -> Stored:
    """Return a storage that was saved by itself as the tensor of all its elements."""
    dtype = STORAGE_DTYPES.get(path_of(value[1]).rsplit(".", 1)[-1], "uint8")
    return Stored(fqn, dtype, (int(value[4]),), (1,), str(value[2]), 0)


def _ints(size: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in (size.args[0] if isinstance(size, StandIn) else size))


def read_legacy(data: Buffer, name: str) -> Saved:
    """Return what a torch.save file of torch before 1.6 holds. It has no checksum of any kind.

    Raises `FormatError` when its parts do not fit each other, or bytes are missing or left over.
    """
    file, named = io.BytesIO(data), set[str]()
    magic, _, facts, value = (load_from(file, name, lenient=True, persistent=True, named=named) for _ in range(4))
    if magic != LEGACY_MAGIC or not isinstance(facts, dict):
        raise FormatError(f"{name} is no torch.save file of the old form. Name another file.")
    keys = load_from(file, name)
    sizes = _legacy_sizes(value)
    storages, at = {}, file.tell()
    view = memoryview(data).cast("B")
    for key in keys:
        if at + 8 > len(view):
            raise FormatError(
                f"{name} ends at {len(view)}, before its storage {key}. It is cut short: use another copy."
            )
        (count,) = struct.unpack_from("<q", view, at)
        if count < 0:
            raise FormatError(f"{name} says that its storage {key} has {count} elements. Use another copy.")
        storages[str(key)] = (at + 8, count * sizes.get(str(key), 1))
        at += 8 + storages[str(key)][1]
    if at != len(view):
        raise FormatError(f"{name} has {len(view)} bytes; its storages end at {at}. Use another copy.")
    return _saved(value, storages, named, name)


def _legacy_sizes(value: Any, seen: set[int] | None = None) -> dict[str, int]:
    """Return key -> bytes of an element, of every storage that a value refers to."""
    found: dict[str, int] = {}
    seen = set() if seen is None else seen
    if id(value) in seen:
        return found
    seen.add(id(value))
    if _is_storage(value):
        return {str(value[2]): ITEM_BYTES[_storage(value, "").dtype]}
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, (list, tuple)):
        inner = list(value)
    elif isinstance(value, StandIn):
        inner = [*value.args, value.state, *vars(value).get("entries", [])]
    for entry in inner:
        found |= _legacy_sizes(entry, seen)
    return found
