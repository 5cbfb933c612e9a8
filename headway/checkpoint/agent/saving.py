"""One save, as an agent sees it: its rank's part into the draft, the commit, what is done when it cannot be.

Agents of other ranks are met in the draft only, a folder or a prefix of a
bucket; a bucket is looked at less often. A rank that will never finish leaves
a mark there; rank 0 gives the save up then, and marks the whole draft, so
that nobody waits for long. Times are int ns of `time.perf_counter_ns`.

>>> import tempfile
>>> hello = Hello(root=tempfile.mkdtemp(), attempt="a", rank=0, world_size=1)
>>> save = Persist(step=7, attempt="a", number=0, num_bytes=4, begun_ns=0)
>>> draft, phases = persist_rank(hello, Layout(()), save, bytearray(b"data"), RateLimiter())
>>> record = commit_if_ready(hello, draft)
>>> record.step, [entry.name for entry in record.files][0], seen(hello, draft) == record
(7, 'rank-0/digests.bin', True)

One pass over an image: CRC-32s put where they belong, digests of its blocks, bytes into a file.

The image lies in shared memory, complete but for the CRC-32s of the tensors'
payloads. A window of it goes through a core's cache once: payloads are
checksummed and their CRCs patched in, then blocks are digested, then the
window is written. CRCs lie behind their payload, so that a block is digested
only after it is final. Sizes are bytes.

>>> import io
>>> image = bytearray(b"head" + b"payload" + b"????" + b"tail")
>>> file = io.BytesIO()
>>> written = persist(image, [Payload(4, 11, (11,))], file, RateLimiter())
>>> file.getvalue() == bytes(image), image[11:15] == written.crc32s[0].to_bytes(4, "little"), written.digested.num_bytes
(True, True, 19)

Sums of what a snapshot was to copy, against what it copied: whether somebody wrote meanwhile.

The trainer's device sums the words of each tensor where the save begins; the agent sums the same words of the image.
A tensor that was written while it was copied has another sum, but for writes that keep it: a permutation of its words.

>>> sum_of(b"abcdabcd", 4) == 2 * int.from_bytes(b"abcd", "little"), sum_of(b"", 8)
(True, 0)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headway.checkpoint.agent.messages import Hello, Layout, Persist, Phase, Slot
from headway.checkpoint.policy import Keep
from headway.core.errors import DamageError, FormatError, HeadwayError, InputError
from headway.core.files.safe_files import whole_file
from headway.core.units import MIB
from headway.core.wire.pace import RateLimiter
from headway.storage import object_commit
from headway.storage.commit import CommittedCheckpoint, commit
from headway.storage.digests import Digested, Digester, block_bytes_for, crc32
from headway.storage.draft import LEFTOVER, AnyDraft, Draft, ObjectDraft, abandon, finish_rank, open_draft, ranks_done
from headway.storage.manifest import (
    MANIFEST,
    CommitRecord,
    Piece,
    RankManifest,
    StoredObject,
    entry_of,
    image_name,
    rank_folder,
)
from headway.storage.object_commit import checkpoints, discard, record_at, recover_root
from headway.storage.redundancy.parity import encode_rank
from headway.storage.stores import PART_BYTES, LocalStore, ObjectStore, durable_file, open_store, present, url_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

# One pass over an image: CRC-32s put where they belong, digests of its blocks, bytes into a file.

WINDOW_BYTES = MIB
"""Bytes that are checksummed, digested and written together: they stay in a core's cache meanwhile."""


class Sink(Protocol):
    """Where bytes go: a file opened for writing."""

    def write(self, data: memoryview, /) -> int:
        """Take the next bytes, all of them."""
        ...


@dataclass(frozen=True, slots=True)
class Payload:
    """The elements of one tensor in an image."""

    start: int
    stop: int
    crc_offsets: tuple[int, ...]
    """Where their CRC-32 is written, little-endian, all at or behind `stop`."""


@dataclass(frozen=True, slots=True)
class Written:
    """What one pass found out."""

    digested: Digested
    crc32s: tuple[int, ...]
    """[payloads] CRC-32 of each, in their order."""


def persist(image: Buffer, payloads: Sequence[Payload], file: Sink | None, pace: RateLimiter) -> Written:
    """Write `image` to `file` (None: nowhere), patching the CRC-32 of each of the `payloads` into it first.

    They are ascending and disjoint. Raises `InputError` when a CRC belongs in front of its payload's end; what the file
    raises passes through.
    """
    view = memoryview(image).cast("B")
    check(payloads, len(view))
    digester = Digester(block_bytes_for(len(view)))
    crcs: list[int] = []
    done = written = 0

    def take(stop: int) -> None:
        """Digest up to `stop`; write what makes a window."""
        nonlocal done, written
        while done < stop:
            step = min(written + WINDOW_BYTES, stop)
            digester.update(view[done:step])
            done = step
            if done - written == WINDOW_BYTES or done == len(view):
                if file is not None:
                    file.write(view[written:done])
                pace.wait(done - written)
                written = done

    for payload in payloads:
        take(payload.start)
        digester.take_crc32()
        take(payload.stop)
        crcs.append(digester.take_crc32())
        for offset in payload.crc_offsets:
            view[offset : offset + 4] = crcs[-1].to_bytes(4, "little")
    take(len(view))
    return Written(digester.finish(), tuple(crcs))


