"""What a checkpoint holds, whoever wrote it: its tensors, in which boxes, where; its other values; and the bits.

Use it to show or compare checkpoints: ours and stock DCP's by folder,
torch.save and safetensors files by file. Nothing is loaded by torch; the
bits of a box come as a numpy array of bytes. Offsets and lengths of boxes
are elements, those in files bytes.

>>> empty = Contents(LocalStore("."), "dcp", {}, {})
>>> empty.num_bytes
0
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import FREE_BYTES, read_regular
from headway.storage.boxes import Box, whole
from headway.storage.checks.foreign_checks import DCP_SUFFIX, HEAD_BYTES, INDEX, PICKLED, read_index, refuse
from headway.storage.commit import commit_record, committed, is_own, manifests_of, rebuild
from headway.storage.formats.dcp import DcpRecord, read_metadata
from headway.storage.formats.records import PickledTensor, Saved, is_legacy, read_legacy, read_saved
from headway.storage.formats.safe_pickle import what_runs
from headway.storage.formats.safetensors import is_safetensors, read_header
from headway.storage.formats.values import ITEM_BYTES, StoredValue
from headway.storage.formats.zip_files import is_zip
from headway.storage.manifest import METADATA, CommitRecord, RankManifest, merged_objects
from headway.storage.object_commit import checkpoint_at
from headway.storage.stores import LocalStore, Store, url_of

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True)
class StoredBox:
    """One stored box of a tensor."""

    box: Box
    """Which elements."""

    file: str
    """Path inside the checkpoint."""

    record_offset: int
    """Where the record, or the run of elements, begins."""

    record_bytes: int
    """Its length."""

    layout: PickledTensor | None = None
    """How the elements lie in a storage of a file that holds many tensors; None: the record is a file of its own,
    or the run is the elements."""

    is_plain: bool = False
    """The run is the elements, row-major."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint."""

    dtype: str
    """Name in torch."""

    shape: tuple[int, ...]
    """[d] Shape of the whole."""

    boxes: tuple[StoredBox, ...]
    """Where its elements are."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * ITEM_BYTES.get(self.dtype, 0)


@dataclass(frozen=True, slots=True)
class Contents:
    """What one checkpoint holds."""

    store: Store
    """Where its files are."""

    format: str
    """`headway`, `dcp`, `torch.save` or `safetensors`."""

    tensors: dict[str, Tensor]
    """Name -> tensor."""

    objects: dict[str, DcpRecord]
    """Name -> where the pickled value is. Of a value that ranks have their own of, the others' are `name@rank<r>`."""

    record: CommitRecord | None = None
    """The commit record of a checkpoint of ours."""

    values: dict[str, StoredValue] = field(default_factory=dict)
    """Name -> value, of torch.save files, whose values are read with their tensors; of others see `opened`."""

    notes: tuple[str, ...] = ()
    """What a person should know before loading it."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def read(self, file: str, start: int, stop: int) -> memoryview:
        """Return bytes of one of its files; raise `FormatError` when the file is gone or ends before `stop`."""
        try:
            found = memoryview(self.store.read(file, start, stop)).cast("B")
            if len(found) < stop - start:
                raise FormatError(
                    f"{self.store.place}/{file} is cut short: it ends at {start + len(found)}, before {stop}. See what "
                    "is left: headway ckpt verify"
                )
            return found
        except FileNotFoundError:
            raise FormatError(f"{self.store.place} has lost {file}. See what is left: headway ckpt verify") from None


def contents(path: str | Path) -> Contents:
    """Return what is in a checkpoint, or in the newest one in a folder of `step-<n>`.

    A folder of safetensors files, or of torch.save files, counts as one checkpoint, as does an index of some. Raises
    `InputError` when there is none, `FormatError` when it is damaged too much to tell.
    """
    url = url_of(path)
    if url is not None:
        return contents_of(checkpoint_at(url))
    path = Path(path)
    refuse(path)
    if path.is_file() and path.name.endswith(INDEX):
        names = sorted(set(read_index(read_regular(path), str(path)).values()))
        if not names:
            raise FormatError(f"{path} names no file. Name a folder, or the file itself.")
        return _joined(path.parent, [_of_file(LocalStore(path.parent).path(name)) for name in names])
    if path.is_file():
        return _of_file(path)
    if (path / METADATA).exists() or is_own(path):
        return contents_of(LocalStore(path))
    steps = committed(path)
    if steps:
        return contents(steps[-1].path)
    for endings in (".safetensors", PICKLED):
        files = sorted(file for file in path.glob("*") if file.name.endswith(endings) and file.is_file())
        if files:
            held = _joined(path, [_of_file(file) for file in files])
            rest = sorted(file.name for file in path.glob("*") if file.name.endswith(PICKLED) and file not in files)
            note = (f"not shown: {', '.join(rest)}; name one to see what is in it",) if rest else ()
            return replace(held, notes=held.notes + note)
    if next(path.glob(f"*{DCP_SUFFIX}"), None):
        return contents_of(LocalStore(path))
    raise InputError(f"{path} holds no checkpoint. Name the folder of one, or a torch.save or safetensors file.")


def _joined(path: Path, parts: list[Contents]) -> Contents:
    """Return the contents of the files of a folder as those of one checkpoint."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, StoredValue] = {}
    for part in parts:
        twice = next((fqn for fqn in part.tensors if fqn in tensors), None)
        if twice is not None:
            raise InputError(f"two files of {path} hold a tensor {twice!r}: it is several checkpoints. Name one file.")
        tensors |= part.tensors
        values |= part.values
    notes = tuple(note for part in parts for note in part.notes)
    return Contents(LocalStore(path), parts[0].format, tensors, {}, values=values, notes=notes)


