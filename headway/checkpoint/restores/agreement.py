"""What the ranks of a job agree on once or rarely, through the store that they met at: no collective, no barrier.

The attempt, at the first save; the step of the next save, one save ahead; at
a restore, which step and whether all ranks succeeded. A rank reads what rank
0 wrote, most of the time long before. Without a process group there is one
rank, and nothing to agree on.

>>> agreement = Agreement("/ckpts")
>>> agreement.rank, agreement.world_size, agreement.word("restore", lambda: "40")
(0, 1, '40')
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from headway.core.errors import BackgroundError, InputError
from headway.storage.stored.objects import url_of

LONGEST_S = 1800.0
"""How long ranks wait for each other at a restore: reading a large checkpoint may take them unlike times."""

POLL_S = 0.005

KEPT_WORDS = 64
"""Words on a subject that stay in the store. A save needs every rank, so none is that many saves behind."""


class Agreement:
    """The words of one Checkpointer; every rank makes its Checkpointers of one root in the same order."""

    def __init__(self, root: str) -> None:
        """Raise `InputError` where there are other ranks but no process group to meet them through."""
        joined = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.world_size = dist.get_world_size() if joined else 1
        others = os.environ.get("WORLD_SIZE", "1")
        if not joined and others not in ("", "1"):
            raise InputError(
                f"WORLD_SIZE is {others}, but there is no process group: ranks cannot know each other's checkpoints. "
                "Call torch.distributed.init_process_group() before the first save or restore."
            )
        self._store: Any = _get_default_store() if self.world_size > 1 else None
        self._prefix, self._counts = "", dict[str, int]()
        if self._store is not None:
            place = hashlib.blake2b(os.fsencode(url_of(root) or os.path.realpath(root)), digest_size=8).hexdigest()
            number = self._store.add(f"headway/ckpt/{place}/rank-{self.rank}", 1)
            self._prefix = f"headway/ckpt/{place}/{number}"
        self.attempt = self.word("attempt", lambda: uuid.uuid4().hex[:16])
        """Name of this attempt of the job."""

    def word(self, subject: str, say: Callable[[], str]) -> str:
        """Return what rank 0 says on `subject`, the next time it is asked: it calls `say`, the others wait for it."""
        key = self._key(subject)
        if self.rank == 0:
            word = say()
            if self._store is not None:
                self._store.set(key, word)
                if self._counts[subject] > KEPT_WORDS:
                    self._store.delete_key(self._place(subject, self._counts[subject] - KEPT_WORDS))
            return word
        return str(self._store.get(key).decode())

    def failure(self, subject: str, mine: str | None) -> str | None:
        """Return the failure of some rank, None when all succeeded; `mine` is this one's. Waits for all of them."""
        if self._store is None:
            return mine
        key = self._key(subject)
        if mine is not None:
            self._store.set(f"{key}/failed", f"rank {self.rank}: {mine}")
        until, num_done = time.monotonic() + LONGEST_S, self._store.add(f"{key}/done", 1)
        while num_done < self.world_size:
            if time.monotonic() > until:
                raise BackgroundError(
                    f"{num_done} of {self.world_size} ranks finished their restore within {LONGEST_S:g} s. "
                    "Look at the others; start the job again."
                )
            time.sleep(POLL_S)
            num_done = self._store.add(f"{key}/done", 0)
        return str(self._store.get(f"{key}/failed").decode()) if self._store.check([f"{key}/failed"]) else None

    def numbers(self, subject: str, mine: int) -> list[int] | None:
        """Return what each rank said first on `subject`, None until all have; this one says `mine`. Never waits."""
        if self._store is None:
            return [mine]
        key = f"{self._prefix}/{subject}"
        if subject not in self._counts:
            self._counts[subject] = 1
            self._store.set(f"{key}/{self.rank}", str(mine))
            self._store.add(f"{key}/said", 1)  # answered: the number is there before this rank goes on
        if self._store.add(f"{key}/said", 0) < self.world_size:
            return None
        return [int(self._store.get(f"{key}/{rank}")) for rank in range(self.world_size)]

    def _key(self, subject: str) -> str:
        """Return the place of the next word on a subject; ranks ask in the same order."""
        self._counts[subject] = self._counts.get(subject, 0) + 1
        return self._place(subject, self._counts[subject])

    def _place(self, subject: str, count: int) -> str:
        return f"{self._prefix}/{subject}/{count}"
