"""Whether a checkpoint that somebody else wrote is whole: stock DCP, torch.save, safetensors.

Torch writes a CRC-32 into every record and never looks at it; here it is
looked at, and so is every byte of the container around it (`formats.zip_files`).
What the metadata says is held to what the records say: dtypes, shapes, and
that the stored boxes tile every tensor. safetensors, and torch.save before
1.6, have no checksum: their structure is checked, their elements are
reported as unchecked. Nothing is unpickled but by `safe_pickle`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import RoomError, decode_json
from headway.storage.boxes import Box, cover_fault
from headway.storage.formats.dcp import DCP_VERSION, Chunk, DcpMetadata, DcpRecord, read_metadata
from headway.storage.formats.records import Saved, is_legacy, read_legacy, read_saved
from headway.storage.formats.safe_pickle import what_runs
from headway.storage.formats.safetensors import is_safetensors, read_header
from headway.storage.formats.zip_files import entries, faults, has_checksums, is_zip
from headway.storage.manifest import COMMIT, METADATA, Findings
from headway.storage.stores import Store

if TYPE_CHECKING:
    from typing_extensions import Buffer

TORCH_ENTRIES = {"data.pkl", "byteorder", ".format_version"}
"""Names by which a zip archive is known as torch.save's, also where a flipped bit has spoiled one of them."""

HEAD_BYTES = 1 << 20
"""What is read of a safetensors file at first; longer headers are read again."""

OF_ONE_RANK = re.compile(r"__\d+\.metadata")
"""What metadata is called where ranks saved without talking to each other (`use_collectives=False`)."""

INDEX = ".index.json"
"""What the file that says which tensor is in which of several files ends in."""

DCP_SUFFIX = ".distcp"
"""What the files of a stock DCP checkpoint are called."""

PICKLED = (".pt", ".pth", ".bin", ".ckpt")
"""What files that torch.save wrote are called."""


def refuse(path: Path) -> None:
    """Raise `InputError` where nothing is at `path` that could be a checkpoint, or only a part of one."""
    if not path.exists():
        raise InputError(f"there is nothing at {path}. Name the folder of a checkpoint, or a file of one.")
    if not (path.is_dir() or path.is_file()):
        raise InputError(f"{path} is neither a folder nor a file. Name the folder of a checkpoint, or a file of one.")
    if path.is_file() and (path.suffix == DCP_SUFFIX or path.name in (METADATA, COMMIT)):
        raise InputError(f"{path} is a part of a distributed checkpoint. Name the folder that holds its {METADATA}.")


def check_dcp(store: Store, findings: Findings, *, deep: bool = True) -> None:
    """Check a stock DCP checkpoint; without `deep` the payloads' CRCs are left out."""
    sizes = store.list()
    names = [METADATA] if METADATA in sizes else [name for name in sizes if OF_ONE_RANK.fullmatch(name)]
    if not names:
        findings.add(METADATA, None, 0, "missing")
        findings.notes.append(f"without {METADATA} nobody knows what is in the other files: was the save cut short?")
        return
    each = [_read_metadata(store, name, sum(sizes.values()), findings) for name in names]
    found = [metadata for metadata in each if metadata is not None]
    for metadata in found:
        for fqn, record in sorted(metadata.records(), key=lambda pair: (pair[1].file, pair[1].record_offset)):
            _check_record(store, metadata, fqn, record, sizes.get(record.file), findings, deep=deep)
    findings.note(f"{METADATA} has no checksum: it was held to the records and to what torch writes")
    if len(found) == len(names):
        _note_unclaimed(found, {name: size for name, size in sizes.items() if name not in names}, findings)


def _read_metadata(store: Store, name: str, num_bytes: int, findings: Findings) -> DcpMetadata | None:
    """Read one metadata file of a checkpoint of `num_bytes`, and hold what it says to itself."""
    data = bytes(store.read(name))
    findings.unchecked_bytes += len(data)  # a flip that changes a name everywhere alike cannot be found
    try:
        metadata = read_metadata(data, name, num_bytes=num_bytes)
    except RoomError:  # nothing is known of it: neither good nor damaged
        raise
    except FormatError as cause:
        findings.add(name, None, 0, "pickle", len(data))
        findings.explain(cause)
        return None
    if metadata.version not in (None, DCP_VERSION):
        findings.note(f"{name} is of version {metadata.version!r:.40}; headway knows {DCP_VERSION}")
    for fqn in _misnamed(metadata):
        findings.add(name, fqn, 0, "name", len(data))
    for fqn, tensor in metadata.tensors.items() if name == METADATA else ():
        fault = cover_fault(tensor.shape, [Box(chunk.offsets, chunk.lengths) for chunk in tensor.chunks])
        if fault is not None:
            findings.add(name, fqn, 0, "boxes", len(data))
            findings.notes.append(f"the stored boxes of {fqn!r} are not the whole of it: {fault}")
    return metadata


