"""A save in progress: a folder or a prefix of a bucket that nobody lists, into which every rank's agent writes.

    root/.step-<n>.<attempt>.draft/
        .owner-<r>.json       who writes for rank r: host, process; gone with the commit
        rank-<r>/__<r>_0.distcp, digests.bin, manifest.json      in this order; the manifest says "done"

Every file goes in through `durable.durable_file`: whole, fsynced, renamed,
its folder fsynced. Each rank calls `open_draft`, writes its image into
`draft.rank_path(rank)`, then `finish_rank`. Rank 0's agent calls
`commit.commit`. Nothing here talks to another rank but through the folder.
In a bucket (`ObjectDraft`) the same names lie under `step-<n>.<attempt>/`.

>>> import tempfile
>>> draft = open_draft(tempfile.mkdtemp(), 40, "a1", rank=0)
>>> draft.path.name, draft.target.name, draft.rank_path(0).name
('.step-40.a1.draft', 'step-40', 'rank-0')
"""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headway.core.errors import DamageError, HeadwayError, InputError
from headway.core.files.private import check_inside, remove_tree
from headway.core.files.safe_files import read_json
from headway.core.machine.host import host_id, process_stat
from headway.storage.digests import Digested, pack_digests
from headway.storage.manifest import DIGESTS_FILE, MANIFEST, TWIN, RankManifest, encode, rank_folder, read_record
from headway.storage.stores import LocalStore, Store, make_folder, open_store, present, sync_folder, write_durably

ATTEMPT = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What an attempt may be called: it becomes part of a folder's name."""

LEFTOVER = re.compile(r"\.step-(\d+)\.([A-Za-z0-9_-]+)\.(draft|trash)")
"""Names of drafts, and of checkpoints that are being removed."""

FOREIGN_AGE_S = 3600.0
"""A draft of another host or container, whose processes cannot be seen from here, is dead after this long without a
change; a live one changes, or waits for ranks at most as long as `wait_for_ranks` does."""


class Owner(msgspec.Struct, frozen=True):
    """Who writes a rank's part of a draft."""

    host: str
    """Host and container."""

    pid: int
    """Number of the process there."""

    birth: str | None
    """What tells it from a later process of that number; None where the system does not say."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A save in progress."""

    root: Path
    """Folder of the checkpoints."""

    step: int
    """Step that is saved."""

    attempt: str
    """Who saves it; two attempts at one step never share a draft."""

    name: str = ""
    """What the checkpoint's folder is called, where that is not `step-<n>`."""

    @property
    def prefix(self) -> str:
        """Where it is written, inside the root."""
        return f".step-{self.step}.{self.attempt}.draft"

    @property
    def path(self) -> Path:
        """The folder that is written."""
        return self.root / self.prefix

    @property
    def target(self) -> Path:
        """Where the checkpoint will stand."""
        return self.root / (self.name or f"step-{self.step}")

    def rank_path(self, rank: int) -> Path:
        """Return the folder of one rank."""
        return self.path / rank_folder(rank)


@dataclass(frozen=True, slots=True)
class ObjectDraft:
    """A save in progress in a bucket. What it writes stays where it is; the commit record names it."""

    root: str
    """URL of the run's checkpoints."""

    step: int
    """Step that is saved."""

    attempt: str
    """Who saves it."""

    def __post_init__(self) -> None:
        """Raise `InputError` where the names cannot be part of a key."""
        if not ATTEMPT.fullmatch(self.attempt):
            raise InputError(f"the attempt {self.attempt!r} cannot be part of a key. Use letters, digits, - and _.")
        if self.step < 0:
            raise InputError(f"step is {self.step}; it must be at least 0. Pass the number of steps done.")

    @property
    def prefix(self) -> str:
        """Where it is written, inside the root."""
        return f"step-{self.step}.{self.attempt}"

    @property
    def path(self) -> str:
        """The same as a URL."""
        return f"{self.root}/{self.prefix}"

    @property
    def target(self) -> str:
        """Where the checkpoint will be read: the same."""
        return self.path


AnyDraft = Draft | ObjectDraft


def open_draft(root: str | Path, step: int, attempt: str, *, rank: int, pid: int | None = None) -> Draft:
    """Create (or join) the draft of one step, with this rank's empty folder in it.

    `pid` is the process that writes, this one by default; while it lives the draft is not stale. What a dead writer
    of the same rank and attempt left is removed. Raises `InputError` for an attempt, a step or a link out of `root`.
    """
    if not ATTEMPT.fullmatch(attempt):
        raise InputError(f"the attempt {attempt!r} cannot be part of a folder's name. Use letters, digits, - and _.")
    if step < 0:
        raise InputError(f"step is {step}; it must be at least 0. Pass the number of steps done.")
    draft = Draft(Path(root), step, attempt)
    check_inside(root, draft.rank_path(rank) / MANIFEST)
    make_folder(draft.path)
    owner = Owner(host_id(), pid or os.getpid(), _birth(pid or os.getpid()))
    write_durably(draft.path / f".owner-{rank}.json", [msgspec.json.encode(owner)])
    if draft.rank_path(rank).exists():
        shutil.rmtree(draft.rank_path(rank))
    make_folder(draft.rank_path(rank))
    return draft


