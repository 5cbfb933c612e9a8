"""One save into a bucket, as an agent sees it: what `saving` does in a folder, with the same names.

A rank's image goes up in parts under the attempt's prefix, then its digests,
then its manifest; rank 0's agent puts the commit record. Agents of other
ranks are met in the bucket only, so they look less often than in a folder.

>>> import tempfile
>>> from headway.checkpoint.agent.messages import Slot
>>> hello = Hello(root=f"file://{tempfile.mkdtemp()}", attempt="a", rank=0, world_size=1)
>>> save = Persist(step=7, attempt="a", number=0, num_bytes=4, begun_ns=0)
>>> draft, phases = persist_rank(hello, Layout(()), save, bytearray(b"data"), RateLimiter())
>>> record = commit_if_ready(hello, draft)
>>> record.step, [entry.name for entry in record.files][0], seen(hello, draft) == record
(7, 'rank-0/digests.bin', True)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from headway.checkpoint.agent.messages import Hello, Layout, Persist, Phase
from headway.checkpoint.agent.saving import ABANDONED, GONE, is_superseded, lost_part, manifest_of, payloads, persist
from headway.checkpoint.keep import Keep
from headway.core.errors import DamageError, FormatError, HeadwayError, InputError
from headway.core.wire.pace import RateLimiter
from headway.storage import object_commit
from headway.storage.object_commit import (
    ObjectDraft,
    abandon,
    committed,
    finish_rank,
    ranks_done,
    record_at,
    remove,
)
from headway.storage.stored.manifest import MANIFEST, CommitRecord, image_name, rank_folder
from headway.storage.stored.stores import PART_BYTES, ObjectStore, open_store

if TYPE_CHECKING:
    from typing_extensions import Buffer

LOG = logging.getLogger(__name__)
LOG.addHandler(logging.NullHandler())

POLL_S = (0.2, 2.0)
"""How often the bucket is looked at while other ranks write, at first and later: every look is a request."""


@cache
def _store(root: str) -> ObjectStore:
    """Return the store of a root, one per process: it keeps its connections."""
    return open_store(root)


class _Nowhere:
    """Takes an image that is only to be checksummed."""

    def write(self, data: memoryview, /) -> int:
        """Take bytes."""
        return len(data)


def draft_of(hello: Hello, save: Persist) -> ObjectDraft:
    """Return the draft of a save."""
    return ObjectDraft(hello.root, save.step, save.attempt)


def persist_rank(
    hello: Hello, layout: Layout, save: Persist, memory: Buffer, pace: RateLimiter
) -> tuple[ObjectDraft, tuple[Phase, ...]]:
    """Put the rank's image, digests and manifest under the draft's prefix; see `saving.persist_rank`."""
    draft, store = draft_of(hello, save), _store(hello.root)
    if seen(hello, draft) is not None or hello.rank in ranks_done(store, draft, hello.world_size):
        return draft, ()
    begun_ns = time.perf_counter_ns()
    written = None
    if save.num_bytes:
        image = memoryview(memory)[: save.num_bytes]
        written = persist(image, payloads(layout.slots), _Nowhere(), RateLimiter())
        store.put(f"{draft.prefix}/{image_name(hello.rank)}", _paced(image, pace))
    digested = None if written is None else written.digested
    finish_rank(store, draft, manifest_of(hello, layout, save, memory, written), digested)
    return draft, (Phase("checkpoint.persist", begun_ns, time.perf_counter_ns(), save.num_bytes),)


def _paced(image: memoryview, pace: RateLimiter) -> Iterator[memoryview]:
    """Yield an image part by part, no faster than the pace."""
    for start in range(0, len(image), PART_BYTES):
        part = image[start : start + PART_BYTES]
        yield part
        pace.wait(len(part))


def commit_if_ready(hello: Hello, draft: ObjectDraft) -> CommitRecord | None:
    """Commit when all ranks are done; see `saving.commit_if_ready`."""
    record = seen(hello, draft)
    if record is not None:
        return record
    store = _store(hello.root)
    missing = set(range(hello.world_size)) - ranks_done(store, draft, hello.world_size)
    names = store.list(draft.prefix) if missing else {}
    lost = {rank for rank in missing if f"{draft.prefix}/{GONE.format(rank)}" in names}
    if lost:
        raise lost_part(draft.step, lost)
    if missing:
        return None
    standing = record_at(store, draft.step)
    may = standing is not None and is_superseded(hello, standing)
    return object_commit.commit(
        store, draft, world_size=hello.world_size, redundancy=hello.redundancy, replaces=standing if may else None
    )


def seen(hello: Hello, draft: ObjectDraft) -> CommitRecord | None:
    """Return the record of a draft that has been committed, else None."""
    with suppress(DamageError, FormatError):
        record = record_at(_store(hello.root), draft.step)
        return record if record is not None and record.attempt == draft.attempt else None
    return None


def outcome(hello: Hello, draft: ObjectDraft) -> CommitRecord | None:
    """Return the record once rank 0's agent has committed, else None; raises `HeadwayError` if it gave up."""
    store = _store(hello.root)
    names = store.list(draft.prefix)
    record = seen(hello, draft)
    if record is not None:
        return record
    if f"{draft.prefix}/{ABANDONED}" in names:
        raise HeadwayError(f"rank 0 gave it up: {bytes(store.read(f'{draft.prefix}/{ABANDONED}')).decode()}")
    if names:
        return None
    later = max(committed(store), default=None, key=lambda one: one.step)
    if later is not None and later.step > draft.step:
        return later.record  # ours was committed, and has been superseded since
    raise HeadwayError(f"step {draft.step} is not committed: {draft.path} is gone. Save again; look at who removed it.")


