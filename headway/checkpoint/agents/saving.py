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
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from headway.checkpoint.agents.messages import Hello, Layout, Persist, Phase, Slot
from headway.checkpoint.agents.persist import Payload, Written, persist
from headway.checkpoint.policies.keep import Keep
from headway.core.errors import DamageError, FormatError, HeadwayError, InputError
from headway.core.files.whole_file import whole_file
from headway.core.wire.pace import RateLimiter
from headway.storage.commits.commit import CommittedCheckpoint, commit, committed, newest, remove
from headway.storage.commits.commit import recover as recover_drafts
from headway.storage.commits.draft import Draft, abandon, finish_rank, open_draft, ranks_done
from headway.storage.redundancy.parity import encode_rank
from headway.storage.stored.digests import crc32
from headway.storage.stored.durable import durable_file
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

if TYPE_CHECKING:
    from typing_extensions import Buffer

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

    Raises `HeadwayError` when a rank will never be done, and as `headway.storage.commits.commit.commit` does.
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
