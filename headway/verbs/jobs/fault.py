"""`headway fault incidents|plan|sim`: the failures of a run and what each cost; what to prepare; a fleet, simulated.

`headway fault probe`: does every device of this host compute the same bits?

`headway hang`: which ranks block a job that makes no progress.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from headway.core.errors import HeadwayError, InputError
from headway.core.files.safe_files import read_json
from headway.core.mesh import Mesh
from headway.core.units import format_fraction, format_seconds, plural
from headway.fault.advise import AttemptTimes, ettr_over_time, saves_of, stepped_s
from headway.fault.backup import Preparation, prepare
from headway.fault.fleet import Scenario, simulate
from headway.fault.incidents import expected
from headway.fault.remedies import INTERVAL, WARM
from headway.fault.torch_self_check import SelfCheckResult, check
from headway.ledger.answers.ledger import Ledger
from headway.ledger.answers.metrics import ettr_of_steps
from headway.ledger.hang import HangVerdict, localise
from headway.ledger.hang_reports import WatchReport, of_dumps, of_watch
from headway.ledger.runs.attempts import book_run
from headway.report.page.plots import Line, picture_page, write_page
from headway.report.page.ranks import render_hang
from headway.report.paper import ScreenOptions, add_row, draw, grid
from headway.trace.events.trace import Trace
from headway.trace.recording.incident import REROUTE, SCHEMA, Incident, read_incidents
from headway.trace.recording.run_facts import RunFacts, outcomes_of
from headway.trace.recording.runs import Run, is_run
from headway.trace.rings.rank_tables import json_object
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import NewestRun, OutPath, RunPath, newest_run, run_at

ETTRS = ("ettr", "ettr_simulated", "ettr_closed_form")
"""Measured; of a simulated job with the same failures; by the closed form."""


def incidents(run: NewestRun = None, /, *, out: OutPath | None = None, json: bool = False) -> int:
    """List the failures of a run: who failed, what was done, how long each phase took, what was lost.

    Example: `headway fault incidents headway-runs/train-1`

    Args:
      out: Also write a page of the ETTR over time: -o page.html. A run of which nothing failed has none.
      json: Print one JSON object (schema headway.incidents/1) instead of text.
    """
    recorded = run_at(run)
    answer = incidents_of(recorded)
    if out is not None:
        if not answer["incidents"]:
            raise InputError(f"nothing failed in {recorded.path}: it has no ETTR to draw. Leave -o out.")
        chart = _ettr_line(*ettr_over_time(book_run(recorded.attempts(), recorded.facts)))
        answer["page"] = write_page(out, picture_page(str(recorded.path), "ETTR over time", [chart]))
    return emit(answer, lambda screen: _screen(answer, str(recorded.path), screen), as_json=json)


def _ettr_line(end_s: NDArray[np.float64], ettr: NDArray[np.float64]) -> Line:
    """Return the chart of an ETTR [n] until each moment [n], linear between them."""
    values = np.interp(np.linspace(0, end_s[-1], 2000), end_s, ettr)
    top = math.ceil(10 * values[100:].max()) / 10  # the first moments are mostly start-up
    bottom = min(math.floor(10 * values[100:].min()) / 10, top - 0.1)
    title = (
        f"Productive time over time until then: {format_fraction(ettr[-1])} in the end "
        f"(axis from {100 * bottom:.0f} to {100 * top:.0f} %)"
    )
    return Line(title, values, ("0 s", format_seconds(end_s[-1])), top=top, bottom=bottom)


def incidents_of(run: Run) -> dict[str, object]:
    """Return the object that `--json` prints."""
    rows = read_incidents(run.path)
    return {"schema": SCHEMA, "incidents": [row_of(row) for row in rows], **ettr_of(run, rows)}


def account_of(path: Path) -> dict[str, object]:
    """Return what `headway run --json` says of the attempts of a run."""
    run = Run.open(path)
    answer = incidents_of(run)
    return {"attempts": len(run.attempts()), **{key: answer[key] for key in ("incidents", *ETTRS)}}


def row_of(incident: Incident) -> dict[str, object]:
    """Return an incident as JSON shows it, with the seconds of its phases."""
    row: dict[str, Any] = msgspec.to_builtins(incident)
    return {**row, "phases_s": incident.phases_s(), "downtime_s": incident.downtime_s}


def ettr_of(run: Run, rows: Sequence[Incident]) -> dict[str, float | None]:
    """Return the values of `ETTRS`: measured, as a simulated job has it with the same failures, by the closed form.

    Measured is the wall time of the steps that were kept / that of the run. None where nothing is known, or nothing
    failed: of such a run it would be the share of its start-up, which says nothing of failures.
    """
    none: dict[str, float | None] = dict.fromkeys(ETTRS)
    if not rows:
        return none
    try:
        booked = book_run(run.attempts(), run.facts)
        (kept_s, stepped), saves = stepped_s(booked), saves_of(booked)
        wall_s = (booked.wall[1] - booked.wall[0]) / 1e9
        if not wall_s or not kept_s:
            return none
        found = expected(rows, wall_s=wall_s, stepped_s=stepped, interval_s=stepped / saves if saves else None)
    except HeadwayError:
        return none
    measured = ettr_of_steps(kept_s, wall_s=wall_s)
    if found is None:
        return {**none, "ettr": measured}
    return dict(zip(ETTRS, (measured, found.simulated, found.closed_form), strict=True))


def ettr_beside(before: Run, after: Run) -> dict[str, float | None] | None:
    """Return the measured ETTR of two runs, and what the first one's failures let predict; None where none failed."""
    rows = read_incidents(before.path)
    if not any(row.ended_attempt for row in rows):
        return None
    answer = {"before": ettr_of(before, rows)["ettr"], "after": ettr_of(after, read_incidents(after.path))["ettr"]}
    times = AttemptTimes.of(before, Ledger.of(before))
    given = {row.name for row in outcomes_of(after.path) if not row.reason_not_applied} & {WARM, INTERVAL}
    given = given or {WARM, INTERVAL}  # of a run without such a plan: with all that was proposed
    if times is None:
        return {**answer, "predicted": None}
    interval_s = times.best_interval_s if INTERVAL in given else None
    return {**answer, "predicted": times.ettr_with(warm=WARM in given, interval_s=interval_s)}


