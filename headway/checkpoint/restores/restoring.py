"""Which checkpoint a job goes on from: the newest that is whole on all ranks, from memory where an agent still has it.

Rank 0 names the steps that there are, newest first. Each rank tries; where one
finds damage all go to the next older step together, and where one refuses
what is stored, all raise; no rank writes into its tensors before all have
found that everything fits. What the agents of an
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import torch.distributed as dist

from headway.checkpoint.agent.link import ask, finish
from headway.checkpoint.layout.fetch import LocalFiles, Room, too_short
from headway.checkpoint.layout.stored import BucketFiles, StoredCheckpoint, open_stored
from headway.checkpoint.restores.exchange import Agreement, says_damage
from headway.checkpoint.restores.restore import MIXED, Restore, RestoreReport, Verify, mixing
from headway.checkpoint.restores.restore_targets import unpack
from headway.core.errors import DamageError, HeadwayError, InputError
from headway.runtime.in_rank.state_account import RESTORE_UP_TO
from headway.storage.manifest import COMMIT, CommitRecord, decode
from headway.storage.object_commit import checkpoints, record_at
from headway.storage.stores import open_store, url_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

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
        self.held = dict(held)
        """Those that memory has; a reader that finds one to be other than it was saved takes it out."""
        self.num_missed = 0
        """Reads of images that memory did not have."""

    @property
    def is_from_memory(self) -> bool:
        """Whether all elements came from memory."""
        return bool(self.held) and not self.num_missed

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Buffer:
        """Return bytes of a file."""
        held = self.held.get(name)
        return self.files.read(name, start, stop) if held is None else memoryview(held).cast("B")[start:stop]

    def span(self, name: str, start: int, stop: int, room: Room) -> memoryview:
        """Return bytes of a file: a view of the held image, or as the folder has them."""
        held = self.held.get(name)
        if held is None:
            self.num_missed += 1
            return self.files.span(name, start, stop, room)
        found = memoryview(held).cast("B")[start:stop]
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

    def begin(stored: StoredCheckpoint) -> Restore:
        return Restore(stored, verify, strict=strict, group=group)

    had_died = is_successor and finish(root, agreement.rank)
    steps, skipped, is_mixed = _agreed_steps(root, step, agreement), list[str](), False
    for number in steps:
        with mixing() if is_mixed else nullcontext():
            report, told, error = _restored(root, number, objects, optional, agreement, begin)
            if report is not None:
                return replace(report, skipped=tuple(skipped)), had_died
            if step != "latest" or PASSED_OVER not in told:
                raise error or HeadwayError(
                    f"step {number} was not restored: {told.rstrip('.')}. See that rank's error."
                )
        is_mixed = is_mixed or MIXED in told
        skipped.append(f"step {number}: {told.replace(PASSED_OVER, '').removesuffix(MIXED).rstrip()}")
        LOG.warning("step %d is passed over: %s", number, told)
    if skipped:
        raise DamageError(
            f"none of the {len(skipped)} checkpoints under {root} is whole; the newest: {skipped[0].rstrip('.')}. "
            f"Run: headway ckpt repair{f'. {MIXED}' if is_mixed else ''}"
        )
    return RestoreReport(None, root, "local", 0, 0, 0.0), had_died


def _restored(
    root: str,
    step: int,
    objects: Mapping[str, Any],
    optional: Mapping[str, Any],
    agreement: Agreement,
    begin: Callable[[StoredCheckpoint], Restore],
) -> tuple[RestoreReport | None, str, Exception | None]:
    """Restore all ranks from one checkpoint, or none: the report, or the failure of some rank and that of this one.

    No rank fills its tensors before all have been asked.
    """
    with ExitStack() as opened:

        def ask() -> tuple[Restore, HeldFiles]:
            below = _files(root, step)
            files = HeldFiles(below, _held(root, step, below))
            stored = opened.enter_context(closing(open_stored(files, unpack=unpack)))
            there = {fqn.partition(".")[0] for fqn in (*stored.objects, *stored.tensors)}
            restore = begin(stored)
            restore.ask({**objects, **{name: thing for name, thing in optional.items() if name in there}})
            return restore, files

        asked, told, error = _tried("asked", agreement, ask)
        if asked is None:
            return None, told, error
        restore, files = asked
        if told:
            try:
                restore.undo()
            except InputError as refusal:
                return None, f"{told} {MIXED}", refusal
            return None, told, None
        report, told, error = _tried("restored", agreement, restore.fill)
        if report is not None and files.is_from_memory and report.source != "parity":
            report = replace(report, source="memory")
        return None if told else report, told, error


def _tried(subject: str, agreement: Agreement, act: Callable[[], T]) -> tuple[T | None, str, Exception | None]:
    """Do something on all ranks: what it returned, the failure of some rank ("": none failed), this one's error."""
    result, error = None, None
    try:
        result = act()
    except Exception as found:  # whatever it is, the other ranks wait for our word
        error = found
    return result, agreement.failure(subject, None if error is None else _word(error)) or "", error


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
            known = [one.step for one in checkpoints(root)]
            most = os.environ.get(RESTORE_UP_TO) if step == "latest" else None
            known = known if most is None else [one for one in known if one <= int(most)]
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


def _files(root: str, step: int) -> LocalFiles | BucketFiles:
    """Return the files of a step, which in a bucket lie where its commit record says."""
    url = url_of(root)
    if url is None:
        return LocalFiles(Path(root) / f"step-{step}")
    store = open_store(url)
    record = record_at(store, step)
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
    text = " ".join([str(error), *getattr(error, "__notes__", ())])
    return f"{PASSED_OVER if says_damage(error) else ''}{type(error).__name__}: {text}"
