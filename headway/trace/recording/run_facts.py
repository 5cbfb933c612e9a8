"""What run.json says of a run, typed and checked once, where it is read.

`RunFacts.read` is strict: a value of another type than its key has is one
`FormatError`. `RunFacts.of` reads what came from elsewhere, such as the facts
of somebody's trace: such a value counts as missing. In both, keys of a newer
version are ignored, and what an older one lacks (or holds as null: not known)
has its default. Damaged rows of `applied`, `loaders` and the host's load never
cost a run: see `AppliedRow`, `LoaderFacts` and `HostLoad`. Moments are int ns
on CLOCK_MONOTONIC of the host, sizes are bytes. docs/run-folder.md explains
every key.

>>> facts = RunFacts.of({"world_size": 2, "ranks": [{"rank": 1, "exit_code": 137}], "cores": "many", "later": 1})
>>> facts.world_size, facts.ranks[0].exit_code, facts.cores, facts.device_type
(2, 137, None, 'cpu')
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import FormatError
from headway.core.files.safe_files import converted
from headway.core.machine.host_load import HostLoad
from headway.trace.events.loader_facts import (
    DATASET,
    AppliedRow,
    GivenUp,
    LoaderFacts,
    active_settings,
    applied_rows,
    given_up,
    unfit,
)
from headway.trace.recording.host_series import DeviceSeries, HostSeries
from headway.trace.recording.incident import Incident
from headway.trace.rings.rank_tables import ComputeFacts, json_object

SCHEMA = "headway.run-folder/1"


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one attempt."""

    rank: int
    start_ns: int | None = None
    end_ns: int | None = None
    exit_code: int | None = 0
    """Minus the signal; None: nobody saw it end."""
    group_rank: int = 0
    """Number of its host; of the rows that ranks write themselves."""

    def moved(self, by_ns: int) -> RankRow:
        """Return the row with its moments on another clock."""
        start_ns, end_ns = (None if at is None else at + by_ns for at in (self.start_ns, self.end_ns))
        return msgspec.structs.replace(self, start_ns=start_ns, end_ns=end_ns)


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank took at most."""

    peak_rss_bytes: int | None = None
    device_peak_bytes: int | None = None
    """Reserved by torch's allocator."""
    device_allocated_bytes: int | None = None
    """Taken by tensors."""
    device_total_bytes: int | None = None


CTRL_C = 130
"""Exit code of a run that was interrupted: nobody failed."""


CUT = "cut"
"""Class of an end that nobody noted: the launcher was killed, and its ranks with it."""


class RunExit(msgspec.Struct, frozen=True, kw_only=True, rename={"cls": "class"}):
    """How a run ended."""

    code: int | None = None
    """128 + signal; 0 = well."""
    cls: str = ""
    """One of `headway.runtime.run_folder.exit_class.CLASSES`, or `CUT`."""
    first_rank: int | None = None
    """The rank that failed first."""
    traceback: str | None = None
    """Its traceback."""


class BadLoss(msgspec.Struct, frozen=True, kw_only=True):
    """A loss that was NaN, infinite or many times the usual one."""

    step: int = 0
    what: str = ""


class GivenWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """What remedy data.workers was given, beside its decisions."""

    prefetch_factor: int = 2
    persistent_workers: bool = False
    pin_memory: bool = False