def ettr_sentence(found: Mapping[str, float | None]) -> str:
    """Return what `ettr_beside` found, in words."""
    before, after, wanted = (
        "not known" if found[key] is None else format_fraction(found[key] or 0.0)
        for key in ("before", "after", "predicted")
    )
    return f"ETTR {before} before, {after} now; predicted {wanted} with the same failures"


def _screen(answer: dict[str, Any], source: str, screen: ScreenOptions) -> str:
    rows, ettr = answer["incidents"], answer["ettr"]
    text = "nothing failed" if not rows else f"{len(rows)} failure{'s' if len(rows) > 1 else ''}"
    share = f" · ETTR {format_fraction(ettr)}" if ettr is not None else ""
    if answer["ettr_simulated"] is not None:
        share += f" (simulated with the same failures {format_fraction(answer['ettr_simulated'])}, "
        share += f"closed form {format_fraction(answer['ettr_closed_form'])})"
    parts: list[Any] = [Text(f"headway fault incidents   {source}"), Text(f"{text}{share}\n")]
    for row in rows:
        blamed = row["suspects"]
        who = ", ".join(f"rank {rank}" for rank in blamed["ranks"]) or "nobody in particular"
        parts.append(Text(f"{row['number'] + 1}  attempt {row['attempt']}, step {row['step']}: {row['class']}, {who}"))
        parts += [_lines(_facts(row)), Text("")]
    return draw(parts, **screen)


def _facts(row: dict[str, Any]) -> list[tuple[str, str]]:
    phases = " · ".join(f"{name} {format_seconds(seconds)}" for name, seconds in row["phases_s"].items())
    start = "warm" if row["warm"] else f"cold: {row['cold_reason']}" if row["cold_reason"] else "cold"
    facts = [("seen", row["evidence"]), ("action", f"{row['action']}: {row['reason']}"), ("phases", phases)]
    if row["action"] == REROUTE and row["first_step_ns"] is not None:
        facts.append(("cost", f"{format_seconds(row['downtime_s'])} from detection until the other ranks went on"))
    elif row["first_step_ns"] is not None:
        lost = "" if row["lost_steps"] is None else f", {row['lost_steps']} steps done again"
        facts += [("start", start), ("state", f"from {row['restored']}{lost}")]
        facts.append(("cost", f"{format_seconds(row['downtime_s'])} from detection to the first step of all ranks"))
    return [(name, value) for name, value in facts if value]


def plan(
    *, mtbf_s: float, restart_s: float, save_s: float, interval_s: float | None = None, hosts: int | None = None,
    p_daily: float | None = None, mesh: str | None = None, ranks_per_host: int | None = None, json: AsJson = False,
) -> int:  # fmt: skip
    """Compute how often to save, what ETTR to expect, how many hosts to keep in reserve, and who holds whose copy.

    Example: `headway fault plan --mtbf-s 11124 --restart-s 600 --save-s 10 --hosts 512 --p-daily 0.0012`

    Args:
      mtbf_s: Mean seconds between failures of the job.
      restart_s: Seconds from a failure to the first step after it.
      save_s: Seconds for which a save blocks training.
      interval_s: Seconds of work between saves; the best ones by default.
      hosts: Hosts of the job, for the number in reserve.
      p_daily: Chance that a host fails on a day.
      mesh: The parallel axes and their sizes, the fastest-varying first: tp=8,pp=4,dp=16.
      ranks_per_host: Ranks on a host, for the peers that hold copies.
    """
    found = prepare(
        mtbf_s=mtbf_s, restart_s=restart_s, save_s=save_s, interval_s=interval_s, hosts=hosts, p_daily=p_daily,
        mesh=None if mesh is None else mesh_of(mesh), ranks_per_host=ranks_per_host,
    )  # fmt: skip
    answer = {"schema": "headway.fault-plan/1", **found.to_json()}
    return emit(answer, lambda screen: draw([_lines(_plan_facts(found))], **screen), as_json=json)