def check(payloads: Sequence[Payload], num_bytes: int) -> None:
    """Raise `InputError` unless payloads ascend within the image and their CRCs lie behind them."""
    end = 0
    for payload in payloads:
        behind = all(payload.stop <= offset <= num_bytes - 4 for offset in payload.crc_offsets)
        if not (end <= payload.start <= payload.stop <= num_bytes and behind):
            raise InputError(
                f"the payload {payload} does not fit an image of {num_bytes} bytes after byte {end}. "
                "Pass payloads in ascending order, each with its CRCs behind it."
            )
        end = payload.stop


LOG = logging.getLogger(__name__)
LOG.addHandler(logging.NullHandler())

GONE = ".gone-{}"
"""Mark in a draft: this rank will never finish its part."""

ABANDONED = ".abandoned"
"""Mark in a draft: rank 0 will never commit it, and why."""

POLL_S, BUCKET_POLL_S = (0.004, 0.05), (0.2, 2.0)
"""How often a folder, and a bucket, is looked at while other ranks write, at first and later; a look at a bucket is a
request."""


@cache
def _store(root: str) -> LocalStore | ObjectStore:
    """Return the store of a root, one per process: a bucket's keeps its connections."""
    return LocalStore(root) if url_of(root) is None else open_store(root)


def poll_s(hello: Hello) -> tuple[float, float]:
    """Return the seconds between looks for other ranks, at first and later."""
    return POLL_S if url_of(hello.root) is None else BUCKET_POLL_S


def draft_of(hello: Hello, step: int, attempt: str) -> AnyDraft:
    """Return the draft of a save."""
    is_folder = url_of(hello.root) is None
    return Draft(Path(hello.root), step, attempt) if is_folder else ObjectDraft(hello.root, step, attempt)


def persist_rank(
    hello: Hello, layout: Layout, save: Persist, memory: Buffer, pace: RateLimiter
) -> tuple[AnyDraft, tuple[Phase, ...]]:
    """Write the rank's image, digests and manifest into the draft, durably; return the draft and how long it took.

    A part that stands already, as an agent that was killed left it, is not written again. What the file system raises
    passes through.
    """
    draft, store = draft_of(hello, save.step, save.attempt), _store(hello.root)
    if seen(hello, draft) is not None or _has_part(hello, draft):
        return draft, ()
    begun_ns = time.perf_counter_ns()
    if isinstance(draft, Draft):
        open_draft(hello.root, save.step, save.attempt, rank=hello.rank)
    name, image, written = image_name(hello.rank), memoryview(memory)[: save.num_bytes], None
    if save.num_bytes and isinstance(draft, Draft):
        with durable_file(draft.path / name) as file:
            written = persist(image, payloads(layout.slots), file, pace)
    elif save.num_bytes:
        written = persist(image, payloads(layout.slots), None, RateLimiter())
        store.put(f"{draft.prefix}/{name}", _paced(image, pace))
    digested = None if written is None else written.digested
    finish_rank(draft, manifest_of(hello, layout, save, memory, written), digested, store)
    return draft, (Phase("checkpoint.persist", begun_ns, time.perf_counter_ns(), save.num_bytes),)


def _has_part(hello: Hello, draft: AnyDraft) -> bool:
    """Say whether the rank's manifest is in a draft."""
    return bool(present(_store(hello.root), f"{draft.prefix}/{rank_folder(hello.rank)}", [MANIFEST]))


def _paced(image: memoryview, pace: RateLimiter) -> Iterator[memoryview]:
    """Yield an image part by part, no faster than the pace."""
    for start in range(0, len(image), PART_BYTES):
        part = image[start : start + PART_BYTES]
        yield part
        pace.wait(len(part))


def payloads(slots: Sequence[Slot]) -> list[Payload]:
    """Return what is to be checksummed in an image."""
    return [Payload(slot.payload_offset, slot.payload_offset + slot.payload_bytes, slot.crc_offsets) for slot in slots]