def _misnamed(metadata: DcpMetadata) -> list[str]:
    """Return the names that are not the keys that lead to them, or have no such keys.

    A planner that names in its own way differs everywhere. A flipped bit leaves the length of a name as it was: also
    one in a key that all names share, which differs everywhere too.
    """
    known = {*metadata.tensors, *metadata.objects}
    if not metadata.paths:
        return []
    joined = {fqn: ".".join(map(str, path)) for fqn, path in metadata.paths.items()}
    astray = {fqn for fqn, text in joined.items() if text != fqn}
    own_names = len(astray) == len(joined) and any(len(joined[fqn]) != len(fqn) for fqn in astray)
    return sorted((set() if own_names else astray) | (known ^ joined.keys()))


def _check_record(
    store: Store,
    metadata: DcpMetadata,
    fqn: str,
    record: DcpRecord,
    size: int | None,
    findings: Findings,
    *,
    deep: bool,
) -> None:
    """Check one record: that it is there, its archive, and that it is the tensor that the metadata says."""
    start, stop = record.record_offset, record.record_offset + record.record_bytes
    if size is None or size < stop:
        what = "missing" if size is None else "truncated"
        findings.add(record.file, fqn, start, what, record.record_bytes)
        return
    if record.transforms:
        findings.unchecked_bytes += record.record_bytes
        return
    findings.pace.wait(record.record_bytes)
    data = store.read(record.file, start, stop)
    findings.checked_bytes += record.record_bytes
    found = list(faults(data, payloads=deep))
    for fault in found:
        findings.add(record.file, fqn, start + fault.offset, fault.what, fault.num_bytes)
    if found:
        return
    if not isinstance(record, Chunk):
        findings.note(_of_object(data, fqn, record.file))
        return
    if not has_checksums(entries(data, record.file)):
        findings.unchecked_bytes += record.record_bytes
    try:
        stored = read_saved(data, record.file).tensors
        facts = [(tensor.dtype, tensor.shape) for tensor in stored]
    except RoomError:  # nothing is known of it: neither good nor damaged
        raise
    except FormatError as cause:
        findings.add(record.file, fqn, start, "pickle", record.record_bytes)
        findings.explain(cause)
        return
    # a tensor that is a class of its own holds others, which may be anything
    if len(facts) == 1 and facts != [(metadata.tensors[fqn].dtype, record.lengths)]:
        findings.add(record.file, fqn, start, "facts", record.record_bytes)
        expected = f"{metadata.tensors[fqn].dtype} {list(record.lengths)}"
        findings.notes.append(f"{fqn!r} is {expected} in {METADATA}, but its record holds {facts}")


def _of_object(data: Buffer, fqn: str, file: str) -> str | None:
    """Say what dcp.load runs as it loads an object: it trusts the pickles of all that is no tensor."""
    try:
        return what_runs(read_saved(data, file).named, f"{fqn!r}: dcp.load")
    except FormatError as cause:  # whole by its checksums, and of another writer
        return str(cause)


def _note_unclaimed(found: Sequence[DcpMetadata], sizes: Mapping[str, int], findings: Findings) -> None:
    """Note files and ends of files that no record claims."""
    claimed: dict[str, int] = {}
    for _, record in (pair for metadata in found for pair in metadata.records()):
        claimed[record.file] = max(claimed.get(record.file, 0), record.record_offset + record.record_bytes)
    for name, stop in sorted(claimed.items()):
        if sizes.get(name, 0) > stop:
            findings.notes.append(f"{name} has {sizes[name] - stop} bytes behind its last record")
    extra = sorted(set(sizes) - set(claimed))
    if extra:
        more = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
        findings.notes.append(f"not part of the checkpoint: {', '.join(extra[:3])}{more}")


def check_file(store: Store, name: str, size: int, findings: Findings, *, deep: bool = True) -> str | None:
    """Check one file of `size` bytes by what it is; return its format, or None where it is no checkpoint's."""
    if not size and name.endswith((*PICKLED, ".safetensors")):
        findings.add(name, None, 0, "truncated")
        findings.note(f"{name} is empty")
        return "safetensors" if name.endswith(".safetensors") else "torch.save"
    head = store.read(name, 0, HEAD_BYTES)
    tail = bytes(memoryview(store.read(name, max(0, size - 22), size))[:4])
    if is_zip(head) or tail == b"PK\x05\x06":
        return _check_zip(store, name, size, findings, deep=deep)
    if is_legacy(head):
        return _check_legacy(store, name, size, findings)
    if is_safetensors(head, size) or name.endswith(".safetensors"):
        return _check_safetensors(store, name, size, findings)
    if name.endswith(PICKLED):
        findings.add(name, None, 0, "header", size)
        findings.notes.append(f"{name} is no file that torch.save wrote: it begins as none does")
        return "torch.save"
    return None