def contents_of(store: Store) -> Contents:
    """Return what is in the checkpoint, ours or a stock DCP one, that a store is rooted at; see `contents`."""
    record = commit_record(store)
    data = _metadata(store, record)
    metadata = read_metadata(data, f"{store.place}/{METADATA}", num_bytes=sum(store.list().values()))
    objects = dict(metadata.objects)
    if record is not None:
        objects = _own_objects(list(manifests_of(store, record).values())) or objects
    tensors = {
        fqn: Tensor(
            tensor.dtype,
            tensor.shape,
            tuple(
                StoredBox(Box(chunk.offsets, chunk.lengths), chunk.file, chunk.record_offset, chunk.record_bytes)
                for chunk in tensor.chunks
            ),
        )
        for fqn, tensor in metadata.tensors.items()
    }
    return Contents(store, "dcp" if record is None else "headway", tensors, objects, record)


def _metadata(store: Store, record: CommitRecord | None) -> bytes:
    """Return the bytes of `.metadata`; of a checkpoint of ours as they were committed, from wherever that is known."""
    committed_bytes = None if record is None else rebuild(store, record, METADATA)
    if committed_bytes is not None:
        return committed_bytes
    try:
        return bytes(store.read(METADATA))
    except FileNotFoundError:
        raise FormatError(f"{store.place} has lost its {METADATA}. Check what is left: headway ckpt verify") from None


def _own_objects(manifests: list[RankManifest]) -> dict[str, DcpRecord]:
    return {
        fqn if rank in (None, 0) else f"{fqn}@rank{rank}": DcpRecord(
            entry.file, entry.record_offset, entry.record_bytes
        )
        for fqn, entries in merged_objects(manifests).items()
        for rank, entry in entries.items()
    }


def opened(held: Contents) -> Contents:
    """Return the contents with the values of its objects read, as far as they can be.

    What an object holds becomes a value for each plain entry, as in a torch.save file. An object that holds tensors,
    is compressed, or cannot be read stays an object.
    """
    values, objects, notes = dict(held.values), dict(held.objects), list(held.notes)
    act = "dcp.load" if held.record is None else "restoring it"
    for name, at in held.objects.items():
        if at.transforms:
            continue
        try:
            saved = read_saved(held.read(at.file, at.record_offset, at.record_offset + at.record_bytes), at.file)
        except FormatError as cause:
            notes.append(f"{name!r} cannot be read: {cause}")
            continue
        note = what_runs(saved.named, f"{name!r}: {act}")
        notes += [note] if note else []
        if not saved.tensors:
            del objects[name]
            for value in saved.values:
                fqn = f"{name}.{value.name}" if value.name else name
                values[fqn] = StoredValue(fqn, value.value)
    return replace(held, objects=objects, values=values, notes=tuple(notes))


