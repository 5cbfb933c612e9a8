"""`headway cluster sim|compare`: queues of training jobs under scheduling policies, simulated."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.text import Text

from headway.cluster.model import Cluster, Resize
from headway.cluster.policies import AT_ONCE, POLICIES, SERVED
from headway.cluster.queue.compare import (
    DEFAULT_POLICIES,
    FIDELITY,
    PolicyComparison,
    answer,
    compare_policies,
    compare_with_promise,
    simulate_workload,
)
from headway.cluster.queue.engine import simulate
from headway.cluster.queue.logs import read_queue
from headway.cluster.queue.recorded_rates import jobs_of, log_rates
from headway.cluster.service.server import log_of
from headway.cluster.service.state import ServiceState, outcome_of
from headway.cluster.service.store import EventLog
from headway.core.errors import InputError
from headway.core.files.safe_files import MOST
from headway.core.tables import pick
from headway.core.units import format_fraction, plural
from headway.report.page.frames import queue_chart
from headway.report.page.plots import page_around, write_page
from headway.report.page.sections import section
from headway.report.paper import ScreenOptions, add_row, draw, headed, next_of, paragraph, uncut
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import GivenPath, OutPath, run_at

RESTART_S = 60.0
"""What a move costs a job where nothing measured it: start a process, import torch, restore."""


def sim(
    *, trace: str, policy: str, devices: str = "", data: GivenPath | None = None, jobs_per_hour: float = 4.0,
    num_jobs: int = 0, seed: int = 0, window: str = "", rules: str = "headway", usd_per_h: str = "", speed: str = "",
    round_s: float = 0.0, reset_s: float = 1920.0, load: float = 1.0, resize: str = "", runs: str = "",
    explain: bool = False, json: AsJson = False,
) -> int:  # fmt: skip
    """Simulate a queue under one policy: completion times, makespan, fairness, by gang size.

    Generated traces are Gavel's jobs of any seed; their rates are measured
    ones, read from `cluster/gavel/throughputs.parquet` in the data folder.
    All figures are simulated.

    Example: `headway cluster sim --trace gavel:multi --data shared --devices v100=36,p100=36,k80=36 --policy las`

    Args:
      trace:
        gavel:single, gavel:multi, gavel:static, a .trace file of Gavel's, a log as `cluster compare` reads, or
        pollux:W: one of the six workloads that Pollux was simulated with, on hosts of 4 devices.
      devices: Type=count, separated by commas; pollux:W has t4=64 where nothing is given.
      policy: A name; a wrong one lists them all.
      data:
        Folder with cluster/gavel/throughputs.parquet, or cluster/pollux; without it, the current folder is searched.
      jobs_per_hour: Rate of arrivals of a generated trace.
      num_jobs: Jobs of a generated trace; 0: those of the window and 3,000 more, or 100.
      seed: Seed of the generator and of random choices.
      window: First:last job (excluded) that the figures are means of; the simulation ends when they are done.
      rules: headway: what a job is owed is carried over decisions; gavel: the published round mechanism.
      usd_per_h: Dollars per device and hour, type=price, separated by commas.
      speed: Relative speeds of device types for logs, type=speed, separated by commas.
      round_s: Seconds of a round; 0: 360, or 60 for pollux:W.
      reset_s: Least seconds between two decisions.
      load: Load of a workload of pollux:W, 1.0 or 0.5.
      resize: Devices that leave or come back while it runs, seconds:type=count, separated by commas: 36000:v100=4.
      runs:
        Run folders that measured jobs of a log, NAME=FOLDER, separated by commas; NAME is the job's model, and may be
        left out where it is the script's. A CSV may then have num_steps in place of run_s.
      explain: Print the prices of devices at each decision, for policies that have prices (hadar).
    """
    chosen, span = pick(POLICIES, policy, "policy"), _window(window)
    if trace.startswith("pollux:"):
        if resize or runs:
            raise InputError("--resize and --runs are for jobs of fixed size; leave them out with --trace pollux:W.")
        outcome, published_s = simulate_workload(trace, policy, devices, data, load, span, round_s or 60.0, seed)
        result = {
            "schema": "headway.cluster-sim/1", "simulated": True, "trace": trace, "rules": "pollux", "policy": policy,
            "published_mean_jct_s": published_s, **outcome.figures(),
        }  # fmt: skip
        return emit(result, lambda screen: _sim_screen(result, screen), as_json=json)
    if not devices:
        raise InputError("--devices is empty; pass type=count, such as --devices v100=36,k80=36.")
    cluster, round_s = Cluster.parse(devices, usd_per_h), round_s or 360.0
    jobs, rates, measured = jobs_of(trace, cluster, data, jobs_per_hour, num_jobs, seed, span, speed, runs, run_at)
    found = simulate(
        jobs, cluster, chosen, rates=rates, seed=seed, window=span, round_s=round_s, reset_s=reset_s, rules=rules,
        resizes=Resize.parse(resize),
    )  # fmt: skip
    result = {
        "schema": "headway.cluster-sim/1", "simulated": True, "trace": trace, "rules": rules, "policy": policy,
        **found.figures(),
    }  # fmt: skip
    if measured is not None:
        result["rates"] = measured.rows()
    if explain:
        result["prices"] = found.price_rows()
    return emit(result, lambda screen: _sim_screen(result, screen), as_json=json)


def compare(
    *, jobs: GivenPath | None = None, devices: str = "", log: GivenPath | None = None,
    policies: str = ",".join(DEFAULT_POLICIES), usd_per_h: str = "", speed: str = "", virtual_cluster: str = "",
    runs: str = "", seed: int = 0, round_s: float = 360.0, restart_s: float | None = None, out: OutPath | None = None,
    json: AsJson = False,
) -> int:  # fmt: skip
    """Measure what a recorded queue suffered, and simulate what each policy would have made of it.

    The log is first played again as it was. Where that misses the observed
    mean completion time by more than 5 %, the named devices do not explain the
    queue, and nothing is ranked (exit 3). Policies are simulated. Of a service's own log (`--log`) it says, job by job,
    what the policy promised and what came true.

    Example: `headway cluster compare --jobs sacct.json --devices a100=16,v100=16`

    Args:
      jobs: What `sacct --json` (.json) or `sacct -P` printed, a CSV, or Philly's jobs (.parquet).
      devices: Type=count, separated by commas: what the jobs ran on.
      log: Folder of a service (`headway cluster serve`), in place of --jobs and --devices.
      policies: Names, separated by commas.
      usd_per_h: Dollars per device and hour, type=price, separated by commas.
      speed: Relative speeds of device types, type=speed; without it the makers' peak rates of 16-bit arithmetic.
      virtual_cluster: One virtual cluster of Philly's.
      runs:
        Run folders that measured some of the jobs, NAME=FOLDER, separated by commas: how many times as fast such a
        job is on another type follows from them. NAME is the job's name (model), and may be left out where it is
        the script's.
      seed: Seed of random choices.
      round_s: Seconds of a round.
      restart_s:
        Seconds that a job loses each time it is moved or resumed; without it, what the starts of --runs took, else 60.
      out: Also write a page of the queue over time, as observed and under each policy: -o page.html.
    """
    names = [name.strip() for name in policies.split(",") if name.strip()]
    for name in names or [""]:
        pick(POLICIES, name, "policy")
    if log is not None:
        if jobs is not None or devices:
            raise InputError("--log holds jobs and devices itself. Leave --jobs and --devices out.")
        if out is not None or restart_s is not None:
            raise InputError("--restart-s and --out are for a queue of --jobs. Leave them out with --log.")
        logged = _compare_log(log, names)
        return emit(logged, lambda screen: _compare_screen(logged, screen), as_json=json)
    if jobs is None or not devices:
        raise InputError("there is no queue to compare on. Pass --jobs FILE --devices type=count, or --log FOLDER.")
    cluster = Cluster.parse(devices, usd_per_h)
    queue = read_queue(jobs, virtual_cluster)
    rates, measured, starts_s = log_rates(queue, cluster, speed, runs, run_at)
    if restart_s is not None:
        lost_s, source = restart_s, "as given"
    else:
        lost_s = median(starts_s) if starts_s else RESTART_S
        source = "median start of --runs" if starts_s else "assumed; see --restart-s"
    if not 0 <= lost_s < MOST:
        raise InputError(f"--restart-s is {lost_s:g}; give seconds >= 0.")
    queue = replace(queue, jobs=replace(queue.jobs, restart_s=np.full(len(queue.jobs), lost_s)))
    compared = compare_policies(queue, cluster, rates, names, seed=seed, round_s=round_s)
    result = {**answer(compared), "skipped": queue.skipped, "restart_s": lost_s, "restart_source": source}
    result["serve"] = _serve_command(compared, devices, round_s)
    if measured is not None:
        result["rates"] = measured.rows()
    if out is not None:
        result["page"] = write_page(out, _queue_page(jobs.name, compared))
    emit(result, lambda screen: _compare_screen(result, screen), as_json=json)
    return 3 if result["refused"] else 0


def _serve_command(compared: PolicyComparison, devices: str, round_s: float) -> str:
    """Return what to type for the best policy that a service can go by; '' where the observed queue is as good."""
    mean_s = {name: float(np.nanmean(compared.policies[name].jct_s)) for name in compared.policies if name in SERVED}
    best = min(mean_s, key=lambda name: mean_s[name], default="")
    if not best or (compared.observed and mean_s[best] >= compared.observed.jct_s.mean()):
        return ""
    options = ["--slots", devices, "--policy", best, "--round-s", f"{round_s:g}"]
    return shlex.join(["headway", "cluster", "serve", *options])


BINS = 500
"""Moments in the picture of a queue."""


def _queue_page(name: str, compared: PolicyComparison) -> str:
    """Return a page with a chart over time for each way in which a queue went, all to one scale."""
    ways = {"observed": compared.observed} if compared.observed else {}
    ways |= compared.policies
    end_s = np.linspace(0, max(np.nanmax(way.finish_s) for way in ways.values()), BINS + 1)[1:]
    counts = {title: way.over_time(end_s) for title, way in ways.items()}
    top = max(float(submitted.max()) for submitted, _ in counts.values())
    charts = "".join(
        queue_chart(
            f"{title}: jobs not yet started (blue), started and not done (grey); up to {top:,.0f}. "
            f"Mean completion time {_hours(float(np.nanmean(ways[title].jct_s)))} h",
            end_s.tolist(), submitted.tolist(), waiting.tolist(), top,
        )
        for title, (submitted, waiting) in counts.items()
    )  # fmt: skip
    return page_around(name, f"{name}: the queue over time", section("queue", "Queue over time", "", charts))


def _compare_log(folder: Path, names: list[str]) -> Mapping[str, object]:
    """Return the comparison of a service's log: observed, as its policy promised, and under other policies."""
    with EventLog(log_of(folder), write=False) as log:
        state = ServiceState.replay(log.read())
    observed, rates, ended = outcome_of(state)
    timing = state.engine.timing
    compared = compare_with_promise(
        observed, rates, state.policy, names, round_s=timing.round_s, reset_s=timing.reset_s
    )
    promised = compared.replayed
    assert promised is not None, "it is always played again"
    pairs = zip(ended, promised.jct_s.tolist(), observed.jct_s.tolist(), strict=True)
    rows = [{"id": job.id, "name": job.name, "promised_s": first, "came_true_s": then} for job, first, then in pairs]
    # The difference is shown, and ranks nothing out: what moves cost is part of the work that all policies are given.
    more = {"refused": None, "policy": state.policy, "jobs": rows, "skipped": len(state.jobs) - len(ended)}
    return {**answer(compared), **more}


