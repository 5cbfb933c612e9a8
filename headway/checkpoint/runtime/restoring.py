"""Which checkpoint a job goes on from: the newest that is whole on all ranks, from memory where an agent still has it.

Rank 0 names the steps that there are, newest first. Each rank tries; where one
finds damage all go to the next older step together. What the agents of an
attempt that died still hold in memory is read from there, and verified like
any file; the rest comes from the folder.

>>> step_order([10, 30], "latest")
[30, 10]
"""

from __future__ import annotations

import logging
import mmap
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch.distributed as dist

from headway.checkpoint.fetch import LocalFiles, Room, Source, too_short
from headway.checkpoint.link import ask, finish
from headway.checkpoint.remote import BucketFiles
from headway.checkpoint.runtime.agreement import Agreement
from headway.checkpoint.runtime.restore import RestoreReport, Verify, restore_into
from headway.checkpoint.runtime.unpack import unpack
from headway.checkpoint.stored import open_stored
from headway.core.errors import DamageError, FormatError, HeadwayError, InputError
from headway.storage import object_commit
from headway.storage.commit import committed
from headway.storage.manifest import COMMIT, CommitRecord, decode
from headway.storage.objects import open_store, url_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

LOG = logging.getLogger(__name__)
LOG.addHandler(logging.NullHandler())

PASSED_OVER = "damage: "
"""Begins the word of a rank whose checkpoint cannot be used; anything else is an error of the caller's."""


class HeldFiles:
    """Files of a checkpoint, some of which lie in memory as well: path inside the checkpoint -> its bytes."""

    def __init__(self, files: LocalFiles | BucketFiles, held: Mapping[str, Buffer]) -> None:
        self.files, self.store, self.source = files, files.store, files.source
        """Where those lie that memory does not have."""
        self.folder = files.folder if isinstance(files, LocalFiles) else None
        """Their folder, if it is one."""
        self._held = held
        self.num_missed = 0
        """Reads of images that memory did not have."""

    @property
    def is_from_memory(self) -> bool:
        """Whether all elements came from memory."""
        return bool(self._held) and not self.num_missed

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Buffer:
        """Return bytes of a file."""
        if name in self._held:
            return memoryview(self._held[name]).cast("B")[start:stop]
        return self.files.read(name, start, stop)

    def span(self, name: str, start: int, stop: int, room: Room) -> memoryview:
        """Return bytes of a file: a view of the held image, or as the folder has them."""
        if name not in self._held:
            self.num_missed += 1
            return self.files.span(name, start, stop, room)
        found = memoryview(self._held[name]).cast("B")[start:stop]
        if len(found) < stop - start:
            raise too_short(f"{name} in memory", start + len(found), stop)
        return found

    def close(self) -> None:
        """Close what was opened."""
        if isinstance(self.files, LocalFiles):
            self.files.close()


def restore(
    root: str,
    objects: Mapping[str, Any],
    optional: Mapping[str, Any],
    step: int | Literal["latest"],
    agreement: Agreement,
    *,
    strict: bool = True,
    verify: Verify = "read",
    group: dist.ProcessGroup | None = None,
    is_successor: bool = True,
) -> tuple[RestoreReport, bool]:
    """Restore all ranks from one checkpoint; return the report, and whether an attempt before this one had died.

    `optional` objects are restored where the checkpoint has them. With `is_successor` the agents of an earlier
    attempt on this host finish what they have first. Without any checkpoint the report's step is None.
    """
    had_died = is_successor and finish(root, agreement.rank)
    steps, skipped = _agreed_steps(root, step, agreement), list[str]()
    for number in steps:
        report, error = None, None
        try:
            below = _files(root, number)
            files = HeldFiles(below, _held(root, number, below))
            report = _restore_one(files, objects, optional, strict=strict, verify=verify, group=group)
        except Exception as found:  # whatever it is, the other ranks wait for our word
            error = found
        told = agreement.failure("restored", None if error is None else _word(error))
        if told is None:
            assert report is not None
            return replace(report, skipped=tuple(skipped)), had_died
        if step != "latest" or PASSED_OVER not in told:
            raise error or HeadwayError(f"step {number} was not restored: {told}. See that rank's error.")
        skipped.append(f"step {number}: {told.replace(PASSED_OVER, '')}")
        LOG.warning("step %d is passed over: %s", number, told)
    if skipped:
        raise DamageError(
            f"none of the {len(skipped)} checkpoints under {root} is whole; the newest: {skipped[0].rstrip('.')}. "
            "Run: headway ckpt repair"
        )
    return RestoreReport(None, root, "local", 0, 0, 0.0), had_died


