"""Damaged blocks rebuilt from parity while a checkpoint is being read; the files stay as they are.

The first damaged block makes the whole checkpoint be verified, once: which
members of its stripe are good has to be known. After that a block costs the
reading of as many others as its stripe has data members. For putting files
right for good there is `headway ckpt repair`.

>>> import tempfile
>>> ParityRepair(tempfile.mkdtemp())("rank-0/__0_0.distcp", 0, 4096) is None
True
"""

from __future__ import annotations

import threading
from pathlib import Path

from headway.core.errors import HeadwayError
from headway.storage.checks.repair import rebuilt
from headway.storage.checks.verification import verify
from headway.storage.commits.sidecars import commit_record
from headway.storage.redundancy.losses import Losses
from headway.storage.redundancy.parity import best
from headway.storage.redundancy.parity_files import Images
from headway.storage.stored.store import LocalStore


class ParityRepair:
    """Rebuilds blocks of one checkpoint in a folder: see `fetch.Mend`."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._lock = threading.Lock()
        self._known: Losses | None = None
        self._looked = False

    def __call__(self, file: str, start: int, stop: int) -> bytes | None:
        """Return bytes `start` to `stop` of a file, at most a block of it, or None where parity does not give them."""
        with self._lock:
            if not self._looked:
                self._known, self._looked = self._losses(), True
        losses = self._known
        ranks = [rank for rank, entry in losses.images.entries.items() if entry.name == file] if losses else []
        return rebuilt(losses, ranks[0], start, stop) if losses and ranks else None

    def _losses(self) -> Losses | None:
        """Find out what is damaged; None where there is nothing to rebuild from."""
        record = commit_record(LocalStore(self._folder))
        if record is None:
            return None
        try:
            return best(Images(self._folder, record), list(verify(self._folder).damaged))[0]
        except HeadwayError:
            return None
