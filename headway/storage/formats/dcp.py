"""The metadata of a distributed checkpoint (DCP), read and written without torch.

DCP keeps one file `.metadata`, a pickle: which tensors there are, of which
boxes each consists, and for every box the file, offset and length of its
record (a torch.save zip). Reads what torch 2.6 to 2.13 write; what is
written here loads in stock `torch.distributed.checkpoint`. Offsets and sizes
of boxes are elements, those of records bytes.

>>> from headway.storage.manifest import FileEntry, Piece, RankManifest
>>> piece = Piece("w", "float32", (4,), (0,), (4,), "rank-0/__0_0.distcp", 0, 1600, 640, 16, 0)
>>> manifest = RankManifest(7, "a", 0, 1, None, pieces=(piece,), paths={"w": ("w",)})
>>> tensor = read_metadata(metadata_bytes([manifest])).tensors["w"]
>>> tensor.dtype, tensor.shape, tensor.chunks[0].file, tensor.chunks[0].record_bytes
('float32', (4,), 'rank-0/__0_0.distcp', 1600)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.core.errors import FormatError
from headway.core.files.inert import Room, StandIn
from headway.core.files.unpickler import UNREADABLE
from headway.storage.formats.safe_pickle import Call, Global, Instance, Pairs, dumps, loads, path_of
from headway.storage.formats.values import ITEM_BYTES
from headway.storage.manifest import METADATA, Piece, RankManifest, StoredObject, merged_objects

ROOM = "torch.distributed.checkpoint.metadata"
STORAGE_INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")

DCP_VERSION = "1.0.0"
"""The version that stock DCP writes and reads."""

Path = tuple[str | int, ...]
"""The keys that lead to a value in the nested state dict."""


@dataclass(frozen=True, slots=True)
class DcpRecord:
    """Where a value is stored."""

    file: str
    """Path inside the checkpoint."""

    record_offset: int
    """Where the record begins in the file."""

    record_bytes: int
    """Length of the record."""

    transforms: tuple[str, ...] = ()
    """What stock extensions did to the record's bytes (compression), outermost last; () for plain ones."""


@dataclass(frozen=True, slots=True)
class Chunk(DcpRecord):
    """One stored box of a tensor."""

    offsets: tuple[int, ...] = ()
    """[d] Where the box begins."""

    lengths: tuple[int, ...] = ()
    """[d] How long the box is."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor, whole, and the boxes that it is stored in."""

    dtype: str
    """Name in torch, without the module: `float32`."""

    shape: tuple[int, ...]
    """[d] Shape of the whole tensor."""

    chunks: tuple[Chunk, ...]
    """The stored boxes."""


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """All that a `.metadata` says."""

    tensors: dict[str, StoredTensor]
    """Name -> tensor."""

    objects: dict[str, DcpRecord]
    """Name -> where the pickled value is."""

    paths: dict[str, Path] = field(default_factory=dict)
    """Name -> keys in the nested state dict; empty where a planner did not flatten."""

    version: str | None = None
    """DCP's version of the format."""

    def records(self) -> Iterable[tuple[str, DcpRecord]]:
        """Return (name, where) of every stored record."""
        yield from self.objects.items()
        for fqn, tensor in self.tensors.items():
            yield from ((fqn, chunk) for chunk in tensor.chunks)


def read_metadata(data: bytes, name: str = METADATA, *, num_bytes: int = 0) -> DcpMetadata:
    """Return what the bytes of a `.metadata` say; `name` is the file's, for messages.

    `num_bytes` is the size of the whole checkpoint, which says how much memory its metadata may take; by default that
    of the metadata alone counts. Raises `FormatError` for a pickle that is broken, names what no checkpoint needs, or
    is no DCP metadata, for a field that holds what torch never writes, and for a box or object whose record is not
    told.
    """
    whole = loads(data, name, room=Room(max(len(data), num_bytes)))
    if path_of(whole) != f"{ROOM}.Metadata" or not isinstance(whole.state, dict):
        raise FormatError(f"{name} is no metadata of a distributed checkpoint. Name the folder that dcp.save wrote.")
    try:
        return _metadata(whole, name)
    except UNREADABLE as cause:
        if isinstance(cause, FormatError):
            raise
        raise FormatError(
            f"{name} is no metadata that torch writes ({type(cause).__name__}: {cause}). Check it: headway ckpt verify"
        ) from cause


