"""Two writers of one step in a bucket, each of which may be killed between any two requests or inside an upload.

Used by tests/test_objects.py and benchmarks/commit_race.py. Writers are processes that have not been forked from one
that used the client. A point to die at is data: the number of the request (or uploaded part) before which the process
kills itself.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.storage.checks.verification import verify_store
from headway.storage.commit import StepTakenError
from headway.storage.digests import crc32, digest_of
from headway.storage.draft import ObjectDraft, finish_rank
from headway.storage.manifest import METADATA, Piece, RankManifest, entry_of, image_name
from headway.storage.object_commit import commit, committed
from headway.storage.stores import PART_BYTES, ObjectStore, open_store

if TYPE_CHECKING:
    from typing_extensions import Buffer

STEP, RANKS = 7, 2
ELEMENTS = PART_BYTES // 8 * 3 // 2
"""Of each rank's part, float32: its image is one part of an upload, with no zip around it."""

POINTS = 14
"""Requests and parts of a writer that gets through; see `Mortal`."""


class Mortal(ObjectStore):
    """A store whose user dies before a given one of its writes, or before a part of one."""

    def __init__(self, url: str, *, dies_before: int, count: list[int] | None = None) -> None:
        super().__init__(url)
        self._dies_before, self.count = dies_before, count if count is not None else [0]
        """Writes and parts so far, in a list that stores under this one share."""

    def under(self, prefix: str) -> Mortal:
        return Mortal(f"{self.place}/{prefix}", dies_before=self._dies_before, count=self.count)

    def put(self, name: str, parts: Iterable[Buffer]) -> None:
        super().put(name, self._watched(parts))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        self._maybe_die()
        return super().put_if_absent(name, data)

    def _watched(self, parts: Iterable[Buffer]) -> Iterator[Buffer]:
        for part in parts:
            self._maybe_die()
            yield part

    def _maybe_die(self) -> None:
        if self.count[0] == self._dies_before:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count[0] += 1


def image_of(attempt: str, rank: int) -> bytes:
    """Return a rank's image: no two attempts write the same byte."""
    return bytes([ord(attempt[0]) ^ rank]) * (4 * ELEMENTS)


def write(root: str, environment: Mapping[str, str], attempt: str, dies_before: int, answers: Any) -> None:
    """Write all ranks' parts of the step, then commit; tell what came of it."""
    os.environ.update(environment)
    store, draft = Mortal(root, dies_before=dies_before), ObjectDraft(root, STEP, attempt)
    for rank in range(RANKS):
        image, name = image_of(attempt, rank), image_name(rank)
        store.put(f"{draft.prefix}/{name}", [image[:PART_BYTES], image[PART_BYTES:]])
        digested = digest_of(image)
        pieces = (
            Piece(
                "w", "float32", (RANKS * ELEMENTS,), (rank * ELEMENTS,), (ELEMENTS,), name, 0, len(image), 0,
                len(image), crc32(image),
            ),
        )  # fmt: skip
        manifest = RankManifest(STEP, attempt, rank, RANKS, entry_of(name, digested, rank=rank, kind="image"), pieces)
        finish_rank(draft, manifest, digested, store)
    try:
        commit(store, draft, world_size=RANKS)
        answers.put((attempt, "committed", store.count[0]))
    except StepTakenError:
        answers.put((attempt, "taken", store.count[0]))


