"""Asks, in a child of the recorded process, what remedies would say of a loader, when its first iterator is made.

The room that has the remedies is not known here: HEADWAY_REMEDIES names the function under `NAME`. What the child
finds it writes into RUN/loaders/r<rank>-t<group>.json, whose lock it holds until then; nothing waits for it but the
end of the recording, for a moment.

    rank       iter(loader) --fork--> steps ...
    child                    `-- imports, tries apart ------- writes, ends (lock released)
    launcher                                                   finalise: takes the lock, reads
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from headway.core.lazy import resolved
from headway.runtime.host.device import in_use
from headway.runtime.recorder.probes import Probes
from headway.runtime.recorder.rereading import start_detached

NAME = "rehearsal.loader"
"""Key of the function in HEADWAY_REMEDIES."""

MOST_LOADERS = 8
"""Loaders of a run that are asked about: each costs 0.5 s of another core, and the training thread two forks."""

PATIENCE_S = 10.0
"""Seconds that the end of a recording waits for children that still try."""


def begin(probes: Probes, group: int, loader: Any) -> None:
    """Start the child for the loader of number `group`; nothing where it cannot be, or need not be."""
    function = json.loads(os.environ.get("HEADWAY_REMEDIES") or "{}").get(NAME)
    if not function or group >= MOST_LOADERS or probes.remedied or not probes.leads or probes.recorder.rank != 0:
        return
    if in_use():  # what was forked then could not use the device
        return
    folder = f"{probes.run}/loaders"
    os.makedirs(folder, exist_ok=True)
    descriptor = os.open(f"{folder}/r0-t{group}.json", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

        def work() -> bytes:
            return json.dumps({group: {"rehearsal": resolved(function)(loader)}}).encode()

        start_detached(work, descriptor, forks=True)
    finally:
        os.close(descriptor)


def settle(run: Path, patience_s: float = PATIENCE_S) -> None:
    """Wait until the children of the ranks in `run` have written, `patience_s` at most."""
    deadline = time.monotonic() + patience_s
    for path in sorted((run / "loaders").glob("r*-t*.json")):
        with path.open("rb") as file:
            while not _is_free(file.fileno()) and time.monotonic() < deadline:
                time.sleep(0.01)


def _is_free(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
