"""Checkpoints in a bucket: written under the attempt's own prefix, made visible by one put of the commit record.

    root/step-<n>.<attempt>/...             the same names as in a folder: rank-<r>/..., .metadata, commit.json
    root/step-<n>/commit.json               the commit: put if absent, last; it names the attempt

A bucket has no rename, so nothing moves: of two writers of a step one gets
its record in, and readers go by records only. Whatever an attempt leaves
without a record is garbage, and removed once nobody has added to it for long.

`checkpoints`, `discard` and `recover_root` do for a folder or a bucket what
`commit` does for the one and this module for the other.

>>> import tempfile
>>> from headway.storage.draft import finish_rank
>>> store = ObjectStore(f"file://{tempfile.mkdtemp()}")
>>> draft = ObjectDraft(store.place, 7, "a")
>>> finish_rank(draft, RankManifest(7, "a", 0, 1, None), None)
>>> committed(store)
[]
>>> commit(store, draft, world_size=1).attempt, [one.step for one in committed(store)]
('a', [7])
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.core.errors import DamageError, FormatError, HeadwayError
from headway.storage import commit as folders
from headway.storage.commit import STEP, CommittedCheckpoint, StepTakenError, seal
from headway.storage.draft import FOREIGN_AGE_S, ObjectDraft
from headway.storage.manifest import (
    COMMIT,
    MANIFEST,
    CommitRecord,
    RankManifest,
    decode,
    encode,
    rank_folder,
)
from headway.storage.stores import ObjectStore, Store, open_store, url_of


@dataclass(frozen=True, slots=True, order=True)
class CommittedObject:
    """A checkpoint in a bucket that can be restored from."""

    step: int
    """Its step."""

    path: str
    """URL where its files lie."""

    record: CommitRecord
    """Its commit record."""

    @property
    def ours(self) -> bool:
        """Whether it was committed here: always."""
        return True

    @property
    def store(self) -> ObjectStore:
        """The store that is rooted at it."""
        return open_store(self.path)


def record_at(store: Store, step: int) -> CommitRecord | None:
    """Return the commit record of a step; None where it is not committed. Raises `DamageError` for a broken one."""
    name = f"step-{step}/{COMMIT}"
    try:
        return decode(bytes(store.read(name)), CommitRecord, f"{store.place}/{name}")
    except FileNotFoundError:
        return None


def commit(
    store: ObjectStore,
    draft: ObjectDraft,
    *,
    world_size: int,
    redundancy: str = "none",
    replaces: CommitRecord | None = None,
) -> CommitRecord:
    """Check that the whole is whole, and make it the checkpoint of its step by one put.

    All ranks are done (`ranks_done`). Asked again for what this attempt has committed it returns that record. With
    `replaces` the step's record may be that one, of an attempt that was given up: it changes places with ours in one
    act, and what it named is removed.

    Raises
    ------
    StepTakenError
        Another writer has committed the step.
    HeadwayError
        A rank is not done.
    InputError, DamageError
        As `headway.storage.commit.commit`.
    """
    standing = record_at(store, draft.step)
    if standing is not None and standing.attempt == draft.attempt:
        return standing
    if standing is not None and standing != replaces:
        raise StepTakenError(_taken(draft, standing))
    inner = store.under(draft.prefix)
    manifests = _manifests(inner, draft, world_size)
    record = seal(inner, manifests, draft, world_size=world_size, redundancy=redundancy)
    data = encode(record)
    name = f"step-{draft.step}/{COMMIT}"
    if standing is None:
        won = store.put_if_absent(name, data)
    else:
        tag = store.tag(name)
        won = record_at(store, draft.step) == standing and store.put_if_same(name, data, tag)
    if not won:
        raise StepTakenError(_taken(draft, record_at(store, draft.step)))
    if standing is not None:
        store.remove(f"step-{draft.step}.{standing.attempt}")
    return record


def _manifests(inner: ObjectStore, draft: ObjectDraft, world_size: int) -> list[RankManifest]:
    """Return the manifests of all ranks."""
    found = []
    for rank in range(world_size):
        name = f"{rank_folder(rank)}/{MANIFEST}"
        try:
            found.append(decode(bytes(inner.read(name)), RankManifest, f"{inner.place}/{name}"))
        except FileNotFoundError:
            raise HeadwayError(
                f"step {draft.step} is not committed: rank {rank} has not finished. Wait for it, or save again."
            ) from None
    return found


def _taken(draft: ObjectDraft, standing: CommitRecord | None) -> str:
    who = f" by attempt {standing.attempt}" if standing is not None else ""
    return (
        f"step {draft.step} of {draft.root} is committed already{who}; a checkpoint is never written over. "
        "Remove it first, or save another step."
    )


def committed(store: ObjectStore) -> list[CommittedObject]:
    """Return the checkpoints below a root, oldest step first: those, and only those, that have a commit record.

    A record that is broken is passed over: `headway ckpt verify` names it. A bucket that does not exist is an
    `InputError`.
    """
    found = []
    for folder in store.folders():
        match = STEP.fullmatch(folder)
        try:
            record = record_at(store, int(match[1])) if match else None
        except (DamageError, FormatError):
            continue
        if record is not None:
            found.append(CommittedObject(record.step, f"{store.place}/step-{record.step}.{record.attempt}", record))
    return sorted(found, key=lambda one: one.step)


def checkpoint_at(url: str) -> ObjectStore:
    """Return the store of the checkpoint that a URL means: `.../step-<n>`, an attempt's prefix, or the newest below.

    Where there is none, and for a checkpoint of another kind, it is the URL itself.
    """
    parent, _, name = url.rpartition("/")
    match = STEP.fullmatch(name)
    record = record_at(open_store(parent), int(match[1])) if match else None
    if record is not None:
        return open_store(f"{parent}/step-{record.step}.{record.attempt}")
    store = open_store(url)
    below = committed(store)
    return below[-1].store if below else store


def remove(store: ObjectStore, checkpoint: CommittedObject) -> None:
    """Remove a checkpoint: its record first, so that nobody sees half of it."""
    store.remove(f"step-{checkpoint.step}/{COMMIT}")
    store.remove(f"step-{checkpoint.step}.{checkpoint.record.attempt}")


def recover(store: ObjectStore, *, older_s: float = FOREIGN_AGE_S) -> list[str]:
    """Remove what attempts left that have no record and to which nothing was added for `older_s` seconds.

    Nobody can see from here whether a writer lives; one that does adds something, or has long given up waiting.
    Returns the prefixes.
    """
    named = {f"step-{one.step}.{one.record.attempt}" for one in committed(store)}
    removed = []
    for folder in store.folders():
        step, dot, _ = folder.partition(".")
        if not dot or folder in named or not STEP.fullmatch(step):
            continue
        changed = store.changed_unix_s(folder)
        if changed is not None and time.time() - changed > older_s:
            record = record_at(store, int(step.removeprefix("step-")))
            if record is None or f"{step}.{record.attempt}" != folder:  # it may have been committed meanwhile
                store.remove(folder)
                removed.append(folder)
    return removed


def checkpoints(root: str | Path) -> Sequence[CommittedCheckpoint | CommittedObject]:
    """Return the checkpoints in a folder or below a URL, oldest step first."""
    url = url_of(root)
    return folders.committed(root) if url is None else committed(open_store(url))


def discard(checkpoint: CommittedCheckpoint | CommittedObject) -> None:
    """Remove a checkpoint, wherever it is."""
    if isinstance(checkpoint, CommittedCheckpoint):
        folders.remove(checkpoint)
    else:
        remove(open_store(checkpoint.path.rpartition("/")[0]), checkpoint)


def recover_root(root: str | Path) -> Sequence[Path | str]:
    """Remove what dead writers left in a folder or below a URL; return what was removed."""
    url = url_of(root)
    return folders.recover(root) if url is None else recover(open_store(url))