def _of_file(path: Path) -> Contents:
    store, name = LocalStore(path.parent), path.name
    try:
        data = store.read(name)
    except FileNotFoundError:
        raise FormatError(f"{path} is missing. Check what is left: headway ckpt verify") from None
    size = memoryview(data).nbytes
    if not size:
        raise FormatError(f"{path} is empty. Use another copy.")
    if is_safetensors(data, size) or name.endswith(".safetensors"):
        header = read_header(memoryview(data)[: max(HEAD_BYTES, _header_bytes(data))], size, str(path))
        tensors = {
            fqn: Tensor(
                told.dtype, told.shape, (StoredBox(whole(told.shape), name, told.offset, told.num_bytes, None, True),)
            )
            for fqn, told in header.tensors.items()
        }
        return Contents(store, "safetensors", tensors, {})
    if not (is_zip(data) or is_legacy(data) or name.endswith(PICKLED)):
        raise FormatError(f"{path} is neither a torch.save nor a safetensors file. Name one, or a checkpoint's folder.")
    saved = read_legacy(data, str(path)) if is_legacy(data) else read_saved(data, str(path))
    names = _Names()
    tensors = {names.free(stored.fqn or "tensor"): _tensor_of(saved, stored, name) for stored in saved.tensors}
    values = {names.free(value.name or "value"): value for value in saved.values}
    note = what_runs(saved.named, f"loading {name} with weights_only=False")
    return Contents(store, "torch.save", tensors, {}, values=values, notes=(note,) if note else ())


class _Names:
    """Names that were given: keys may hold dots, so that two ways through a file's dicts are written alike."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def free(self, name: str) -> str:
        """Return the name, with a number behind it where it is taken."""
        tries = itertools.chain([name], (f"{name} ({number})" for number in itertools.count(2)))
        found = next(one for one in tries if one not in self._taken)
        self._taken.add(found)
        return found


def _header_bytes(data: Buffer) -> int:
    return 8 + int.from_bytes(bytes(memoryview(data)[:8]), "little")


def _tensor_of(saved: Saved, stored: PickledTensor, name: str) -> Tensor:
    start, size = saved.storages.get(stored.storage, (0, 0))
    return Tensor(stored.dtype, stored.shape, (StoredBox(whole(stored.shape), name, start, size, stored),))


def bits(held: Contents, tensor: Tensor, stored: StoredBox) -> NDArray[np.uint8]:
    """Return the elements of a stored box as bytes: uint8 `[*lengths, item bytes]`, a view where that can be.

    Raises `FormatError` when the record does not hold what the metadata says.
    """
    item = ITEM_BYTES.get(tensor.dtype)
    if item is None:
        raise FormatError(f"{stored.file} has elements of dtype {tensor.dtype!r}, which headway does not know. Load it \
with torch.")  # fmt: skip
    stop = stored.record_offset + stored.record_bytes
    data = np.frombuffer(held.read(stored.file, stored.record_offset, stop), np.uint8)
    layout, run = stored.layout, data
    if layout is None and not stored.is_plain:
        saved = read_saved(data.data, stored.file)
        if [(one.dtype, one.shape) for one in saved.tensors] != [(tensor.dtype, stored.box.lengths)]:
            raise FormatError(f"{stored.file} does not hold what {METADATA} says. Check it: headway ckpt verify")
        layout = saved.tensors[0]
        start, size = saved.storages.get(layout.storage, (0, 0))
        run = data[start : start + size]
    shape = (*stored.box.lengths, item)
    needed = math.prod(shape)
    # an expanded tensor repeats its elements: as many as one likes, of a few bytes
    if needed != run.size if layout is None else needed > FREE_BYTES + 2 * run.size:
        raise FormatError(
            f"{stored.file} has {run.size} bytes for the {needed} of {list(shape[:-1])}. Check it: headway ckpt verify"
        )
    if layout is None:
        return np.reshape(run, shape)
    strides = (*(stride * item for stride in layout.strides), 1)
    first = layout.storage_offset * item
    last = first + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    if last >= max(run.size, 1):
        raise FormatError(f"{stored.file} holds too few bytes for {list(shape[:-1])}. Check it: headway ckpt verify")
    return np.lib.stride_tricks.as_strided(run[first:], shape, strides, writeable=False)