def _metadata(whole: StandIn, name: str) -> DcpMetadata:
    where: dict[tuple[str, tuple[int, ...] | None], DcpRecord] = {}
    for index, info in (whole.get("storage_data") or {}).items():
        _expect(index, "MetadataIndex")
        offset = index.get("offset")
        where[_text(index.get("fqn")), None if offset is None else _size(offset)] = _record(info)
    tensors, objects = dict[str, StoredTensor](), dict[str, DcpRecord]()
    for fqn, facts in whole.get("state_dict_metadata").items():
        try:
            if path_of(facts) == f"{ROOM}.BytesStorageMetadata":
                objects[_text(fqn)] = where[fqn, None]
            else:
                tensors[_text(fqn)] = _tensor(fqn, facts, where)
        except KeyError:
            raise FormatError(f"{name} does not say where {fqn!r} is stored. Check it: headway ckpt verify") from None
    known = {*((fqn, None) for fqn in objects), *((fqn, box.offsets) for fqn in tensors for box in tensors[fqn].chunks)}
    astray = next((index for index in where if index not in known), None)
    if astray is not None:
        raise FormatError(
            f"{name} has a record of {astray[0]!r} that no value refers to. Check it: headway ckpt verify"
        )
    paths = {_text(fqn): _path(path) for fqn, path in (whole.get("planner_data") or {}).items()}
    return DcpMetadata(tensors, objects, paths, whole.get("version"))


def _expect(value: Any, *kinds: str) -> None:
    """Raise `TypeError` where a value is not an object of one of the classes or calls."""
    if isinstance(value, type) or path_of(value).rpartition(".")[2] not in kinds:
        raise TypeError(f"a {path_of(value) or type(value).__name__} where a {kinds[0]} belongs")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name is a {type(value).__name__}")
    return value


def _path(path: Any) -> Path:
    """Return the keys that lead to a value."""
    if not isinstance(path, (tuple, list)) or not all(type(key) in (str, int) for key in path):
        raise TypeError(f"the keys of a value are {path!r:.80}")
    return tuple(path)


def _record(info: StandIn) -> DcpRecord:
    _expect(info, "_StorageInfo")
    file, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
    if not (isinstance(file, str) and type(offset) is int and type(length) is int and min(offset, length) >= 0):
        raise TypeError("a record without file, offset and length")
    transforms = info.get("transform_descriptors")
    if not (transforms is None or (isinstance(transforms, (list, tuple)) and all(map(_text, transforms)))):
        raise TypeError("the transforms of a record are no names")
    return DcpRecord(file, offset, length, tuple(transforms or ()))


def _tensor(fqn: str, facts: StandIn, where: dict[Any, DcpRecord]) -> StoredTensor:
    _expect(facts, "TensorStorageMetadata")
    chunks = []
    for chunk in facts.get("chunks"):
        _expect(chunk, "ChunkStorageMetadata")
        offsets, lengths = _size(chunk.get("offsets")), _size(chunk.get("sizes"))
        at = where[fqn, offsets]
        chunks.append(Chunk(at.file, at.record_offset, at.record_bytes, at.transforms, offsets, lengths))
    shape = _size(facts.get("size"))
    if any(len(chunk.offsets) != len(shape) or len(chunk.lengths) != len(shape) for chunk in chunks):
        raise TypeError(f"a box of {fqn!r:.80} has other dimensions than the tensor")
    return StoredTensor(_dtype(facts.get("properties")), shape, tuple(chunks))


