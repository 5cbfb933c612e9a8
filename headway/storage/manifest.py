"""What a checkpoint says of itself: a manifest per rank, and one commit record.

A rank's manifest lists the pieces of tensors and the objects in its image,
and is the last file that the rank writes: where it stands, the rank is done.
The commit record lists every file with its size and root, and is what makes
a directory a checkpoint of ours. Both are JSON, whose last line is their own
checksum. Offsets and sizes are bytes; `offsets` and `lengths` are elements
of the whole tensor.

>>> record = CommitRecord(step=3, attempt="a", world_size=1)
>>> decode(encode(record), CommitRecord, "commit.json") == record
True
>>> decode(encode(record).replace(b"3", b"4", 1), CommitRecord, "commit.json")
Traceback (most recent call last):
headway.core.errors.DamageError: commit.json is damaged: its own checksum differs. Run: headway ckpt repair

One place where stored bytes are not what was written.

What checking a checkpoint found so far: places of damage, bytes checked, bytes that cannot be.

>>> findings = Findings()
>>> for start in (0, 4096, 12288):
...     findings.add("a.distcp", "w", start, "block", 4096)
>>> [(damage.offset_bytes, damage.num_bytes) for damage in findings.damaged]
[(0, 8192), (12288, 4096)]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headway.core.errors import DamageError, FormatError
from headway.core.files.safe_files import read_regular
from headway.core.wire.pace import RateLimiter
from headway.storage.digests import Digested, checksum, digest_of, tree_root

GENERATORS = "headway_rng"
"""Name of the states of random number generators among the objects of a checkpoint."""

METADATA, COMMIT = ".metadata", "commit.json"
"""Names in a checkpoint's directory: DCP's metadata, and our commit record."""

MANIFEST, DIGESTS_FILE, PARITY, PARITY_FACTS, COPIES = (
    "manifest.json",
    "digests.bin",
    "parity.bin",
    "parity.json",
    "copies",
)
"""Names in a rank directory; beside them lies the image, `__<rank>_0.distcp`."""

TWIN = ".copy"
"""What is added to the name of a manifest or commit record for its twin: the same bytes, against a flipped bit."""

COMMIT_SCHEMA, MANIFEST_SCHEMA = "headway.ckpt.commit/1", "headway.ckpt.rank/1"


def rank_folder(rank: int) -> str:
    """Return the name of a rank directory: all that the agent of `rank` writes."""
    return f"rank-{rank}"


def image_name(rank: int) -> str:
    """Return the path of a rank's image inside the checkpoint, as DCP's metadata has it."""
    return f"{rank_folder(rank)}/__{rank}_0.distcp"


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One box of one tensor, stored as one record (a torch.save zip) of an image."""

    fqn: str
    """Name of the tensor, as stock DCP flattens a state dict: `model.0.weight`."""

    dtype: str
    """Name in torch, without the module: `float32`, `bfloat16`, `float8_e4m3fn`."""

    shape: tuple[int, ...]
    """[d] Shape of the whole tensor."""

    offsets: tuple[int, ...]
    """[d] Where the box begins."""

    lengths: tuple[int, ...]
    """[d] How long the box is."""

    file: str
    """Path of the image inside the checkpoint."""

    record_offset: int
    """Where the record begins: a multiple of 4 KiB."""

    record_bytes: int
    """Length of the record."""

    payload_offset: int
    """Where the elements begin, in row-major order of the box; a place in the file, not in the record."""

    payload_bytes: int
    """Length of the elements."""

    crc32: int
    """CRC-32 of the elements."""


class StoredObject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pickled value that is no tensor, stored as one record of an image."""

    fqn: str
    """Name of the value."""

    rank: int | None
    """The rank whose value this is; None: one rank wrote it for all. See `merged_objects`."""

    file: str
    """Path of the image inside the checkpoint."""

    record_offset: int
    """Where the record begins."""

    record_bytes: int
    """Length of the record."""

    crc32: int
    """CRC-32 of the record."""

    any_world: bool = False
    """A value per rank that another world size may take from rank `min(r, old world size - 1)`."""


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a checkpoint, and by what its bytes are known."""

    name: str
    """Path inside the checkpoint."""

    num_bytes: int
    """Length of the file."""

    block_bytes: int
    """Size of the blocks that were hashed."""

    root: str
    """Merkle root, hex: see `digests.merkle_root`."""

    rank: int | None = None
    """Whose agent wrote it; None: rank 0's, at the commit."""

    kind: str = "image"
    """`image`, `digests`, `manifest` or `metadata`."""


class RankManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that one rank wrote for one checkpoint."""

    step: int
    """Step of the checkpoint."""

    attempt: str
    """The attempt of the job that saved it."""

    rank: int
    """Who wrote it."""

    world_size: int
    """How many ranks write this checkpoint."""

    image: FileEntry | None
    """The rank's image; None where the rank owns nothing."""

    pieces: tuple[Piece, ...] = ()
    """Pieces of tensors in the image."""

    objects: tuple[StoredObject, ...] = ()
    """Values in the image that are no tensors."""

    replicas: dict[str, str] = {}
    """Name of a tensor that is taken to be equal on all ranks -> digest of all of it, as this rank held it."""

    paths: dict[str, tuple[str | int, ...]] = {}
    """Name -> the keys that lead to the value in the nested state dict (DCP's `planner_data`)."""

    host: str = ""
    """Failure domain of the rank: its host, or `rack/host`."""

    digest: str = "xxh3_64"
    """How the image's blocks are hashed: a name of `digests.DIGESTS`."""

    extra: dict[str, Any] = {}
    """What else the writer notes: the layout it was saved from, versions."""

    schema: str = MANIFEST_SCHEMA


class CommitRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record of a commit; a directory that holds a good one is a checkpoint, whole."""

    step: int
    """Step of the checkpoint."""

    attempt: str
    """The attempt of the job that saved it."""

    world_size: int
    """How many ranks wrote it."""

    created_unix_s: float = 0.0
    """When it was committed."""

    files: tuple[FileEntry, ...] = ()
    """Every file but this one, and but what is written after the commit (parity, copies)."""

    root: str = ""
    """Merkle root over all files, hex: see `digests.tree_root`."""

    redundancy: str = "none"
    """What parity was asked for: `none`, `xor`, `+m` or `k+m`."""

    digest: str = "xxh3_64"
    """How blocks are hashed: a name of `digests.DIGESTS`."""

    extra: dict[str, Any] = {}
    """What else the writer notes."""

    format_version: int = 1
    """Version of the layout of the directory."""

    schema: str = COMMIT_SCHEMA


Record = TypeVar("Record", bound=msgspec.Struct)

LAST_LINE = b',\n"checksum":"xxh3_128:'


def encode(record: msgspec.Struct) -> bytes:
    """Return a record as JSON whose last line is the checksum of all lines before it."""
    body = msgspec.json.format(msgspec.json.encode(record), indent=0)[:-1]
    return body + LAST_LINE + checksum(body).encode() + b'"}\n'


def is_whole(data: bytes) -> bool:
    """Say whether bytes are a record, of whatever kind and version, as it was written: its checksum is right."""
    cut = data.rfind(LAST_LINE)
    return cut >= 0 and data[cut:] == LAST_LINE + checksum(data[:cut]).encode() + b'"}\n'


def decode(data: bytes, kind: type[Record], name: str) -> Record:
    """Return the record that `encode` wrote; `name` is the file's, for messages.

    Raises `DamageError` when the checksum differs, `FormatError` when the bytes are no record of this kind or of a
    version that this headway does not know.
    """
    cut = data.rfind(LAST_LINE)
    if cut < 0:
        if data.startswith(b'{"step"'):
            raise DamageError(f"{name} is damaged: its last line, the checksum, is missing. Run: headway ckpt repair")
        raise FormatError(
            f"{name} is no {kind.__name__} of headway's: the checksum line is missing. Name another file."
        )
    if not is_whole(data):
        raise DamageError(f"{name} is damaged: its own checksum differs. Run: headway ckpt repair")
    try:
        record = msgspec.json.decode(data[:cut] + b"}", type=kind)
    except msgspec.ValidationError as cause:
        raise FormatError(
            f"{name} was written by another version of headway ({cause}). Read it with the one that wrote it."
        ) from cause
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise FormatError(f"{name} is no {kind.__name__} of headway's: {cause}. Use another copy.") from cause
    known, told = kind.__struct_defaults__[-1], msgspec.structs.asdict(record)["schema"]
    if told != known:
        raise FormatError(f"{name} has the schema {told!r}; this headway reads {known!r}. Install a newer one.")
    return record


def read_record(path: str | Path, kind: type[Record]) -> Record:
    """Return the record in the file `path`; raises as `decode` does."""
    return decode(read_regular(path), kind, str(path))


def small_entry(name: str, data: bytes, *, rank: int | None, kind: str, digest: str = "xxh3_64") -> FileEntry:
    """Return the entry of a file whose bytes are at hand."""
    return entry_of(name, digest_of(data, digest=digest), rank=rank, kind=kind)


def entry_of(name: str, written: Digested, *, rank: int | None, kind: str) -> FileEntry:
    """Return the entry of a file whose digests are at hand."""
    return FileEntry(name, written.num_bytes, written.block_bytes, written.root, rank, kind)


def root_of(files: tuple[FileEntry, ...], *, digest: str = "xxh3_64") -> str:
    """Return the Merkle root over all files of a checkpoint."""
    return tree_root(((file.name, file.num_bytes, file.root) for file in files), digest=digest)


def merged_objects(manifests: Iterable[RankManifest]) -> dict[str, dict[int | None, StoredObject]]:
    """Return name -> whose -> where, over all ranks' objects.

    An object that all ranks of the world wrote with equal bytes (length and CRC-32 of the record), or that one wrote
    for all, has the one key None; any other has a key per rank that wrote it.
    """
    found: dict[str, dict[int | None, StoredObject]] = {}
    world_size = 0
    for manifest in sorted(manifests, key=lambda manifest: manifest.rank):
        world_size = manifest.world_size
        for entry in manifest.objects:
            found.setdefault(entry.fqn, {})[entry.rank] = entry
    for fqn, entries in found.items():
        equal = len({(entry.record_bytes, entry.crc32) for entry in entries.values()}) == 1
        if equal and len(entries) == world_size and None not in entries:
            found[fqn] = {None: entries[min(rank for rank in entries if rank is not None)]}
    return found


@dataclass(frozen=True, slots=True, order=True)
class Damage:
    """One place where stored bytes are not what was written: what `verify` finds and `parity.assess` judges.

    >>> Damage("rank-0/__0_0.distcp", "model.0.weight", 4096, "block", 4096).to_json()["offset_bytes"]
    4096
    """

    file: str
    """Path inside the checkpoint."""

    tensor: str | None
    """Name of the tensor or object that the bytes belong to; None where they belong to none."""

    offset_bytes: int
    """Where in the file: the start of the damaged block, record or field; 0 for a whole file."""

    what: str
    """`missing`, `truncated`, `extra`, or what differs: `block`, `payload`, `container`, `checksum`, ..."""

    num_bytes: int = 0
    """How many bytes are in doubt; 0: to the end of the file."""

    def to_json(self) -> dict[str, object]:
        """Return the fields by name."""
        return asdict(self)


# What checking a checkpoint found so far: places of damage, bytes checked, bytes that cannot be.


@dataclass(slots=True)
class Findings:
    """What checking a checkpoint found so far."""

    pace: RateLimiter = field(default_factory=RateLimiter)
    """Holds the reading back to a rate."""

    damaged: list[Damage] = field(default_factory=list)
    """Places that differ, in the order of their files; neighbours of one kind are one."""

    checked_bytes: int = 0
    """Bytes that were held to a checksum, or to a rule that a flipped bit breaks."""

    unchecked_bytes: int = 0
    """Bytes for which there is no checksum."""

    notes: list[str] = field(default_factory=list)
    """What a person should know, and what is no damage."""

    tensors: dict[str, frozenset[str]] = field(default_factory=dict)
    """File -> names of the tensors in it, of torch.save and safetensors files that could be read."""

    def note(self, sentence: str | None) -> None:
        """Keep what a person should know, once."""
        if sentence is not None and sentence not in self.notes:
            self.notes.append(sentence)

    def explain(self, cause: FormatError) -> None:
        """Keep why something cannot be read; the advice to check it is followed already."""
        self.note(str(cause).removesuffix(" Check it: headway ckpt verify"))

    def add(self, file: str, tensor: str | None, offset_bytes: int, what: str, num_bytes: int = 0) -> None:
        """Note a damaged place; one that goes on where the last one of its kind ended makes that one longer."""
        last = self.damaged[-1] if self.damaged else None
        goes_on = last is not None and last.num_bytes > 0 and last.offset_bytes + last.num_bytes == offset_bytes
        if last is not None and goes_on and (last.file, last.tensor, last.what) == (file, tensor, what):
            self.damaged[-1] = Damage(file, tensor, last.offset_bytes, what, last.num_bytes + num_bytes)
        else:
            self.damaged.append(Damage(file, tensor, offset_bytes, what, num_bytes))
