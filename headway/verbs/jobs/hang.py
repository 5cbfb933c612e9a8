"""`headway hang`: which ranks block a job that makes no progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headway.core.errors import InputError
from headway.core.files.safe_files import read_json
from headway.core.mesh import Mesh
from headway.ledger.hang import HangVerdict, localise
from headway.ledger.hang_reports import WatchReport, of_dumps, of_watch
from headway.report.page.hang import render_hang
from headway.trace.events.trace import Trace
from headway.trace.recording.run_facts import RunFacts
from headway.trace.recording.runs import is_run
from headway.trace.rings.rank_tables import json_object
from headway.verbs.shared.output import emit
from headway.verbs.shared.source import RunPath, newest_run


def hang(*source: RunPath, mesh: str | None = None, json: bool = False) -> int:
    """Find the ranks that block a hung job: silent ones, those that did not enter what others wait in, deadlocks.

    Example: `headway hang dumps/nccl_trace_rank_* --mesh tp=8,pp=4,dp=16`

    Args:
      source:
        A run folder whose hang watch reported (the newest run by default), one of its reports, or the Flight Recorder
        dumps of all ranks that still answer.
      mesh: The parallel axes and their sizes, the fastest-varying first; all ranks along dp by default.
      json: Print one JSON object (schema headway.hang/1) instead of text.
    """
    sources = list(source) or [newest_run()]
    answer = verdict_of(sources, None if mesh is None else mesh_of(mesh)).to_json()
    named = ", ".join(map(str, sources)) if len(sources) < 3 else f"{len(sources)} dumps"
    return emit(answer, lambda screen: render_hang(answer, source=named, **screen), as_json=json)


def verdict_of(sources: Sequence[Path], mesh: Mesh | None = None) -> HangVerdict:
    """Localise the blockage that `sources` tell of: one run folder or report, or the dumps of all ranks.

    Raises `InputError` when a run folder holds no report of its hang watch.
    """
    if len(sources) == 1 and is_run(sources[0]):
        reports = watch_reports(sources[0])
        if not reports:
            from headway.runtime.launching.hang_watch import FLOORS_S  # loaded where it is said only

            facts = json_object(sources[0] / "run.json")
            runs = facts and RunFacts.of(facts).end_ns is None
            asked = "so far no rank has" if runs else "no rank had"
            usual = f"{FLOORS_S['step']:g} s in a step and {FLOORS_S['setup']:g} s before its first ones"
            reason = f"{asked} stood still for as long as is unusual, by default at least {usual}. "
            reason += "Ask again or name" if runs else "Name"
            raise InputError(
                f"{sources[0]} holds no report of the hang watch in {sources[0] / 'hang'}: {reason} the Flight "
                "Recorder dumps of the ranks."
            )
        sources = reports[-1:]
    report = watched(sources[0]) if len(sources) == 1 else None
    # Where hosts run ahead of devices their places say little; what the ranks' queues held does, if they were asked.
    dumps = _dumps(sources[0].parent) if report is not None and report.ahead else []
    if report is None or dumps:
        found = of_dumps(Trace.open(dumps or list(sources)), mesh)
    else:
        found = of_watch(report, mesh)
    return localise(found.reports, found.mesh, groups=found.groups)


def watch_reports(run: Path) -> list[Path]:
    """Return the reports of a run's hang watch, oldest first."""
    files = (file for file in (run / "hang").glob("*.json") if file.stem.isdecimal())
    return sorted(files, key=lambda file: int(file.stem))


def _dumps(folder: Path) -> list[Path]:
    """Return the newest dump of each rank that the hang watches of a run's hosts collected in RUN/hang/<n>/."""
    newest: dict[str, Path] = {}
    for path in sorted(folder.glob("*/r*.flight.json"), key=lambda path: int(path.parent.name)):
        newest[path.name] = path
    return [path for _, path in sorted(newest.items())]


def watched(path: Path) -> WatchReport | None:
    """Return a hang watch's report, None when the file is something else."""
    if path.suffix != ".json":
        return None
    try:
        found = read_json(path, fix="Copy the file again.")
    except OSError as cause:
        raise InputError(f"{path} cannot be read: {cause}. Name a file that exists.") from cause
    return WatchReport.of(found, str(path)) if isinstance(found, dict) and "entries" not in found else None


def mesh_of(text: str) -> Mesh:
    """Return the mesh that 'tp=8,pp=4,dp=16' names, the fastest-varying axis first. Raises `InputError`.

    >>> mesh_of("tp=2,dp=4").product()
    'tp(2) * dp(4)'
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if not axis or not size.isdecimal() or axis in sizes:
            raise InputError(f"--mesh holds {part!r}; write each axis once with its size, such as tp=8,pp=4,dp=16.")
        sizes[axis] = int(size)
    return Mesh(sizes)
