"""Has the operations of a model's call counted while the script trains: by a forked child, at the cost of the fork.

Which function counts is not known here: HEADWAY_REMEDIES names it under `NAME`, as it does for the loaders'
rehearsals (`rereading.begin`), and the child lives as theirs do. What it finds stands in
RUN/flops/r<rank>-m<model>.json, whose lock it holds until then.

    rank       model(x) --fork--> backward, update, steps ...
    child               `-- empties the model, counts ------ writes, ends (lock released)
    launcher                                                  finalise: takes the lock, reads
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

from headway.core.lazy import resolved
from headway.core.machine.child import start_detached
from headway.core.units import GIB, format_bytes
from headway.runtime.recorder.outer_call import Args, Kwargs
from headway.runtime.recorder.probes import OWN_NS, RECORDING, Probes, now, write_json
from headway.runtime.script.compute_facts import call_facts

if TYPE_CHECKING:
    from torch.nn import Module

NAME = "rehearsal.flops"
"""Key of the function in HEADWAY_REMEDIES."""

MOST_MODELS = 8
"""Models of a run whose calls are counted."""

MOST_RESIDENT_BYTES = 8 * GIB
"""A fork copies the tables of the pages that a process has: 20 ms for so many bytes."""


def count(probes: Probes, model: int, module: Module, args: Args, kwargs: Kwargs) -> None:
    """Start the child that counts a call which has just been made of the model of number `model`, on rank 0."""
    try:
        _count(probes, model, module, args, kwargs)
    except Exception as cause:
        probes.failed("operations", cause)


def _count(probes: Probes, model: int, module: Module, args: Args, kwargs: Kwargs) -> None:
    function = json.loads(os.environ.get("HEADWAY_REMEDIES") or "{}").get(NAME)
    if not function or model >= MOST_MODELS or not probes.leads or probes.recorder.rank != 0:
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
            return json.dumps({**facts, **counted, "ended_ns": now()}).encode()

        with probes.rereadings.aside() if probes.rereadings is not None else nullcontext() as first:
            start_detached(work, descriptor, run=probes.run, first=first)
    finally:
        os.close(descriptor)
    if now() - start >= OWN_NS:
        probes.emit(RECORDING, start, now() - start)