def commit_if_ready(hello: Hello, draft: AnyDraft) -> CommitRecord | None:
    """Commit when all ranks are done; return the record, or None while some are not.

    Raises `HeadwayError` when a rank will never be done, and as `headway.storage.commit.commit` does.
    """
    record = seen(hello, draft)
    if record is not None:
        return record
    store = _store(hello.root)
    missing = set(range(hello.world_size)) - ranks_done(draft, hello.world_size, store)
    lost = marked_gone(draft, missing)
    if lost:
        raise lost_part(draft.step, lost)
    if missing:
        return None
    size, redundancy = hello.world_size, hello.redundancy
    if isinstance(draft, Draft):
        may = _may_replace(hello, draft)
        return commit(draft, world_size=size, redundancy=redundancy, replace=may, deadline_s=0)
    assert isinstance(store, ObjectStore), "it is that of the draft's root"
    standing = record_at(store, draft.step)
    old = standing if standing is not None and is_superseded(hello, standing) else None
    return object_commit.commit(store, draft, world_size=size, redundancy=redundancy, replaces=old)


def lost_part(step: int, lost: set[int]) -> HeadwayError:
    """Return what to raise where the ranks `lost` will never finish their parts of a save."""
    return HeadwayError(
        f"step {step} is not committed: rank {min(lost)} could not write its part. Look at that rank's "
        "error; the checkpoint before it still stands."
    )


def is_superseded(hello: Hello, record: CommitRecord) -> bool:
    """Whether a checkpoint of a step that is saved again is an earlier one of this attempt, or older than that."""
    return record.attempt.startswith(hello.attempt) or record.created_unix_s < hello.started_unix_s


def seen(hello: Hello, draft: AnyDraft) -> CommitRecord | None:
    """Return the record of a draft that has been committed, else None."""
    with suppress(DamageError, FormatError):
        record = record_at(_store(hello.root), draft.step)
        return record if record is not None and record.attempt == draft.attempt else None
    return None


def outcome(hello: Hello, draft: AnyDraft) -> CommitRecord | None:
    """Return the record once rank 0's agent has committed, else None; raises `HeadwayError` if it gave up."""
    store = _store(hello.root)
    marks = present(store, draft.prefix, [ABANDONED])
    record = seen(hello, draft)
    if record is not None:
        return record
    if marks:
        with suppress(FileNotFoundError):
            raise HeadwayError(f"rank 0 gave it up: {bytes(store.read(f'{draft.prefix}/{ABANDONED}')).decode()}")
    if marks is not None:
        return None
    later = max(checkpoints(hello.root), default=None, key=lambda one: one.step)
    if later is not None and later.step > draft.step:
        return later.record  # ours was committed, and has been superseded since
    named = f"its draft {draft.path}" if isinstance(draft, Draft) else draft.path
    raise HeadwayError(f"step {draft.step} is not committed: {named} is gone. Save again; look at who removed it.")


def _mark(draft: AnyDraft, name: str, why: str = "") -> None:
    """Leave a mark in a draft. Who looks finds the whole of it or nothing."""
    # No room even for that, no folder, no access: the others find out by waiting.
    with suppress(OSError, HeadwayError):
        if isinstance(draft, Draft):
            with whole_file(draft.path / name) as written:
                written.write_text(why)
        else:
            _store(draft.root).put(f"{draft.prefix}/{name}", [why.encode()])


def give_up(draft: AnyDraft, why: str) -> None:
    """Tell the other ranks' agents that a save will never be committed."""
    _mark(draft, ABANDONED, why)


def mark_gone(hello: Hello, draft: AnyDraft) -> None:
    """Tell rank 0's agent that this rank will never finish its part of a draft."""
    _mark(draft, GONE.format(hello.rank))


def mark_orphans(hello: Hello) -> None:
    """Mark every draft of this attempt that this rank has no part in: its trainer is dead and will send none."""
    with suppress(OSError, HeadwayError):
        for draft in _drafts(hello):
            if not _has_part(hello, draft):
                mark_gone(hello, draft)


def _drafts(hello: Hello) -> Iterator[AnyDraft]:
    """Yield the drafts of this attempt that are not committed."""
    store = _store(hello.root)
    if isinstance(store, LocalStore):
        for path in Path(hello.root).glob(f".step-*.{hello.attempt}*.draft"):
            if match := LEFTOVER.fullmatch(path.name):
                yield draft_of(hello, int(match[1]), match[2])
        return
    for folder in store.folders():
        step, _, attempt = folder.partition(".")
        if attempt.startswith(hello.attempt):
            draft = draft_of(hello, int(step.removeprefix("step-")), attempt)
            if seen(hello, draft) is None:
                yield draft


def marked_gone(draft: AnyDraft, ranks: set[int]) -> set[int]:
    """Return which of the `ranks` will never finish their part of a draft."""
    marks = {GONE.format(rank): rank for rank in ranks}
    return {marks[name] for name in present(_store(str(draft.root)), draft.prefix, marks) or ()} if ranks else set()