class RunFacts(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The content of run.json, or of several hosts' after `merge`, with what `Run.open` adds."""

    schema: str = ""
    """`SCHEMA`; '' = these are the facts of a trace."""
    run_id: str | None = None
    attempt: int = 0
    host: str | None = None
    group_rank: int = 0
    """Number of the host."""
    hosts: tuple[str | None, ...] = ()
    """After `merge`: each part's host."""
    script: tuple[str, ...] = ()
    env: dict[str, str] = {}
    start_ns: int | None = None
    end_ns: int | None = None
    """None: the launcher was killed, or runs."""
    realtime_ns: int | None = None
    """Realtime clock at `start_ns`."""
    nproc: int | None = None
    """Ranks of this host; of all hosts after `merge`."""
    world_size: int = 1
    device_type: str = "cpu"
    cores: int | None = None
    memory_available_bytes: int | None = None
    memory: dict[str, RankMemory | None] = {}
    bad_losses: dict[int, tuple[BadLoss, ...]] = {}
    threads: dict[int, int] = {}
    """Rank -> threads of one operator."""
    ranks: tuple[RankRow, ...] = ()
    exit: RunExit | None = None
    launched: bool = True
    """False: `headway.run()` recorded it, as in a notebook, and there may be no script to run again."""
    plan: str | None = None
    dropped: int = 0
    compute_cpu_fraction: float | None = None
    """Share of compute that occupies a core; None = the replay has to find out."""
    clock_offset_ns: dict[int, int] = {}
    """After `merge`: rank -> what to add to its times."""
    input: dict[str, dict[str, int | float]] = {}
    """What caches and orders of the last attempt counted, ranks summed."""
    incidents: tuple[Incident, ...] = ()
    """The failures that ended an attempt, as the supervisor of the run noted them, oldest first."""
    host_load: HostLoad | None = None
    host_series: HostSeries | None = None
    device_series: DeviceSeries | None = None
    applied: tuple[AppliedRow, ...] = ()
    compute: ComputeFacts | None = None
    """How the script computes, as its lowest rank saw it; None in recordings that did not look."""
    loaders: dict[str, LoaderFacts] = {}
    """Group -> facts of the loader, as the script made it."""

    @classmethod
    def read(cls, meta: Mapping[str, Any], where: str) -> RunFacts:
        """Check what a file says. Raises `FormatError` naming `where`, the key, its value and its type."""
        facts, bad = _converted(meta)
        for key, rule in bad.items():
            value = repr(meta[key])
            raise FormatError(
                f"{where} has {key} = {value if len(value) < 80 else value[:80] + '...'}: {rule}. "
                "Copy the run folder again, or record the run again."
            )
        return facts

    @classmethod
    def of(cls, meta: Mapping[str, Any] | RunFacts) -> RunFacts:
        """Return what can be read of facts that no file of ours holds; facts that are typed already as they are."""
        return meta if isinstance(meta, RunFacts) else _converted(meta)[0]

    @property
    def is_recorded(self) -> bool:
        """Whether headway recorded the run, with its loaders."""
        return bool(self.schema)

    @property
    def realtime_shift_ns(self) -> int:
        """Realtime minus monotonic clock of the host; 0 where it is not known."""
        return 0 if self.realtime_ns is None or self.start_ns is None else self.realtime_ns - self.start_ns

    @functools.cached_property
    def in_force(self) -> dict[str, dict[str, Any]]:
        """Remedy that the run had to the end -> its facts."""
        return active_settings(self.applied)

    @functools.cached_property
    def given_up(self) -> dict[str, GivenUp]:
        """Remedy that the run refused or withdrew -> what it was given, and why."""
        return given_up(self.applied)

    @property
    def asked_until_ns(self) -> int:
        """When the last of the children that asked about loaders and models had answered; 0 = none was seen."""
        ended_ns = [loader.rehearsal.ended_ns for loader in self.loaders.values()]
        ended_ns += [call.ended_ns for call in (self.compute.calls if self.compute else ())]
        return max((moment for moment in ended_ns if moment is not None), default=0)

    @functools.cached_property
    def effective_loaders(self) -> dict[str, LoaderFacts]:
        """Group -> facts of the loader as remedies left it, with what they found of its dataset.

        A remedy that gave a loader workers is in force: what it had is what they made of it, not what the script asks
        for. Loaders are told apart by the class of their dataset and, where a decision says it, their line.
        """
        facts = dict(self.loaders)
        for row in self.applied:
            if row.name == "data.workers" and not row.why_without:
                facts = {group: _with_workers(fact, row) for group, fact in facts.items()}
        for found in unfit(self.applied):
            reason = f"{found.reason.partition(';')[0]} ({found.remedy} found it in this run)"
            more = {"unfit_ahead": reason, **({"unfit": reason} if found.about == DATASET else {})}
            for group, fact in facts.items():
                if fact.dataset and _is_of(fact, found.dataset, found.line):
                    facts[group] = msgspec.structs.replace(fact, **more)
        return facts


def outcomes_of(run: Path, *, rank: int | None = None) -> list[AppliedRow]:
    """Return what the ranks of the run at `run`, or one of them, said of remedies: the entries of RUN/applied."""
    files = sorted((run / "applied").glob("r*.json" if rank is None else f"r{rank}.json"))
    return [row for file in files for row in applied_rows(json_object(file).get("remedies"))]


_LENIENT = ("host_load", "host_series", "device_series", "applied", "loaders")
"""Keys whose damage costs no run: they are read row by row."""


def _converted(meta: Mapping[str, Any]) -> tuple[RunFacts, dict[str, str]]:
    """Return the facts, and key -> what is wrong with its value, for those that were left out."""
    facts, bad = converted({k: v for k, v in meta.items() if v is not None and k not in _LENIENT}, RunFacts)
    rows = meta.get("loaders")
    return msgspec.structs.replace(
        facts,
        host_load=HostLoad.from_facts(meta),
        host_series=HostSeries.from_facts(meta),
        device_series=DeviceSeries.from_facts(meta),
        applied=applied_rows(meta.get("applied")),
        loaders={str(group): LoaderFacts.of(row) for group, row in rows.items()} if isinstance(rows, Mapping) else {},
    ), bad


def _is_of(facts: LoaderFacts, dataset: str | None, line: str | None) -> bool:
    """Tell whether a decision on a loader of `dataset`, made at `line`, is on this one."""
    return facts.dataset == dataset and (line is None or not facts.constructed or line == facts.constructed)


def _with_workers(facts: LoaderFacts, given: AppliedRow) -> LoaderFacts:
    """Return the facts of a loader that data.workers was applied to; of others, what they are."""
    counts = [row.num_workers for row in given.decisions("loaders") if _is_of(facts, row.dataset, row.line)]
    if not counts or None in counts:  # left alone: at once, or later
        return facts
    loaders, _ = converted(given.facts or {}, GivenWorkers)
    return msgspec.structs.replace(
        facts,
        num_workers=counts[-1],
        prefetch_factor=max(loaders.prefetch_factor, facts.prefetch_factor or 2),
        persistent=facts.persistent or loaders.persistent_workers,
        pin_memory=facts.pin_memory or loaders.pin_memory,
    )


def memory_headroom(facts: RunFacts) -> dict[str, int]:
    """Return peak and headroom of host memory, and of the fullest device; empty where the run recorded none. Bytes."""
    ranks = [row for row in facts.memory.values() if row is not None and row.peak_rss_bytes is not None]
    peak, free = sum(row.peak_rss_bytes or 0 for row in ranks), facts.memory_available_bytes
    if not ranks or free is None:
        return {}
    memory = {"host_peak_bytes": peak, "host_free_bytes": free, "host_headroom_bytes": free - peak}
    devices = [
        (row.device_total_bytes - row.device_peak_bytes, row.device_peak_bytes)
        for row in ranks
        if row.device_total_bytes is not None and row.device_peak_bytes is not None
    ]
    if devices:
        headroom, peak = min(devices, key=lambda pair: pair[0])
        memory |= {"device_peak_bytes": peak, "device_headroom_bytes": headroom}
    return memory