def _window(text: str) -> tuple[int, int] | None:
    """Read "4000:5000"."""
    first, colon, last = text.partition(":")
    if not text:
        return None
    if not (colon and first.isdigit() and last.isdigit()):
        raise InputError(f"--window is {text!r}; write first:last, such as 4000:5000.")
    return int(first), int(last)


def _hours(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds / 3600:.2f}"


def _row(name: str, figures: Mapping[str, Any]) -> list[str]:
    """Return the cells of one way in which a queue went."""
    rho, usd = figures["mean_rho"], figures["usd"]
    return [
        name, *(_hours(figures[key]) for key in ("mean_jct_s", "p99_jct_s", "max_jct_s", "makespan_s")),
        "-" if rho is None else f"{rho:.2f}", format_fraction(figures["used_fraction"]),
        "-" if usd is None else f"{usd:,.0f}", f"{figures['moves']:,}",
    ]  # fmt: skip


HEAD = ("", "mean JCT, h", "p99", "worst", "makespan", "rho", "in use", "USD", "moves")


def _gangs(title: str, figures: Mapping[str, Any]) -> Any:
    rows = headed(title, "jobs", "device-hours", "mean JCT, h", "slowdown")
    for size, row in figures["by_scale"].items():
        jobs, hours = f"{row['num_jobs']:,}", f"{row['device_hours']:,.0f}"
        times = _hours(row["mean_jct_s"]), f"{row['mean_slowdown']:.2f}"
        add_row(rows, plural(int(size), "device"), jobs, hours, *times)
    return uncut(rows)


