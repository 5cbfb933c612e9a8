"""One failure of a running job, from its detection to the first step after it: a row of RUN/incidents.json.

Times are int ns on CLOCK_MONOTONIC of the host that saw it, in this order:
detected (a rank is gone, or makes no progress), located (it is known which one
was the first), down (all ranks are gone), decided (what to do), first step
(all ranks have made one in the next attempt).

>>> incident = Incident(number=0, attempt=0, cls="infra", suspects=Blamed([1], ["a"]), detected_ns=10, located_ns=12,
...                     down_ns=20, decided_ns=21, action="restart")
>>> incident.phases_s(), incident.downtime_s
({'locate': 2e-09, 'stop': 8e-09, 'decide': 1e-09}, None)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import whole_file

SCHEMA = "headway.incidents/1"
FILE = "incidents.json"
"""Name of the file in a run folder; host k > 0 of several writes incidents-host<k>.json."""


REROUTE = "reroute"
"""Action of an incident in which no attempt ended: the other ranks went on without the one that was killed."""


class Blamed(msgspec.Struct, frozen=True):
    """Who is suspected of a failure."""

    ranks: list[int]
    """Their ranks; none = nobody in particular."""

    hosts: list[str] = []
    """Their hosts."""

    group: str | None = None
    """The parallel group that they share: 'tp of ranks 0, 1'."""

    confidence: float = 1.0
    """From 0 to 1."""


class Incident(msgspec.Struct, frozen=True, kw_only=True, rename={"cls": "class"}):
    """One failure and what followed."""

    number: int = 0
    """Place in the list."""

    attempt: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The attempt that failed."""

    cls: str = ""
    """Exit class of the rank that failed first."""

    suspects: Blamed = Blamed([])
    detected_ns: int = 0
    located_ns: int = 0
    decided_ns: int = 0
    down_ns: int = 0
    first_step_ns: int | None = None
    """None: the next attempt has not made a step, or there was none. Of a reroute: when all other ranks had changed to
    the schedule without the killed one."""

    action: str = ""
    """One of `headway.fault.supervise.ACTIONS`."""

    reason: str = ""
    """Why that one."""

    warm: bool = False
    """Whether the ranks of the next attempt were forked from a warm process."""

    cold_reason: str | None = None
    """Why not; None where they were."""

    step: int = 0
    """Steps that all ranks had completed."""

    checkpoint: int | None = None
    """The newest committed checkpoint that was seen; None = there was none."""

    lost_steps: int | None = None
    """Steps that are done again; None: not known (yet)."""

    restored: str = "none"
    """Where the next attempt had its state from: memory, folder or none."""

    trained_from_ns: int | None = None
    """When all ranks of the attempt that failed had made a step; None = they never had."""

    trained_until_ns: int | None = None
    """The end of the newest step of any of them."""

    evidence: str = ""
    """What was seen: exit code or signal, last line of the traceback."""

    def phases_s(self) -> dict[str, float]:
        """Return phase -> seconds, in order, as far as it came."""
        marks = {
            "locate": self.located_ns, "stop": self.down_ns, "decide": self.decided_ns, "start": self.first_step_ns,
        }  # fmt: skip
        phases, before_ns = {}, self.detected_ns
        for name, at_ns in marks.items():
            if at_ns is not None:
                phases[name] = (at_ns - before_ns) / 1e9
                before_ns = at_ns
        return phases

    @property
    def ended_attempt(self) -> bool:
        """Whether the attempt ended by it."""
        return self.action != REROUTE

    @property
    def downtime_s(self) -> float | None:
        """Seconds from the detection to the first step of all ranks."""
        return None if self.first_step_ns is None else (self.first_step_ns - self.detected_ns) / 1e9


class IncidentFile(msgspec.Struct, frozen=True):
    """What RUN/incidents.json holds."""

    schema: str = SCHEMA
    incidents: list[Incident] = []


def write_incidents(run: Path, incidents: Sequence[Incident], *, group_rank: int = 0) -> None:
    """Write the file of a host whole, as open as its folder.

    Failures and reroutes are written by two parts of the launcher: rows of the kind that `incidents` are not stay.
    """
    path = run / (FILE if group_rank == 0 else f"incidents-host{group_rank}.json")
    kinds = {row.ended_attempt for row in incidents}
    rows = [row for row in _read(path) if row.ended_attempt not in kinds]
    rows = sorted([*rows, *incidents], key=lambda row: row.detected_ns)
    rows = [msgspec.structs.replace(row, number=number) for number, row in enumerate(rows)]
    with whole_file(path) as draft:
        draft.touch(run.stat().st_mode & 0o666)
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(IncidentFile(SCHEMA, rows)), indent=1))


def read_incidents(run: Path) -> list[Incident]:
    """Return the incidents of a run, oldest first; [] where nothing failed. Raises `FormatError`, `InputError`."""
    return _read(run / FILE)


def _read(path: Path) -> list[Incident]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as cause:
        raise InputError(f"{path} cannot be read: {cause}. Name a run folder that you may read.") from cause
    try:
        return msgspec.json.decode(content, type=IncidentFile).incidents
    except (msgspec.DecodeError, RecursionError) as cause:
        raise FormatError(f"{path} is not a list of incidents ({cause}). Copy the run folder again.") from cause
