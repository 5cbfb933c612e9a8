"""Rehearsals of loaders, and the count of a model call's operations: forked children, at the cost of the fork.

Which functions rehearse and count is not known here: HEADWAY_REMEDIES names them, the counting one under `NAME`. The
children live alike: what one finds stands in its file (RUN/flops/r<rank>-m<model>.json for a model), whose lock it
holds until then. The one of a model computes for up to 2 s, and may be late: beside the threads of an operator, which
wait for each other, it would hold both up.

    rank       model(x) --fork--> backward, update, steps ...
    child               `-- empties the model, counts ------ writes, ends (lock released)
    launcher                                                  finalise: takes the lock, reads
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.machine.apart import RUN_CACHES
from headway.core.machine.child import start_detached
from headway.core.tables import resolved
from headway.core.units import GIB, NS_PER_S, format_bytes
from headway.runtime.host.device import in_use
from headway.runtime.recorder.probes import OWN_NS, RECORDING, Args, Kwargs, Probes, now, write_json
from headway.runtime.script.compute_facts import call_facts

if TYPE_CHECKING:
    from torch.nn import Module

NAME = "rehearsal.flops"
"""Key of the function in HEADWAY_REMEDIES."""

MOST_MODELS = 8
"""Models of a run whose calls are counted."""

BUSY = 0.5
"""Share of its time that a child has a core for while it counts as beside the steps."""

MOST_RESIDENT_BYTES = 8 * GIB
"""A fork copies the tables of the pages that a process has: 20 ms for a GB."""


def count(probes: Probes, model: int, module: Module, args: Args, kwargs: Kwargs) -> None:
    """Start the child that counts a call which has just been made of the model of number `model`, on rank 0."""
    try:
        _count(probes, model, module, args, kwargs)
    except Exception as cause:
        probes.failed("operations", cause)


def _count(probes: Probes, model: int, module: Module, args: Args, kwargs: Kwargs) -> None:
    function = json.loads(os.environ.get("HEADWAY_REMEDIES") or "{}").get(NAME)
    if not function or not probes.leads or probes.recorder.rank != 0:
        return
    start, path = now(), f"{probes.run}/flops/r0-m{model}.json"
    facts = call_facts(module)
    with open("/proc/self/statm", encoding="ascii") as file:
        resident_bytes = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident_bytes > MOST_RESIDENT_BYTES:
        reason = f"the process holds {format_bytes(resident_bytes)} of memory, and was not forked to count them"
        write_json(path, {**facts, "flops": None, "reason": reason})
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

        def work() -> bytes:
            probes.forwarding[0] = True  # what is called here is no call of the script's
            sys.modules["torch"].set_num_threads(1)
            counted = resolved(function)(module, args, kwargs)
            return json.dumps({**facts, **counted, "ended_ns": _beside_until_ns(start)}).encode()

        with probes.rereadings.aside() if probes.rereadings is not None else nullcontext() as first:
            start_detached(work, descriptor, run=probes.run, first=first, late=True)
    finally:
        os.close(descriptor)
    if now() - start >= OWN_NS:
        probes.emit(RECORDING, start, now() - start)


def _beside_until_ns(start_ns: int) -> int:
    """Return until when this child, at its end, counts as beside the steps: one without a core holds nobody up."""
    cpu_s = sum(os.times()[:4])
    return min(now(), start_ns + round(cpu_s / BUSY * NS_PER_S))


# Asks, in a child of the recorded process, what remedies would say of a loader, when its first iterator is made.
#
# The room that has the remedies is not known here: HEADWAY_REMEDIES names the function under `LOADER`. What the child
# finds it writes into RUN/loaders/r<rank>-t<group>.json, whose lock it holds until then; nothing waits for it but the
# end of the recording, for a moment.
#
#     rank       iter(loader) --fork--> steps ...
#     child                    `-- imports, tries apart ------- writes, ends (lock released)
#     launcher                                                   finalise: takes the lock, reads

LOADER = "rehearsal.loader"
"""Key of the function in HEADWAY_REMEDIES."""

MOST_LOADERS = 8
"""Loaders of a run that are asked about: each costs 0.5 s of another core, and the training thread two forks."""

PATIENCE_S = 10.0
"""Seconds that the end of a recording waits for children that still try."""


def begin(probes: Probes, group: int, loader: Any) -> None:
    """Start the child for the loader of number `group`; nothing where it cannot be, or need not be."""
    function = json.loads(os.environ.get("HEADWAY_REMEDIES") or "{}").get(LOADER)
    if not function or group >= MOST_LOADERS or probes.remedied or not probes.leads or probes.recorder.rank != 0:
        return
    if in_use():  # what was forked then could not use the device
        return
    start, folder = now(), f"{probes.run}/loaders"
    os.makedirs(folder, exist_ok=True)
    descriptor = os.open(f"{folder}/r0-t{group}.json", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

        def work() -> bytes:
            rehearsal = resolved(function)(loader)
            return json.dumps({group: {"rehearsal": {**rehearsal, "ended_ns": _beside_until_ns(start)}}}).encode()

        start_detached(work, descriptor, forks=True, run=probes.run)
    finally:
        os.close(descriptor)


def settle(run: Path, patience_s: float = PATIENCE_S) -> None:
    """Wait until the children of the ranks in `run` have written, `patience_s` at most."""
    deadline = time.monotonic() + patience_s
    for path in sorted([*(run / "loaders").glob("r*-t*.json"), *(run / "flops").glob("r*-m*.json")]):
        with path.open("rb") as file:
            while not _is_free(file.fileno()) and time.monotonic() < deadline:
                time.sleep(0.01)
    shutil.rmtree(run / RUN_CACHES, ignore_errors=True)


def _is_free(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
