"""One save, as an agent sees it: its rank's part into the draft, the commit, what is done when it cannot be.

Agents of other ranks are met in the draft's folder only. A rank that will
never finish leaves a mark there; rank 0 gives the save up then, and marks the
whole draft, so that nobody waits for long. Times are int ns of
`time.perf_counter_ns`.

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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headway.checkpoint.agent.messages import Hello, Layout, Persist, Phase, Slot
from headway.checkpoint.keep import Keep
from headway.core.errors import DamageError, FormatError, HeadwayError, InputError
from headway.core.files.safe_files import whole_file
from headway.core.units import MIB
from headway.core.wire.pace import RateLimiter
from headway.storage.commit import CommittedCheckpoint, commit, committed, newest, remove
from headway.storage.commit import recover as recover_drafts
from headway.storage.draft import Draft, abandon, finish_rank, open_draft, ranks_done
from headway.storage.redundancy.parity import encode_rank
from headway.storage.stored.digests import Digested, Digester, block_bytes_for, crc32
from headway.storage.stored.manifest import (
    COMMIT,
    MANIFEST,
    CommitRecord,
    Piece,
    RankManifest,
    StoredObject,
    entry_of,
    image_name,
    rank_folder,
    read_record,
)
from headway.storage.stored.stores import durable_file

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


def persist(image: Buffer, payloads: Sequence[Payload], file: Sink, pace: RateLimiter) -> Written:
    """Write `image` to `file`, patching the CRC-32 of each of the `payloads` (ascending, disjoint) into it first.

    Raises `InputError` when a CRC belongs in front of its payload's end; what the file raises passes through.
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


POLL_S = (0.004, 0.05)
"""How often the folder is looked at while other ranks write, at first and later."""


def draft_of(hello: Hello, save: Persist) -> Draft:
    """Return the draft of a save."""
    return Draft(Path(hello.root), save.step, save.attempt)


def persist_rank(
    hello: Hello, layout: Layout, save: Persist, memory: Buffer, pace: RateLimiter
) -> tuple[Draft, tuple[Phase, ...]]:
    """Write the rank's image, digests and manifest into the draft, durably; return the draft and how long it took.

    A part that stands already, as an agent that was killed left it, is not written again. What the file system raises
    passes through.
    """
    draft = draft_of(hello, save)
    if seen(hello, draft) is not None or (draft.rank_path(hello.rank) / MANIFEST).exists():
        return draft, ()
    begun_ns = time.perf_counter_ns()
    draft = open_draft(hello.root, save.step, save.attempt, rank=hello.rank)
    name, written = image_name(hello.rank), None
    if save.num_bytes:
        image = memoryview(memory)[: save.num_bytes]
        with durable_file(draft.path / name) as file:
            written = persist(image, payloads(layout.slots), file, pace)
    digested = None if written is None else written.digested
    finish_rank(draft, manifest_of(hello, layout, save, memory, written), digested)
    return draft, (Phase("checkpoint.persist", begun_ns, time.perf_counter_ns(), save.num_bytes),)


def payloads(slots: Sequence[Slot]) -> list[Payload]:
    """Return what is to be checksummed in an image."""
    return [Payload(slot.payload_offset, slot.payload_offset + slot.payload_bytes, slot.crc_offsets) for slot in slots]


def commit_if_ready(hello: Hello, draft: Draft) -> CommitRecord | None:
    """Commit when all ranks are done; return the record, or None while some are not.

    Raises `HeadwayError` when a rank will never be done, and as `headway.storage.commit.commit` does.
    """
    record = seen(hello, draft)
    if record is not None:
        return record
    missing = set(range(hello.world_size)) - ranks_done(draft, hello.world_size)
    lost = marked_gone(draft.path, missing)
    if lost:
        raise lost_part(draft.step, lost)
    if missing:
        return None
    return commit(
        draft,
        world_size=hello.world_size,
        redundancy=hello.redundancy,
        replace=_may_replace(hello, draft),
        deadline_s=0,
    )


def lost_part(step: int, lost: set[int]) -> HeadwayError:
    """Return what to raise where the ranks `lost` will never finish their parts of a save."""
    return HeadwayError(
        f"step {step} is not committed: rank {min(lost)} could not write its part. Look at that rank's "
        "error; the checkpoint before it still stands."
    )