def _measured(rows: list[dict[str, Any]]) -> list[Any]:
    """Return a row per kind of job and type, where runs measured some; otherwise nothing."""
    if not rows:
        return []
    table = headed("rates", "devices", "type", "steps/s", "", align="left right left right left")
    for row in rows:
        cells = row["model"], f"{row['scale']}", row["device_type"], f"{row['steps_per_s']:.4g}", row["source"]
        add_row(table, *cells)
    return ["", uncut(table)]


WORDS = (
    "JCT: completion less arrival. rho: finish-time fairness (Themis), that time over the time on 1 / N of the "
    "cluster, N jobs being in the queue on average; slowdown: over the time alone on the fastest type. Policies are "
    "simulated."
)


def _sim_screen(result: Mapping[str, Any], screen: ScreenOptions) -> str:
    rows = headed(*HEAD)
    add_row(rows, *_row(result["policy"], result))
    notes = [paragraph(note) for note in result["notes"][:8]]
    head = Text(f"  {result['trace']}: {result['num_jobs']:,} jobs, rules {result['rules']}, simulated")
    if result.get("published_mean_jct_s"):
        own, published = result["mean_jct_s"], result["published_mean_jct_s"]
        notes.append(paragraph(f"Mean JCT {own:,.1f} s; published: {published:,.1f} s ({own / published - 1:+.1%})."))
    tables = ["", uncut(rows), "", _gangs("gang", result), *_measured(result.get("rates", []))]
    return draw([head, *tables, "", *notes, paragraph(WORDS, style="dim")], **screen)