def _plan_facts(found: Preparation) -> list[tuple[str, str]]:
    facts = [
        ("save every", format_seconds(found.interval_s)),
        ("ETTR", f"{format_fraction(found.ettr)} (first order {format_fraction(found.ettr_first_order)})"),
    ]
    if found.standby_hosts is not None:
        facts.append(("in reserve", f"{plural(found.standby_hosts, 'host')}: enough on 99 days of 100"))
    if found.backup_peer is not None:
        first = ", ".join(f"{rank} -> {peer}" for rank, peer in enumerate(found.backup_peer[:8]))
        facts.append(("copies", f"{first}{' ...' if len(found.backup_peer) > 8 else ''} (all in --json)"))
    return facts


def _lines(facts: list[tuple[str, str]]) -> Table:
    table = grid("left", "fold")
    for name, value in facts:
        add_row(table, name, value)
    return table


def sim(scenario: Path, /, *, seed: int = 0, out: OutPath | None = None, json: AsJson = False) -> int:
    """Simulate a job on a fleet that fails: its ETTR, and where the rest went.

    Example: `headway fault sim fleet.toml --seed 1`

    Args:
      scenario: A TOML file: hosts, devices_per_host, days, mtbf_s or per_1000_host_days, [mix], [times].
      seed: Seed of the failures.
      out: Also write a page of the ETTR over time: -o page.html.
    """
    outcome = simulate(Scenario.read(scenario), seed)
    answer = {"schema": "headway.fault-sim/1", "simulated": True, **outcome.to_json()}
    if out is not None:
        end_s, ettr = np.array([(0.0, 1.0), *outcome.over_time]).T
        chart = _ettr_line(end_s, ettr)
        answer["page"] = write_page(out, picture_page(scenario.name, "ETTR over time, simulated", [chart]))
    facts = [
        ("ETTR", f"{format_fraction(outcome.ettr)}, simulated"),
        ("failures", f"{outcome.num_incidents}, the longest cost {format_seconds(outcome.longest_unproductive_s)}"),
        *((name, format_seconds(seconds)) for name, seconds in outcome.unproductive_s.items() if seconds),
    ]
    return emit(answer, lambda screen: draw([_lines(facts)], **screen), as_json=json)


def probe(*, nproc_per_node: str | None = None, timeout_s: float = 60.0, json: AsJson = False) -> int:
    """Train a tiny fixed model on every rank of this host; exit 3 when one fails, or ends with other bits than most.

    Example: `headway fault probe --nproc-per-node 4`

    Args:
      nproc_per_node: Ranks: a number, auto, cpu or gpu; one per device by default, two where there is none.
      timeout_s: Seconds after which a rank that has not answered has failed.
    """
    found = check(nproc_per_node, timeout_s=timeout_s)
    answer: dict[str, Any] = {
        "schema": "headway.fault-probe/1", "ranks": len(found.digests) + len(found.failed), "equal": not found.odd,
        "odd": found.odd, "digests": {str(rank): digest for rank, digest in found.digests.items()},
        "failed": {str(rank): why for rank, why in found.failed.items()}, "seconds": found.seconds,
    }  # fmt: skip
    emit(answer, lambda screen: draw([Text(line) for line in _self_check_lines(found)], **screen), as_json=json)
    return 3 if found.odd else 0


def _self_check_lines(found: SelfCheckResult) -> list[str]:
    ranks = len(found.digests) + len(found.failed)
    if not found.odd:
        return [f"all {ranks} ranks end with the same bits ({format_seconds(found.seconds)})"]
    lines = [f"{len(found.odd)} of {ranks} ranks are suspected"]
    lines += [f"rank {rank}: {why}" for rank, why in found.failed.items()]
    odd = {rank: found.digests[rank] for rank in found.odd if rank in found.digests}
    return lines + [f"rank {rank}: other bits than most ({digest})" for rank, digest in odd.items()]


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
    # Where hosts run ahead of devices their places say little; what the ranks' queues held does, if they were asked:
    # the newest dump of each rank that the hang watches of a run's hosts collected in RUN/hang/<n>/.
    newest: dict[str, Path] = {}
    if report is not None and report.ahead:
        dumps = sources[0].parent.glob("*/r*.flight.json")
        newest = {path.name: path for path in sorted(dumps, key=lambda path: int(path.parent.name))}
    if report is None or newest:
        found = of_dumps(Trace.open([path for _, path in sorted(newest.items())] or list(sources)), mesh)
    else:
        found = of_watch(report, mesh)
    return localise(found.reports, found.mesh, groups=found.groups)


def watch_reports(run: Path) -> list[Path]:
    """Return the reports of a run's hang watch, oldest first."""
    files = (file for file in (run / "hang").glob("*.json") if file.stem.isdecimal())
    return sorted(files, key=lambda file: int(file.stem))


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