def is_superseded(hello: Hello, record: CommitRecord) -> bool:
    """Whether a checkpoint of a step that is saved again is an earlier one of this attempt, or older than that."""
    return record.attempt.startswith(hello.attempt) or record.created_unix_s < hello.started_unix_s


def seen(hello: Hello, draft: Draft) -> CommitRecord | None:
    """Return the record of a draft that has been committed, else None."""
    record = _record(draft.target)
    return record if record is not None and record.attempt == draft.attempt else None


def outcome(hello: Hello, draft: Draft) -> CommitRecord | None:
    """Return the record once rank 0's agent has committed, else None; raises `HeadwayError` if it gave up."""
    there = draft.path.exists()
    record = seen(hello, draft)
    if record is not None:
        return record
    with suppress(OSError):
        raise HeadwayError(f"rank 0 gave it up: {(draft.path / ABANDONED).read_text()}")
    if there:
        return None
    later = newest(draft.root)
    if later is not None and later.step > draft.step:
        return _record(later.path)  # ours was committed, and has been superseded since
    raise HeadwayError(
        f"step {draft.step} is not committed: its draft {draft.path} is gone. Save again; look at who removed it."
    )


def give_up(draft: Draft, why: str) -> None:
    """Tell the other ranks' agents that a save will never be committed."""
    # No room even for that, or no folder: they find out by waiting. Who looks finds the whole reason or no file.
    with suppress(OSError, InputError), whole_file(draft.path / ABANDONED) as written:
        written.write_text(why)


def mark_gone(hello: Hello, draft: Draft) -> None:
    """Tell rank 0's agent that this rank will never finish its part of a draft."""
    with suppress(OSError):
        (draft.path / GONE.format(hello.rank)).touch()


def mark_orphans(hello: Hello) -> None:
    """Mark every draft of this attempt that this rank has no part in: its trainer is dead and will send none."""
    for path in Path(hello.root).glob(f".step-*.{hello.attempt}*.draft"):
        if not (path / rank_folder(hello.rank) / MANIFEST).exists():
            with suppress(OSError):
                (path / GONE.format(hello.rank)).touch()


def marked_gone(path: Path, ranks: set[int]) -> set[int]:
    """Return which of the `ranks` will never finish their part of the draft at `path`."""
    return {rank for rank in ranks if (path / GONE.format(rank)).exists()}


def prune(hello: Hello, step: int) -> None:
    """Remove the checkpoints of ours that need not be kept now that `step` is committed, and what lies after none."""
    keep = Keep(hello.keep_last, hello.keep_every)
    known = {entry.step: entry for entry in committed(hello.root) if entry.ours and entry.step <= step}
    for surplus in sorted(keep.surplus(known)):
        remove(known[surplus])


def is_awaited(draft: Draft) -> bool:
    """Say whether agents of other ranks have parts in a draft, and so wait to hear what becomes of it."""
    return len(list(draft.path.glob(f"rank-*/{MANIFEST}"))) > 1


def sweep(failed: set[Draft]) -> None:
    """Remove drafts that were given up."""
    for draft in failed:
        abandon(draft)
    failed.clear()


def recover(hello: Hello) -> list[Path]:
    """Remove what dead attempts left; return what was removed."""
    return recover_drafts(hello.root)


def encode(path: Path, rank: int, pace: RateLimiter) -> int:
    """Write this rank's parity of a committed checkpoint; return how many bytes. Idempotent."""
    facts = encode_rank(path, rank, pace=pace)
    return 0 if facts is None else facts.m * facts.segment_bytes


def _record(path: Path) -> CommitRecord | None:
    """Return the commit record of a checkpoint's folder; None where there is none, or a broken one."""
    try:
        return read_record(path / COMMIT, CommitRecord)
    except (FileNotFoundError, NotADirectoryError, DamageError, FormatError):
        return None


def _may_replace(hello: Hello, draft: Draft) -> bool:
    """Whether the checkpoint of the same step, if there is one, may give way."""
    if not CommittedCheckpoint(draft.step, draft.target).ours:
        return False  # none, or somebody else's
    record = _record(draft.target)
    if record is None:
        return True  # broken: what it says of itself cannot be read
    return is_superseded(hello, record)


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