def _compare_screen(result: Mapping[str, Any], screen: ScreenOptions) -> str:
    rows = headed(*HEAD)
    parts: list[Any] = []
    if result["observed"]:
        add_row(rows, *_row("observed", result["observed"]))
        title = "replayed as it was" if "policy" not in result else f"as {result['policy']} promised"
        add_row(rows, *_row(title, result["replayed"]))
    for figures in result["policies"]:
        add_row(rows, *_row(figures["policy"], figures), style="bold" if figures["policy"] == result["best"] else "")
    if result["observed"]:
        owners = headed("owner", "device-hours")
        for owner, hours in list(result["observed"]["device_hours_by_owner"].items())[:10]:
            add_row(owners, owner, f"{hours:,.1f}")
        parts = ["", _gangs("observed, by gang", result["observed"]), "", uncut(owners)]
    elif result["policies"]:
        parts = ["", _gangs("by gang", result["policies"][0])]
    parts += _measured(result.get("rates", []))
    parts += [paragraph(f"{row['policy']} is left out: {row['reason']}") for row in result["unfit"]]
    if "policy" in result:
        promises = headed("job", "", "promised, s", "came true, s", align="left left right right")
        for row in result["jobs"]:
            add_row(promises, row["id"], row["name"], f"{row['promised_s']:,.1f}", f"{row['came_true_s']:,.1f}")
        parts += ["", uncut(promises)]
    if "restart_s" in result:
        lost = f"{result['restart_s']:,.1f} s ({result['restart_source']})"
        parts.append(paragraph(f"A job that is moved or resumed loses {lost}."))
    if result["refused"]:
        verdict = f"No ranking: {result['refused']}, more than {format_fraction(FIDELITY)}. "
        verdict += "Check --devices: they do not explain this queue."
    elif result["observed"]:
        error = format_fraction(result["replay_error_fraction"], signed=True)
        nearest = min(result["policies"], key=lambda figures: abs(figures["against_observed_fraction"]))
        off = format_fraction(nearest["against_observed_fraction"], signed=True)
        verdict = (
            f"Replay error {error}. The queue ran most like {nearest['policy']} (mean JCT {off}). "
            f"Least mean JCT: {result['best']}."
        )
    else:
        verdict = "The log does not say when or where jobs started: no check by replay. "
        verdict += f"Least mean JCT: {result['best']}."
    if result["best"] and POLICIES[result["best"]] in AT_ONCE:
        verdict += " Slurm schedules so with SchedulerType=sched/backfill; a service needs no time limits."
    serve = next_of(result.get("serve", ""))
    return draw([uncut(rows), *parts, "", paragraph(verdict), *serve, "", paragraph(WORDS, style="dim")], **screen)