def give_up(draft: ObjectDraft, why: str) -> None:
    """Tell the other ranks' agents that a save will never be committed."""
    with suppress(HeadwayError, FileNotFoundError):  # no access even for that: they find out by waiting
        _store(draft.root).put(f"{draft.prefix}/{ABANDONED}", [why.encode()])


def mark_gone(hello: Hello, draft: ObjectDraft) -> None:
    """Tell rank 0's agent that this rank will never finish its part of a draft."""
    with suppress(HeadwayError, FileNotFoundError):
        _store(hello.root).put(f"{draft.prefix}/{GONE.format(hello.rank)}", [b""])


def mark_orphans(hello: Hello) -> None:
    """Mark every draft of this attempt that this rank has no part in: its trainer is dead and will send none."""
    with suppress(HeadwayError):
        store = _store(hello.root)
        for folder in store.folders():
            step, _, attempt = folder.partition(".")
            if attempt.startswith(hello.attempt):
                draft = ObjectDraft(hello.root, int(step.removeprefix("step-")), attempt)
                if seen(hello, draft) is None:
                    part = f"{folder}/{rank_folder(hello.rank)}/{MANIFEST}"
                    if part not in store.list(folder):
                        mark_gone(hello, draft)


def prune(hello: Hello, step: int) -> None:
    """Remove the checkpoints that need not be kept now that `step` is committed."""
    store = _store(hello.root)
    known = {one.step: one for one in committed(store) if one.step <= step}
    for surplus in sorted(Keep(hello.keep_last, hello.keep_every).surplus(known)):
        remove(store, known[surplus])


def is_awaited(draft: ObjectDraft) -> bool:
    """Say whether agents of other ranks have parts in a draft, and so wait to hear what becomes of it."""
    with suppress(HeadwayError):
        return sum(name.endswith(f"/{MANIFEST}") for name in _store(draft.root).list(f"{draft.prefix}/")) > 1
    return False


def sweep(failed: set[ObjectDraft]) -> None:
    """Remove drafts that were given up."""
    for draft in failed:
        with suppress(HeadwayError):  # it is garbage then, which `recover` finds later
            abandon(_store(draft.root), draft)
    failed.clear()


def recover(hello: Hello) -> Iterable[str]:
    """Remove what dead attempts left; return what was removed."""
    return object_commit.recover(_store(hello.root))


def encode(place: str, rank: int, pace: RateLimiter) -> int:
    """Raise `InputError`: parity lies in folders, and a bucket keeps copies of its own."""
    raise InputError(f"{place} has no parity: redundancy is for folders. Save with redundancy='none'.")
