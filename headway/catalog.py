"""What the project offers, as literal tables: a room's adviser, its remedies, and what else happens inside ranks.

An entry is "module:attribute", resolved where it is used: advisers run in the
command, remedies inside ranks. The records of remedies are read from the
rooms' `remedies.py`, which need no torch.

>>> sorted(REMEDIES)
['checkpoint.async', 'cluster.batch', 'cluster.fork', 'cluster.noise', 'comm.bucket', 'comm.compress', \
'comm.gradient_view', 'comm.loose', 'comm.order', 'comm.overlap', 'comm.static_graph', 'compute.autocast', \
'compute.channels_last', 'compute.compile', 'compute.cudnn_benchmark', 'compute.fused_optimizer', 'compute.tf32', \
'data.cache', 'data.server', 'data.threads', 'data.workers', 'fault.guard', 'fault.interval', 'fault.warm', \
'host.gc', 'host.logging', 'model.precision', 'model.tune', 'parallel.schedule', 'power.filler']
"""

from __future__ import annotations

from types import ModuleType

from headway.checkpoint import remedies as checkpoint
from headway.cluster import remedies as cluster
from headway.comm import remedies as comm
from headway.compute import remedies as compute
from headway.core.remedies import RemedyRecord
from headway.data import remedies as data
from headway.fault import remedies as fault
from headway.host import remedies as host
from headway.model import remedies as model
from headway.parallel import remedies as parallel
from headway.power import remedies as power

ADVISERS: dict[str, str] = {
    "data": "headway.data.advise:propose",
    "comm": "headway.comm.advise:propose",
    "parallel": "headway.parallel.advise:propose",
    "checkpoint": "headway.checkpoint.advise:propose",
    "host": "headway.host.advise:propose",
    "fault": "headway.fault.advise:propose",
    "power": "headway.power.advise:propose",
    "cluster": "headway.cluster.advise:propose",
    "model": "headway.model.advise:propose",
    "compute": "headway.compute.advise:propose",
}
"""Room -> the function that proposes its remedies from (ledger, program, setup)."""

ROOMS = (data, comm, parallel, checkpoint, host, fault, power, cluster, model, compute)
"""The rooms' records."""

RECORDS: dict[str, RemedyRecord] = {record.name: record for room in ROOMS for record in room.REMEDIES}
"""Remedy -> its record: what a plan may hold, or only predict."""


def _applied(room: ModuleType, attribute: str = "REMEDIES") -> dict[str, str]:
    """Return the remedies of a tuple of records that can be applied -> where the tuple lies, for the ranks."""
    records: tuple[RemedyRecord, ...] = getattr(room, attribute)
    return {record.name: f"{room.__name__}:{attribute}" for record in records if record.apply}


REMEDIES: dict[str, str] = {name: place for room in ROOMS for name, place in _applied(room).items()}
"""Remedy -> the tuple that holds its record, for those that are applied inside a rank."""

REHEARSALS: dict[str, str] = {
    "rehearsal.loader": "headway.data.workers.torch_threads:rehearse",
    "rehearsal.flops": "headway.compute.torch_calls:count_call",
}
"""What children find out while a run is recorded: the remedies that a loader would not take, the operations of a model.

Key -> the function that does.
"""

SUPERVISOR = "headway.fault.supervise:supervisor"
"""What supervises the attempts of a run that may have several."""

MEASUREMENTS: dict[str, str] = _applied(data, "MEASUREMENTS")
"""Measurement -> where its record lies: phases of `headway data stalls -- SCRIPT`, in order."""

PRECISION_PHASES: dict[str, str] = _applied(model, "MEASUREMENTS")
"""Measurement -> where its record lies: phases of `headway model precision -- SCRIPT`."""

TRIES: dict[str, str] = _applied(compute, "MEASUREMENTS")
"""Measurement -> where its record lies: the trial of candidates of `headway try -- SCRIPT`."""

DRILL: dict[str, str] = _applied(fault, "DRILL")
"""What a drill does inside a rank -> where its record lies; no plan of a user's names it."""

CHECKS: dict[str, str] = _applied(data, "CHECKS")
"""Check -> where its record lies, for `headway data verify-resume`."""


def causes_of(remedy: str) -> tuple[str, ...]:
    """Return the causes that a remedy acts against; none of one that has no record."""
    return RECORDS[remedy].causes if remedy in RECORDS else ()