def step_order(known: Sequence[int], step: int | Literal["latest"]) -> list[int]:
    """Return the steps to try, in order. Raises `InputError` when the one that was asked for is not there."""
    steps = sorted(known, reverse=True)
    if step == "latest":
        return steps
    if step not in steps:
        there = ", ".join(map(str, steps[:8])) or "none"
        raise InputError(f"there is no checkpoint of step {step!r}; there are: {there}. Name one of them, or 'latest'.")
    return [step]


def _agreed_steps(root: str, step: int | Literal["latest"], agreement: Agreement) -> list[int]:
    """Return the steps to try, as rank 0 sees them; what is wrong with them, it tells all."""

    def say() -> str:
        try:
            url = url_of(root)
            known = [one.step for one in (committed(root) if url is None else object_commit.committed(open_store(url)))]
            _warn_of_newer(known, step)
            return msgspec.json.encode(step_order(known, step)).decode()
        except InputError as error:
            return str(error)

    word = agreement.word("steps", say)
    try:
        return msgspec.json.decode(word, type=list[int])
    except msgspec.DecodeError:
        raise InputError(word) from None


def _warn_of_newer(known: Sequence[int], step: int | Literal["latest"]) -> None:
    """Warn who goes back to an older step while newer ones stand: after a crash "latest" would take those again."""
    newer = [] if step == "latest" else [one for one in sorted(known) if one > step]
    if newer:
        warnings.warn(
            f"step {step} is restored, but step {newer[-1]} is newer and still there: a restart at 'latest' takes it. "
            f"To stay with step {step}, remove: {', '.join(f'step-{one}' for one in newer[:8])}", stacklevel=2,
        )  # fmt: skip


def _restore_one(
    files: HeldFiles,
    objects: Mapping[str, Any],
    optional: Mapping[str, Any],
    *,
    strict: bool,
    verify: Verify,
    group: dist.ProcessGroup | None,
) -> RestoreReport:
    """Restore from one checkpoint; what memory holds wrongly is read from the folder in a second try."""
    stored = open_stored(files, unpack=unpack)
    try:
        there = {fqn.partition(".")[0] for fqn in (*stored.objects, *stored.tensors)}
        wanted = {**objects, **{name: thing for name, thing in optional.items() if name in there}}
        report = restore_into(stored, wanted, strict=strict, verify=verify, group=group)
    except DamageError:
        if not files.is_from_memory:
            raise
        return _restore_one(HeldFiles(files.files, {}), objects, optional, strict=strict, verify=verify, group=group)
    finally:
        stored.close()
    source: Source = "memory" if files.is_from_memory and report.source != "parity" else report.source
    return replace(report, source=source)


def _files(root: str, step: int) -> LocalFiles | BucketFiles:
    """Return the files of a step, which in a bucket lie where its commit record says."""
    url = url_of(root)
    if url is None:
        return LocalFiles(Path(root) / f"step-{step}")
    store = open_store(url)
    record = object_commit.record_at(store, step)
    if record is None:
        raise DamageError(f"step {step} of {root} was removed meanwhile. Restore another one.")
    return BucketFiles(store.under(f"step-{step}.{record.attempt}"))


def _held(root: str, step: int, files: LocalFiles | BucketFiles) -> dict[str, Buffer]:
    """Return what agents on this host hold of a step: path inside the checkpoint -> bytes."""
    mapped: dict[str, Buffer] = {}
    try:
        record = decode(bytes(files.read(COMMIT)), CommitRecord, f"{COMMIT} of step {step}")
    except (OSError, HeadwayError):  # not ours, or damaged, which shows when it is restored
        return mapped
    for rank in range(record.world_size):
        answer = ask(root, rank, step)
        if answer is None:
            continue
        held, file = answer
        if held.root == record.root:
            mapped[held.name] = mmap.mmap(file, held.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        os.close(file)
    return mapped  # unmapped when the last view of it is gone


def _word(error: Exception) -> str:
    """Return what other ranks are told of an error."""
    damaged = isinstance(error, (DamageError, FormatError, OSError, EOFError))
    return f"{PASSED_OVER if damaged else ''}{type(error).__name__}: {error}"