def prune(hello: Hello, step: int) -> None:
    """Remove the checkpoints of ours that need not be kept now that `step` is committed, and what lies after none."""
    known = {one.step: one for one in checkpoints(hello.root) if one.ours and one.step <= step}
    for surplus in sorted(Keep(hello.keep_last, hello.keep_every).surplus(known)):
        discard(known[surplus])


def is_awaited(draft: AnyDraft) -> bool:
    """Say whether agents of other ranks have parts in a draft, and so wait to hear what becomes of it."""
    with suppress(HeadwayError):
        return sum(name.endswith(f"/{MANIFEST}") for name in _store(str(draft.root)).list(draft.prefix)) > 1
    return False


def sweep(failed: set[AnyDraft]) -> None:
    """Remove drafts that were given up."""
    for draft in failed:
        with suppress(HeadwayError):  # it is garbage then, which `recover` finds later
            abandon(draft, _store(str(draft.root)))
    failed.clear()


def recover(hello: Hello) -> Sequence[Path | str]:
    """Remove what dead attempts left; return what was removed."""
    return recover_root(hello.root)


def encode(path: Path | str, rank: int, pace: RateLimiter) -> int:
    """Write this rank's parity of a committed checkpoint; return how many bytes. Idempotent.

    Raises `InputError` for a bucket, which keeps copies of its own.
    """
    if isinstance(path, str):
        raise InputError(f"{path} has no parity: redundancy is for folders. Save with redundancy='none'.")
    facts = encode_rank(path, rank, pace=pace)
    return 0 if facts is None else facts.m * facts.segment_bytes


def _may_replace(hello: Hello, draft: Draft) -> bool:
    """Whether the checkpoint of the same step, if there is one, may give way."""
    standing = CommittedCheckpoint(draft.step, draft.target)
    if not standing.ours:
        return False  # none, or somebody else's
    record = standing.record  # None: broken, what it says of itself cannot be read
    return record is None or is_superseded(hello, record)


def manifest_of(hello: Hello, layout: Layout, save: Persist, memory: Buffer, written: Written | None) -> RankManifest:
    """Return what the rank says of its part."""
    name = image_name(hello.rank)
    crcs = dict(zip((slot.record_offset for slot in layout.slots), written.crc32s, strict=True)) if written else {}
    pieces = tuple(
        Piece(
            slot.fqn, slot.dtype, slot.shape, slot.offsets, slot.lengths, name, slot.record_offset, slot.record_bytes,
            slot.payload_offset, slot.payload_bytes, crcs[slot.record_offset],
        )
        for slot in (*layout.slots, *layout.tied)
    )  # fmt: skip
    view = memoryview(memory)
    whose = hello.rank if hello.world_size > 1 else None
    objects = tuple(
        StoredObject(
            value.fqn, whose, name, value.record_offset, value.record_bytes,
            crc32(view[value.record_offset : value.record_offset + value.record_bytes]), value.any_world,
        )
        for value in save.values
    )  # fmt: skip
    image = entry_of(name, written.digested, rank=hello.rank, kind="image") if written else None
    return RankManifest(
        save.step, save.attempt, hello.rank, hello.world_size, image, pieces, objects, save.replicas, layout.paths,
        hello.host,
    )  # fmt: skip


# Sums of what a snapshot was to copy, against what it copied: whether somebody wrote meanwhile.

_WORDS: dict[int, Any] = {8: np.int64, 4: np.int32, 2: np.int16, 1: np.uint8}
"""Bytes of a word -> type that a sum reads it as, on both sides."""


class TornError(HeadwayError):
    """The state was written while it was copied: the copy is of no moment."""


def sum_of(memory: Buffer, word_bytes: int) -> int:
    """Return the sum of the words modulo 2**64, as an int64; the memory is a whole number of words."""
    words: NDArray[Any] = np.frombuffer(memoryview(memory), dtype=_WORDS[word_bytes])
    return int(words.sum(dtype=np.int64))


def check_sums(image: Buffer, slots: Sequence[Slot], sums: Sequence[tuple[int, int]]) -> None:
    """Raise `TornError` unless each tensor of the image has its sum: `sums[k]` is (bytes of a word, sum), of slot k.

    A word of 0 bytes says that nobody summed that tensor: later work waited for its copy.
    """
    view = memoryview(image)
    torn = [
        slot.fqn
        for slot, (word_bytes, expected) in zip(slots, sums, strict=False)
        if word_bytes
        and sum_of(view[slot.payload_offset : slot.payload_offset + slot.payload_bytes], word_bytes) != expected
    ]
    if torn:
        raise TornError(
            f"{torn[0]!r}{f' and {len(torn) - 1} more' if torn[1:] else ''} changed while it was copied, and not in an "
            "attached optimizer's step. From now on work waits for the copy at once; call maybe_save() after the "
            "write, and attach every optimizer"
        )
