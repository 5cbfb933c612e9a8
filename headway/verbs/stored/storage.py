"""`headway storage table|fit|fleet`: redundancy that follows the failure rates of disks.

`headway storage sim`: what it costs to keep non-volatile memory intact, simulated for each design.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.core.units import format_bytes, format_fraction, format_seconds, parse_bytes, plural
from headway.lab.failure_logs import Lifetimes, read_lifetimes, read_totals, renamed, windows
from headway.lab.fleet import DiskFleet
from headway.lab.fleet_plan import POLICIES
from headway.lab.fleet_sim import SimResult, made, read_clusters
from headway.lab.nvm_controller import NvmStats, simulate_nvm
from headway.lab.nvm_design import DESIGNS, MemorySystem
from headway.lab.nvm_traces import TRACES, read_trace
from headway.lab.placement import place, replay, saved
from headway.lab.schemes import DEFAULT, HOURS_PER_YEAR, SCHEMES, Scheme, bounds_afr, mttdl_hours
from headway.report.paper import ScreenOptions, add_row, draw, headed, paragraph, uncut
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import GivenPath, Size

SHOWN_TRANSITIONS = 12
"""Rows of transitions on a screen; `--json` holds all."""


def table(*, afr: float = 0.02, default_afr: float = DEFAULT[2], mttr_hours: float = 24.0, json: AsJson = False) -> int:
    """List the schemes of redundancy: the failure rate each tolerates, its space, how long data lives.

    A scheme tolerates the AFR (failures per disk and year) up to which it
    keeps the data as safe as 6-of-9 does at its own highest AFR, and
    rebuilds with as many bytes read.

    Example: `headway storage table --afr 0.015`

    Args:
      afr: AFR at which the mean time to data loss is shown, a fraction.
      default_afr: AFR that 6-of-9 is trusted with, a fraction.
      mttr_hours: Hours of one repair.
    """
    for name, value in {"--afr": afr, "--default-afr": default_afr}.items():
        if not 0 < value <= 1:
            text = "it must be a fraction above 0, at most 1. Pass 0.02 for 2 % of disks a year."
            raise InputError(f"{name} is {value:g}; {text}")
    if not 0 < mttr_hours < math.inf:
        raise InputError(f"--mttr-hours is {mttr_hours:g}; a repair takes more than 0 hours. Pass 24 for a day.")
    k0, n0, _ = DEFAULT
    default = (k0, n0, default_afr)
    rows = [_scheme_row(scheme, afr, default, mttr_hours) for scheme in SCHEMES.values()]
    answer = {
        "schema": "headway.storage.table/1", "default": f"{k0}-of-{n0}", "default_afr": default_afr, "afr": afr,
        "mttr_hours": mttr_hours, "schemes": rows,
    }  # fmt: skip
    return emit(answer, lambda screen: _table_screen(answer, screen), as_json=json)


def _scheme_row(scheme: Scheme, afr: float, default: tuple[int, int, float], mttr_h: float) -> dict[str, Any]:
    bounds = bounds_afr(scheme.k, scheme.n, default=default, mttr_h=mttr_h)
    return {
        "scheme": scheme.name, "k": scheme.k, "n": scheme.n, "tolerated_afr": min(bounds.values()),
        "bound_by": min(bounds, key=lambda name: bounds[name]), "overhead": scheme.overhead,
        "saving": scheme.saving(Scheme(*default[:2])),
        "mttdl_years": mttdl_hours(scheme.k, scheme.n, afr / HOURS_PER_YEAR, 1 / mttr_h) / HOURS_PER_YEAR,
    }  # fmt: skip


def _table_screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    titles = "scheme", "tolerated AFR", "space", "saves", "years to loss", "bound by"
    rows = headed(*titles, align="left right right right right left")
    for row in answer["schemes"]:
        enough = row["tolerated_afr"] >= answer["afr"]
        add_row(
            rows, row["scheme"], format_fraction(row["tolerated_afr"]), f"{row['overhead']:.3f}",
            format_fraction(row["saving"]), f"{row['mttdl_years']:.1e}", row["bound_by"], style="" if enough else "dim",
        )  # fmt: skip
    words = (
        f"Years to loss: mean time of one stripe at an AFR of {format_fraction(answer['afr'])}, "
        f"{answer['mttr_hours']:g} hours a repair. {answer['default']} is trusted with "
        f"{format_fraction(answer['default_afr'])}; dim: not enough for that AFR."
    )
    return draw([uncut(rows), "", paragraph(words, style="dim")], **screen)


def fit(
    *logs: Path, policy: str = "pacemaker", ahead_days: float = 90.0, same: tuple[str, ...] = (), json: AsJson = False
) -> int:
    """Learn failure rates from logs of disks, and name the scheme that fits each model now.

    Give two or more logs of totals (columns model, size, n_unique,
    drive_days, failed; the oldest first), or one log with a row per drive
    (model, capacity_bytes, min_date, max_date, first_fail, and serial_number,
    by which renamed models are recognised), through which a fleet then lives
    day by day. A model with too few disks stays under the default scheme.

    Example: `headway storage fit 2021-10.csv 2021-11.csv 2022-09.csv`

    Args:
      logs: CSV files, the oldest first.
      policy: pacemaker, reactive, instant or static.
      ahead_days: Days for which the schemes should hold.
      same: OLD=NEW: a model that was renamed between the logs, or in a log of drives; may be given several times.
    """
    chosen = pick(POLICIES, policy, "policy")
    if not logs:
        raise InputError("no log was given; give CSV files of totals, the oldest first, or one with a row per drive.")
    names = dict(_pair(text) for text in same)
    if len(logs) == 1:
        answer = _lived(read_lifetimes(logs[0], names), policy)
    else:
        totals = [renamed(read_totals(path), names) for path in logs]
        spans = [windows(older, newer) for older, newer in itertools.pairwise(totals)]
        found = place(spans, chosen, ahead_days=ahead_days)
        answer = {
            "windows_days": [span[0].days if span else 0.0 for span in spans],
            "models": [placement.to_json() for placement in sorted(found, key=lambda p: -p.num_disks)],
            "saving": saved(found),
        }
    answer = {"schema": "headway.storage.fit/1", "logs": [str(path) for path in logs], "policy": policy,
              "confidence": chosen.confidence, **answer}  # fmt: skip
    return emit(answer, lambda screen: _fit_screen(answer, screen), as_json=json)


def _pair(text: str) -> tuple[str, str]:
    """Return (old name, new name) of OLD=NEW."""
    old, _, new = text.partition("=")
    if not old or not new:
        raise InputError(f"--same is {text!r}; write OLD=NEW, such as --same 'hitachi x=hgst x'.")
    return old, new


def _lived(log: Lifetimes, policy: str) -> dict[str, Any]:
    """Return what a fleet made of a log of single drives."""
    result = replay(log, POLICIES[policy])
    return {
        "days": log.num_days,
        "saving": result.savings,
        "mean_io": float(result.io_frac.mean()),
        "peak_io": float(result.io_frac.max()),
        "lived": [
            {
                "model": one.model, "scheme": one.scheme, "disk_days": one.disk_days, "failures": one.failures,
                "afr": 365.0 * one.failures / one.disk_days, "tolerated": one.tolerated, "exceeded": one.exceeded,
            }
            for one in sorted(result.lived, key=lambda one: -one.disk_days)
        ],
        "transitions": [change.to_json() for change in result.transitions],
    }  # fmt: skip


def _fit_screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    """Return a row per model, or per model and scheme that a fleet lived under."""
    if "lived" in answer:
        rows = headed("model", "scheme", "disk-days", "AFR", "tolerated", align="left left right right right")
        for row in [one for one in answer["lived"] if one["disk_days"] >= 10_000]:
            add_row(
                rows, row["model"], row["scheme"], f"{row['disk_days']:,.0f}", format_fraction(row["afr"], 2),
                format_fraction(row["tolerated"]), style="bold red" if row["exceeded"] else "",
            )  # fmt: skip
        words = (
            f"{plural(answer['days'], 'day')}, {plural(len(answer['transitions']), 'transition')}: mean IO "
            f"{format_fraction(answer['mean_io'], 2)}, peak {format_fraction(answer['peak_io'])} of what the disks can "
            "move. Rows below 10,000 disk-days are left out."
        )
    else:
        rows = headed("model", "disks", "AFR", "at most", "scheme", "", align="left right right right left left")
        known = [row for row in answer["models"] if row["reason"] == "known"]
        for row in known:
            add_row(
                rows, row["model"], f"{row['num_disks']:,.0f}", format_fraction(row["afr"][1], 2),
                format_fraction(row["afr"][2], 2), row["scheme"], f"tolerates {format_fraction(row['tolerated'])}",
            )  # fmt: skip
        few = len(answer["models"]) - len(known)
        verbs = "has too few disks to be judged and stays" if few == 1 else "have too few disks to be judged and stay"
        words = (
            f"{plural(few, 'model')} {verbs} under the default scheme. 'At most' is the upper end of an interval of "
            f"{format_fraction(answer['confidence'], 0)} confidence: "
            f"{format_fraction((1 - answer['confidence']) / 2, 0)} of the models may lie above it."
        )
    verdict = f"  {format_fraction(answer['saving'])} of the space is saved."
    return draw([uncut(rows), "", paragraph(words, style="dim"), Text(verdict, style="bold")], **screen)


def fleet(
    *, clusters: GivenPath | None = None, synthetic: str | None = None, days: int = 1095, seed: int = 0,
    policy: tuple[str, ...] = ("pacemaker", "instant", "reactive"), json: AsJson = False,
) -> int:  # fmt: skip
    """Simulate years of a fleet of disks whose schemes follow its failure rates, beside other policies.

    Failures are drawn from each model's true AFR; the planner sees only
    them. `pacemaker` plans ahead under a cap on IO; `instant` is the same
    with infinite IO; `reactive` moves when it is late, by re-encoding;
    `static` never moves.

    Example: `headway storage fleet --synthetic mixed --days 1095`

    Args:
      clusters:
        TOML file with a table [[dgroup]] per model: name, arrivals = [[day, disks], ...], afr = [[age, AFR], ...],
        capacity_bytes, disk_bytes_per_s, retire_days.
      synthetic: A made-up fleet: trickle, step, mixed or large.
      days: Days to simulate.
      seed: Of the made-up fleet and of the failures.
      policy: Policies to compare; the plan that is shown is the first one's.
    """
    if (clusters is None) == (synthetic is None) or not policy:
        raise InputError("give either --clusters FILE.toml or --synthetic NAME, and at least one --policy.")
    models = made(synthetic, seed=seed) if synthetic is not None else read_clusters(Path(clusters or ""))
    results = {name: DiskFleet(name).simulate(models, days, seed=seed) for name in dict.fromkeys(policy)}
    first = results[policy[0]]
    kinds = [
        {
            "name": model.name, "num_disks": model.num_disks, "deployed": "step" if model.step_days() else "trickle",
            "capacity_bytes": model.capacity_bytes,
        }
        for model in models
    ]  # fmt: skip
    answer = {
        "schema": "headway.storage.disks.fleet/1", "simulated": True,
        "fleet": synthetic if synthetic is not None else str(clusters), "seed": seed, "days": days,
        "num_disks": sum(model.num_disks for model in models), "models": kinds,
        "policies": {name: result.to_json() for name, result in results.items()},
        "of_instant": first.savings / results["instant"].savings
        if "instant" in results and results["instant"].savings > 0 else None,
        "io_frac": first.io_frac.tolist(),
        "savings_by_day": first.savings_by_day.tolist(),
        "transitions": [change.to_json() for change in first.transitions],
    }  # fmt: skip
    return emit(answer, lambda screen: _fleet_screen(answer, first, screen), as_json=json)


def _fleet_screen(answer: Mapping[str, Any], first: SimResult, screen: ScreenOptions) -> str:
    rows = headed("policy", "saves", "mean IO", "peak IO", "under-protected disk-days")
    for name, row in answer["policies"].items():
        add_row(
            rows, name, format_fraction(row["savings"]), format_fraction(row["mean_io"], 2),
            format_fraction(row["peak_io"]), f"{row['under_protected_disk_days']:,.0f}",
            style="bold" if name == next(iter(answer["policies"])) else "",
        )  # fmt: skip
    changes = sorted(first.transitions, key=lambda change: -change.io_bytes)[:SHOWN_TRANSITIONS]
    plan = headed("day", "change", "to", "disks", "IO", "models", align="right left left right right left")
    for change in sorted(changes, key=lambda change: change.day):
        add_row(
            plan, f"{change.day}", f"{change.kind}, {change.method}", f"{change.source} > {change.target}",
            f"{change.num_disks:,}", format_bytes(change.io_bytes), ", ".join(change.dgroups),
        )  # fmt: skip
    words = (
        f"Simulated: {plural(answer['num_disks'], 'disk')} of {plural(len(answer['models']), 'model')}, "
        f"{plural(answer['days'], 'day')}, seed {answer['seed']}. The bound, each disk always under its best scheme, "
        f"saves {format_fraction(first.oracle_savings)}. "
    )
    count = len(first.transitions)
    many = f"{'' if count <= SHOWN_TRANSITIONS else 'the largest of '}{plural(count, 'transition')}"
    words += f"Below: {many}." if count else "No scheme changed."
    below: list[Any] = ["", uncut(plan)] if changes else []
    return draw([uncut(rows), "", paragraph(words, style="dim"), *below], **screen)


MOST_ROWS = 5_000_000
"""Longer traces take minutes in every design."""


def sim(
    trace: GivenPath | None = None, *, made: str = "set", requests: int = 6000, seed: int = 0,
    designs: str = ",".join(DESIGNS), mapped: Size = "256MiB", json: AsJson = False,
) -> int:  # fmt: skip
    """Simulate the cost of checksums and parity over memory that is mapped and written by stores.

    Plays a trace through caches, a memory controller and NVM modules, once
    per design: no redundancy, the controller part by part, and software at the
    end of each transaction. All figures are simulated.

    Example: `headway storage sim --made tree --requests 12000`

    Args:
      trace: A text file: lines `R ADDRESS`, `W ADDRESS`, `E NANOSECONDS` (end of a request).
      made: Without a file: set, get, stream or tree.
      requests: Requests of the made trace.
      seed: Seed of the made trace.
      designs: Names, separated by commas.
      mapped: Bytes that are mapped, from address 0 on.
    """
    memory = MemorySystem(mapped_bytes=parse_bytes(mapped))
    chosen = {name: pick(DESIGNS, name.strip(), "design") for name in designs.split(",")}
    make = pick(TRACES, made, "trace")
    if seed < 0:
        raise InputError(f"the seed is {seed}; pass a whole number >= 0.")
    if requests > MOST_ROWS:
        raise InputError(f"{requests} requests; at most {MOST_ROWS} are simulated. Pass fewer.")
    rows = make(requests, seed) if trace is None else read_trace(trace, memory.mapped_bytes)
    if len(rows) > MOST_ROWS:
        raise InputError(f"the trace has {len(rows)} rows; at most {MOST_ROWS} are simulated. Take a part of it.")
    plain = simulate_nvm(rows, replace(DESIGNS["none"], memory=memory))
    found = {name: simulate_nvm(rows, replace(design, memory=memory)) for name, design in chosen.items()}
    answer = {
        "schema": "headway.storage.sim/1", "simulated": True, "trace": made if trace is None else str(trace),
        "num_accesses": plain.num_accesses, "designs": [_row(name, stats, plain) for name, stats in found.items()],
    }  # fmt: skip
    return emit(answer, lambda screen: _screen(answer, screen), as_json=json)


def _row(name: str, stats: NvmStats, plain: NvmStats) -> dict[str, Any]:
    counts = {key: getattr(stats, key) for key in COUNTS}
    return {"design": name, **counts, "slowdown": stats.slowdown(plain), "energy_j": stats.energy_j}


COUNTS = (
    "data_reads", "data_writes", "redundancy_reads", "redundancy_writes", "amplification", "worst_read_amplification",
    "time_s",
)  # fmt: skip
"""What an answer has of `NvmStats`."""


def _screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    rows = headed("design", "NVM for data", "for redundancy", "x", "worst read", "time", "slower")
    for row in answer["designs"]:
        add_row(
            rows, row["design"], f"{row['data_reads'] + row['data_writes']:,}",
            f"{row['redundancy_reads'] + row['redundancy_writes']:,}", f"{row['amplification']:.2f}",
            f"{row['worst_read_amplification']}", format_seconds(row["time_s"]),
            format_fraction(row["slowdown"], signed=True),
        )  # fmt: skip
    head = Text(f"  {answer['trace']}: {answer['num_accesses']:,} accesses, simulated")
    words = (
        "NVM accesses are lines of 64 bytes. x: all of them per one for data; worst read: lines read for one that "
        "missed; slower: than without redundancy. Nothing here was measured on hardware."
    )
    return draw([head, "", uncut(rows), "", paragraph(words, style="dim")], **screen)