def _dtype(properties: StandIn) -> str:
    """Return the dtype of a tensor; raise `TypeError` where its properties are none that torch writes."""
    _expect(properties, "TensorProperties")
    fields = properties.state
    if isinstance(fields, dict):
        fields = [fields.get(key) for key in ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")]
    dtype, layout, requires_grad, memory_format, pin_memory = fields
    if not isinstance(dtype, type) or path_of(dtype).removeprefix("torch.") not in ITEM_BYTES:
        raise TypeError(f"a tensor has the dtype {path_of(dtype) or dtype!r:.80}")
    if isinstance(layout, type) or layout.args != ("torch.strided",):
        raise TypeError("a tensor has a layout that dcp.save does not write")
    _expect(layout, "_get_layout")
    _expect(memory_format, "_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING")
    if memory_format.args not in ((0,), (1,), (2,)):
        raise TypeError(f"a tensor has the memory format {memory_format.args!r:.80}")
    if not (isinstance(requires_grad, bool) and isinstance(pin_memory, bool)):
        raise TypeError("requires_grad or pin_memory of a tensor is neither true nor false")
    return path_of(dtype).removeprefix("torch.")


def _size(size: Any) -> tuple[int, ...]:
    """Return a torch.Size, or a plain tuple or list in its place, as a tuple."""
    if isinstance(size, StandIn):
        _expect(size, "Size")
    values = tuple(size.args[0] if isinstance(size, StandIn) else size)
    if not all(type(value) is int and 0 <= value < 1 << 63 for value in values):
        raise TypeError(f"a tensor has the size {values!r:.80}")
    return values


def metadata_bytes(manifests: Sequence[RankManifest]) -> bytes:
    """Return the `.metadata` of what all ranks wrote; stock DCP loads it.

    Of an object that each rank has its own of, the lowest rank's is what stock DCP sees.
    """
    pieces: dict[str, list[Piece]] = {}
    objects = {fqn: next(iter(entries.values())) for fqn, entries in merged_objects(manifests).items()}
    paths: dict[str, Path] = {}
    for manifest in sorted(manifests, key=lambda manifest: manifest.rank):
        paths |= manifest.paths
        for piece in manifest.pieces:
            pieces.setdefault(piece.fqn, []).append(piece)
    pieces = {fqn: _filled(found) for fqn, found in pieces.items()}
    facts: dict[str, Any] = {fqn: _tensor_facts(found) for fqn, found in pieces.items()}
    facts |= {fqn: Instance(Global(ROOM, "BytesStorageMetadata")) for fqn in objects}
    storage = [(_index(entry.fqn), _where(entry)) for entry in objects.values()]
    storage += [
        (_index(fqn, piece.offsets, at), _where(piece))
        for fqn, found in pieces.items()
        for at, piece in enumerate(found)
    ]
    origin: dict[str, Any] = {
        "checkpoint_id": None,
        "save_id": next((m.attempt for m in manifests), None),
        "load_id": None,
        "modules": [],
    }
    state = {
        "state_dict_metadata": facts,
        "planner_data": paths,
        "storage_data": Pairs(tuple(storage)),
        "storage_meta": Instance(Global(ROOM, "StorageMeta"), origin),
        "version": DCP_VERSION,
    }
    return dumps(Instance(Global(ROOM, "Metadata"), state))


def _filled(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces that hold elements: DCP knows a chunk by its offset, and an empty one shares a neighbour's."""
    return [piece for piece in pieces if math.prod(piece.lengths)] or pieces[:1]


def _tensor_facts(pieces: Sequence[Piece]) -> Instance:
    chunks = [
        Instance(
            Global(ROOM, "ChunkStorageMetadata"), {"offsets": _torch_size(p.offsets), "sizes": _torch_size(p.lengths)}
        )
        for p in pieces
    ]
    layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Call(Global(ROOM, "_MEM_FORMAT_ENCODING"), (0,))
    # dtype, layout, requires_grad, memory format, pin_memory: the order in which torch restores them
    properties = (Global("torch", pieces[0].dtype), layout, False, contiguous, False)
    state = {
        "properties": Instance(Global(ROOM, "TensorProperties"), properties),
        "size": _torch_size(pieces[0].shape),
        "chunks": chunks,
    }
    return Instance(Global(ROOM, "TensorStorageMetadata"), state)


def _torch_size(size: tuple[int, ...]) -> Call:
    return Call(Global("torch", "Size"), (size,))


def _index(fqn: str, offsets: tuple[int, ...] | None = None, at: int | None = None) -> Instance:
    offset = None if offsets is None else _torch_size(offsets)
    return Instance(Global(ROOM, "MetadataIndex"), {"fqn": fqn, "offset": offset, "index": at})


def _where(entry: Piece | StoredObject) -> Instance:
    at = {"relative_path": entry.file, "offset": entry.record_offset, "length": entry.record_bytes}
    return Instance(STORAGE_INFO, at)