def write_stock(root: str, environment: Mapping[str, str], attempt: str, dies_before: int, answers: Any) -> None:
    """Write as torch.distributed.checkpoint does over fsspec: shards under the final names, `.metadata` last."""
    os.environ.update(environment)
    store = Mortal(root, dies_before=dies_before)
    for rank in range(RANKS):
        image = image_of(attempt, rank)
        store.put(f"step-{STEP}/__{rank}_0.distcp", [image[:PART_BYTES], image[PART_BYTES:]])
    store.put(f"step-{STEP}/{METADATA}", [attempt.encode()])
    answers.put((attempt, "committed", store.count[0]))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one race came to."""

    dies_before: tuple[int, int]
    """Where each writer dies; a large number: nowhere."""

    told: tuple[tuple[str, str], ...]
    """(attempt, what it said) of the writers that got through."""

    seen: tuple[frozenset[str], ...]
    """What was listed at each look while they wrote: attempts."""

    listed: tuple[str, ...]
    """What is listed in the end."""

    whole: bool
    """Whether all that was listed at any time is, bit for bit, what its attempt wrote."""

    @property
    def is_right(self) -> bool:
        """Whether exactly one commit is visible, once a writer said so; nothing partial and no change of mind."""
        winners = [attempt for attempt, said in self.told if said == "committed"]
        stays = all(before <= after for before, after in itertools.pairwise(self.seen))
        agrees = len(winners) <= 1 and (not winners or self.listed == tuple(winners))
        due = bool(self.told)  # who got through has committed, or was told that another one has
        return self.whole and stays and agrees and len(self.listed) <= 1 and (len(self.listed) == 1 or not due)


def race(root: str, environment: Mapping[str, str], dies_before: tuple[int, int], *, start: str = "spawn") -> Outcome:
    """Let attempts "a" and "b" write the same step, look on, and judge what is visible.

    `start` is how processes begin: one fork server serves a whole process, and in tests it is the pool's.
    """
    context = multiprocessing.get_context(start)
    answers = context.Queue()
    writers = [
        context.Process(target=write, args=(root, environment, attempt, point, answers))
        for attempt, point in zip("ab", dies_before, strict=True)
    ]
    for writer in writers:
        writer.start()
    store, seen = open_store(root), []
    while any(writer.is_alive() for writer in writers):
        seen.append(frozenset(one.record.attempt for one in committed(store)))
    for writer in writers:
        writer.join()
    told = tuple(answers.get(timeout=20)[:2] for writer in writers if writer.exitcode == 0)
    last = committed(store)
    seen.append(frozenset(one.record.attempt for one in last))
    whole = all(is_whole(store, attempt) for attempt in frozenset().union(*seen))
    return Outcome(dies_before, told, tuple(seen), tuple(one.record.attempt for one in last), whole)


def is_whole(store: ObjectStore, attempt: str) -> bool:
    """Say whether a checkpoint verifies and holds what its attempt wrote."""
    inner = store.under(ObjectDraft(store.place, STEP, attempt).prefix)
    same = all(bytes(inner.read(image_name(rank))) == image_of(attempt, rank) for rank in range(RANKS))
    return same and verify_store(inner).status == "good"


def race_stock(
    root: str, environment: Mapping[str, str], dies_before: tuple[int, int], *, start: str = "spawn"
) -> bool:
    """Let two stock writers race; say whether what is visible (`.metadata` is there) is one writer's, whole."""
    context = multiprocessing.get_context(start)
    answers = context.Queue()
    writers = [
        context.Process(target=write_stock, args=(root, environment, attempt, point, answers))
        for attempt, point in zip("ab", dies_before, strict=True)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    store = open_store(root)
    try:
        attempt = bytes(store.read(f"step-{STEP}/{METADATA}")).decode()
    except FileNotFoundError:
        return True
    shards = [bytes(store.read(f"step-{STEP}/__{rank}_0.distcp")) for rank in range(RANKS)]
    return shards == [image_of(attempt, rank) for rank in range(RANKS)]


def points(rng: random.Random) -> tuple[int, int]:
    """Return where two writers die: one of them three times in four, the other one in four, anywhere."""
    first = rng.randrange(POINTS) if rng.random() < 0.75 else 1 << 30
    second = rng.randrange(POINTS) if rng.random() < 0.25 else 1 << 30
    return (first, second) if rng.random() < 0.5 else (second, first)