def _check_zip(store: Store, name: str, size: int, findings: Findings, *, deep: bool) -> str | None:
    """Check a torch.save zip; None where it is another program's."""
    findings.pace.wait(size)
    data = store.read(name)
    try:
        listed = entries(data, name)
    except FormatError:
        listed = []
    file_names = {entry.name.rsplit("/", 1)[-1] for entry in listed}
    if listed and not file_names & TORCH_ENTRIES and not name.endswith(PICKLED):
        findings.notes.append(f"{name} is a zip archive, but not torch.save's: it holds no data.pkl")
        return None
    saved: Saved | None = None
    found = list(faults(data, payloads=deep))
    if not listed:
        findings.note(f"{name} has no end that fits it: it was cut short, or is still being written")
    try:
        saved = read_saved(data, name, listed) if listed else None
    except RoomError:  # nothing is known of it: neither good nor damaged
        raise
    except FormatError as cause:
        findings.explain(cause)
        if not found:
            findings.add(name, None, 0, "pickle", size)
    if not has_checksums(listed):
        findings.unchecked_bytes += size
    findings.checked_bytes += size
    if saved is not None:
        _note_saved(saved, name, findings)
    names = saved.names_of_storages() if saved and found else {}
    for fault in found:
        key = (fault.entry or "").rpartition("/data/")[2]
        findings.add(name, names.get(key), fault.offset, fault.what, fault.num_bytes)
    return "torch.save"


def _note_saved(saved: Saved, name: str, findings: Findings) -> None:
    """Note which tensors a torch.save file holds, and what loading it would run."""
    findings.tensors[name] = frozenset(tensor.fqn for tensor in saved.tensors)
    findings.note(what_runs(saved.named, f"loading {name} with weights_only=False"))


def _check_legacy(store: Store, name: str, size: int, findings: Findings) -> str:
    data = store.read(name)
    try:
        saved = read_legacy(data, name)
        _note_saved(saved, name, findings)
        elements = sum(length for _, length in saved.storages.values())
        findings.unchecked_bytes += elements
        findings.checked_bytes += size - elements
        findings.note("torch.save before 1.6 wrote no checksum: elements of tensors were not checked")
    except RoomError:  # nothing is known of it: neither good nor damaged
        raise
    except FormatError as cause:
        findings.add(name, None, 0, "truncated", size)
        findings.explain(cause)
    return "torch.save, before 1.6"


def _check_safetensors(store: Store, name: str, size: int, findings: Findings) -> str:
    head = store.read(name, 0, HEAD_BYTES)
    if size >= 8:
        num_bytes = 8 + int.from_bytes(bytes(memoryview(head)[:8]), "little")
        head = store.read(name, 0, min(max(HEAD_BYTES, num_bytes), size))
    try:
        header = read_header(head, size, name)
        findings.checked_bytes += header.data_offset
        findings.unchecked_bytes += size - header.data_offset
        findings.tensors[name] = frozenset(header.tensors)
        findings.note("safetensors has no checksum: elements of tensors were not checked")
    except FormatError as cause:
        findings.add(name, None, 0, "header", size)
        findings.explain(cause)
    return "safetensors"


def check_folder(store: Store, sizes: Mapping[str, int], findings: Findings, *, deep: bool = True) -> str | None:
    """Check the torch.save and safetensors files of a folder, and that it has what an index names.

    `sizes` are the files that lie in it: name -> bytes. Returns the formats, or None where there is no such file.
    """
    names = [name for name in sizes if name.endswith((*PICKLED, ".safetensors"))]
    formats = {check_file(store, name, sizes[name], findings, deep=deep) for name in names} - {None}
    for index in [name for name in sizes if name.endswith(INDEX)]:
        try:
            file_of = read_index(bytes(store.read(index)), index)
        except FormatError as cause:
            findings.add(index, None, 0, "index")
            findings.explain(cause)
            continue
        for fqn, file in file_of.items():
            if file not in sizes or fqn not in findings.tensors.get(file, (fqn,)):
                findings.add(file, fqn, 0, "missing")
    return " and ".join(sorted(str(kind) for kind in formats)) or None


def read_index(data: bytes, name: str) -> dict[str, str]:
    """Return tensor -> file, as an index of several files tells it; raise `FormatError` where it is none.

    >>> read_index(b'{"weight_map": {"w": "a.safetensors"}}', "model.safetensors.index.json")
    {'w': 'a.safetensors'}
    """
    fix = f"Name a file that ends in {INDEX}, which has a weight_map."
    return dict(decode_json(data, name, _Index, fix=fix).weight_map)


class _Index(msgspec.Struct):
    """What an index says, as far as it is read."""

    weight_map: dict[str, str]
