"""How two checkpoints differ: what one has and the other lacks, and which values are not bit-equal.

The layouts may differ: boxes are compared where they meet. Between two
checkpoints of ours, boxes that lie alike are compared by the digests of
their blocks first, so that what is equal is not read.

>>> from headway.storage.checks.contents import Contents
>>> from headway.storage.stores import LocalStore
>>> nothing = Contents(LocalStore("."), "dcp", {}, {})
>>> difference(nothing, nothing).is_equal
True
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from headway.storage.boxes import BoxIndex
from headway.storage.checks.contents import Contents, StoredBox, Tensor, bits, opened
from headway.storage.commit import digests_of
from headway.storage.digests import Digested
from headway.storage.formats.values import ITEM_BYTES, StoredValue
from headway.storage.manifest import GENERATORS


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A value that both have, and that differs."""

    name: str
    """Name of the tensor or object."""

    what: str
    """`dtype`, `shape`, `content`, `value`; `object`: the bytes of one that cannot be told further; or `kind`: a
    tensor became something else, or the other way round."""

    before: str = ""
    """What the first one has."""

    after: str = ""
    """What the second one has."""

    num_elements: int = 0
    """Elements that differ, where the content does."""


@dataclass(slots=True)
class Difference:
    """How the second of two checkpoints differs from the first."""

    added: list[str] = field(default_factory=list)
    """Names that only the second one has."""

    removed: list[str] = field(default_factory=list)
    """Names that only the first one has."""

    changed: list[ValueChange] = field(default_factory=list)
    """Names that both have, with other values."""

    num_equal: int = 0
    """How many values are bit-equal."""

    read_bytes: int = 0
    """Bytes of elements that had to be read."""

    unread_bytes: int = 0
    """Bytes of elements that are equal by the digests of their blocks, and were not read: what was committed."""

    @property
    def is_equal(self) -> bool:
        """Whether there is no difference."""
        return not (self.added or self.removed or self.changed)

    def to_json(self) -> dict[str, object]:
        """Return the fields by name."""
        changed = [
            {"name": c.name, "what": c.what, "before": c.before, "after": c.after, "num_elements": c.num_elements}
            for c in self.changed
        ]
        return {
            "equal": self.is_equal, "added": self.added, "removed": self.removed, "changed": changed,
            "num_equal": self.num_equal, "read_bytes": self.read_bytes,
            "unread_bytes": self.unread_bytes,
        }  # fmt: skip


def difference(first: Contents, second: Contents) -> Difference:
    """Compare two checkpoints bit by bit: their tensors, and what their other values are, whatever bytes say it."""
    first, second = opened(first), opened(second)
    names = {*first.tensors, *first.values, *first.objects}, {*second.tensors, *second.values, *second.objects}
    added, removed = (sorted(filter(_counts, names[one] - names[1 - one])) for one in (1, 0))
    found = Difference(added, removed)
    digests = _Digests(first), _Digests(second)
    for name in sorted(names[0] & names[1]):
        change = _change(name, first, second, digests, found)
        if change is None:
            found.num_equal += 1
        else:
            found.changed.append(change)
    return found


def _counts(name: str) -> bool:
    """Whether a value that one of two checkpoints has alone makes a difference.

    Generators of a rank that the other's job did not have are made of that one's when it grows.
    """
    return not name.startswith(f"{GENERATORS}.state@rank")


class _Digests:
    """The digests of a checkpoint's images, read when they are first asked for."""

    def __init__(self, held: Contents) -> None:
        self._held = held
        self._sizes = {} if held.record is None else held.store.list()
        self._found: dict[str, Digested | None] = {}

    def of(self, stored: StoredBox) -> tuple[object, ...] | None:
        """Return what tells a record's bytes without reading them: its place in its blocks, and their digests."""
        record = self._held.record
        if record is None:
            return None
        if stored.file not in self._found:
            entry = next((entry for entry in record.files if entry.name == stored.file), None)
            # of a file that was cut short since, the digests say what was there once: reading it tells
            is_there = entry is not None and self._sizes.get(stored.file, 0) >= entry.num_bytes
            rank = entry.rank if entry is not None and is_there else None
            self._found[stored.file] = None if rank is None else digests_of(self._held.store, record, rank)
        written = self._found[stored.file]
        if written is None:
            return None
        start, stop = written.covering(stored.record_offset, stored.record_offset + stored.record_bytes)
        blocks = written.digests[start // written.block_bytes : -(-stop // written.block_bytes)]
        place = stored.record_offset - start, stored.record_bytes, written.block_bytes, written.digest
        return (*place, blocks.tobytes())


def _change(
    name: str, first: Contents, second: Contents, digests: tuple[_Digests, _Digests], found: Difference
) -> ValueChange | None:
    kind, other = _kind(first, name), _kind(second, name)
    if kind != other:
        return ValueChange(name, "kind", kind, other)
    if kind == "value":
        old, new = first.values[name], second.values[name]
        return None if old.digest == new.digest else ValueChange(name, "value", *_told(old, new))
    if kind == "object":
        pickled = [
            bytes(held.read(at.file, at.record_offset, at.record_offset + at.record_bytes))
            for held, at in ((first, first.objects[name]), (second, second.objects[name]))
        ]
        return None if pickled[0] == pickled[1] else ValueChange(name, "object")
    before, after = first.tensors[name], second.tensors[name]
    if before.dtype != after.dtype:
        return ValueChange(name, "dtype", before.dtype, after.dtype)
    if before.shape != after.shape:
        return ValueChange(name, "shape", str(list(before.shape)), str(list(after.shape)))
    num_elements = _differing(first, before, second, after, digests, found)
    return ValueChange(name, "content", num_elements=num_elements) if num_elements else None


def _kind(held: Contents, name: str) -> str:
    return "tensor" if name in held.tensors else "value" if name in held.values else "object"


def _told(old: StoredValue, new: StoredValue) -> tuple[str, str]:
    """Return two values that differ so that it shows: by their types where they look alike."""
    return (old.text, new.text) if old.kind == new.kind else (f"{old.kind} {old.text}", f"{new.kind} {new.text}")


def _differing(
    first: Contents, before: Tensor, second: Contents, after: Tensor, digests: tuple[_Digests, _Digests],
    found: Difference,
) -> int:  # fmt: skip
    """Return how many elements of a tensor differ, over the boxes where the two layouts meet."""
    index, total = BoxIndex([stored.box for stored in after.boxes]), 0
    for mine in before.boxes:
        for at, shared in index.overlapping(mine.box):
            theirs = after.boxes[at]
            told = digests[0].of(mine) if mine.box == theirs.box else None
            if told is not None and told == digests[1].of(theirs):
                found.unread_bytes += math.prod(shared.lengths) * ITEM_BYTES[before.dtype]
                continue
            ours = bits(first, before, mine)[shared.within(mine.box)]
            other = bits(second, after, theirs)[shared.within(theirs.box)]
            found.read_bytes += 2 * ours.size
            total += int(np.any(ours != other, axis=-1).sum())
    return total