def store_of(draft: AnyDraft, store: Store | None = None) -> Store:
    """Return the store of a draft's root, where a folder that somebody has removed is not made again."""
    if isinstance(draft, Draft):
        return LocalStore(draft.root, makes_folders=False)
    return store or open_store(draft.root)


def finish_rank(draft: AnyDraft, manifest: RankManifest, written: Digested | None, store: Store | None = None) -> None:
    """Write the digests of the rank's image (None: it has none), then its manifest: the rank is done.

    The image is in the rank's folder already, in a folder through `durable.durable_file`. `store` is that of the
    draft's root, where one is open.
    """
    if (written is None) != (manifest.image is None):
        raise InputError(f"rank {manifest.rank} has an image or digests, not both. Pass both or neither.")
    store, folder = store_of(draft, store), f"{draft.prefix}/{rank_folder(manifest.rank)}"
    if written is not None:
        store.put(f"{folder}/{DIGESTS_FILE}", [pack_digests(written)])
    for name in (MANIFEST + TWIN, MANIFEST):
        store.put(f"{folder}/{name}", [encode(manifest)])
    if isinstance(draft, Draft):
        sync_folder(draft.path)


def ranks_done(draft: AnyDraft, world_size: int, store: Store | None = None) -> set[int]:
    """Return the ranks whose manifest is there."""
    ranks = {f"{rank_folder(rank)}/{MANIFEST}": rank for rank in range(world_size)}
    return {ranks[name] for name in present(store_of(draft, store), draft.prefix, ranks) or ()}


def wait_for_ranks(draft: Draft, world_size: int, *, deadline_s: float = 600.0) -> list[RankManifest]:
    """Wait until every rank is done, by looking at the folder; return their manifests in rank order.

    Raises `HeadwayError` naming the ranks that are missing once `deadline_s` has passed, `DamageError` when the draft
    has been removed.
    """
    until = time.monotonic() + deadline_s
    while missing := set(range(world_size)) - ranks_done(draft, world_size):
        if not draft.path.exists():
            raise DamageError(f"the draft {draft.path} was removed while ranks wrote it. Save again.")
        if time.monotonic() > until:
            named = ", ".join(map(str, sorted(missing)[:8])) + (", ..." if len(missing) > 8 else "")
            raise HeadwayError(
                f"step {draft.step} is not committed: of {world_size} ranks {len(missing)} ({named}) did not finish "
                f"writing within {deadline_s:g} s. Look at their agents; the checkpoint before it still stands."
            )
        time.sleep(0.01)
    return [read_record(draft.rank_path(rank) / MANIFEST, RankManifest) for rank in range(world_size)]


def abandon(draft: AnyDraft, store: Store | None = None) -> None:
    """Remove a draft that will not be committed."""
    if isinstance(draft, Draft):
        remove_tree(draft.path)
    else:
        store_of(draft, store).remove(draft.prefix)


def _birth(pid: int) -> str | None:
    """Return what tells a process from a later one with its number: boot and clock tick of its start; None: it is gone.

    Not the time of day, which a correction of the clock moves.
    """
    try:
        facts = process_stat(pid)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if facts[0] in "ZX" else f"{boot}/{facts[19]}"


def owners(path: Path) -> list[Owner]:
    """Return who wrote a draft; a note that cannot be read counts as none."""
    found = []
    for note in path.glob(".owner-*.json"):
        try:
            found.append(read_json(note, Owner))
        except (OSError, InputError):
            continue
    return found


def is_stale(path: Path, *, age_s: float = FOREIGN_AGE_S) -> bool:
    """Say whether a draft's writers are all dead: known for this host, by age for others and where none is noted."""
    told = owners(path)
    here = [owner for owner in told if owner.host == host_id() and owner.birth is not None]
    if any(_birth(owner.pid) == owner.birth for owner in here):
        return False
    if told and len(here) == len(told):
        return True
    try:
        newest = max(entry.stat().st_mtime for entry in (path, *path.glob("*"), *path.glob("rank-*/*")))
    except OSError:  # it is being changed, or removed, right now
        return False
    return time.time() - newest > age_s
