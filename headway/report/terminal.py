"""The answer of `headway why` as terminal text, the first screen anybody sees; those of `trace align`, `comm plan`.

`render_why` takes the `headway.why/2` object and returns a string: one sentence, the ledger as bars, the ranked causes
with their fixes, the next command to type; `job_lines` what it says of a job of many ranks. The other verbs' screens
are in `screens.py`. Nothing is printed: the command prints. Times in seconds, shares in percent of devices x wall.

>>> why = {"devices": 2, "steps": 9, "wall_s": 10.0, "goodput": 0.9, "coverage": 1.0,
...        "ledger": {"useful": 18.0, "input": 2.0}, "causes": []}
>>> print(render_why(why, width=88).splitlines()[2].strip())
90.0 % of 2 devices x 10 s was useful work; no loss stands out.
>>> job_lines(Why.of({"mfu": {"mfu": 0.412, "hfu": 0.55, "flops_per_s_per_device": 1.28e14, "recompute": "full",
...                           "peak_flops_per_s": 3.12e14, "formula": "6 N", "device": "A100"}}))
['MFU 41.2 %, HFU 55.0 % with full recomputation: 128 TFLOP/s of 312 per A100; FLOPs: 6 N']
>>> job_lines(Why.of({"group_creation": {"groups": 3, "calls": 9, "seconds": 2.0}}))
['3 process groups were created in 9 calls: 2 s on the slowest rank']
>>> rank = {"rank": 1, "host": "b", "offset_ns": -900, "drift_ppm": 1.5, "residual_us": 0.25, "moved_us": 0.0}
>>> print(render_alignment({"ranks": [rank], "violations_before": 2, "violations": 0, "meetings": 9},
...                        width=69))
headway trace align
<BLANKLINE>
  9 collectives and messages matched. Ends before what they waited
  for: 2 before, 0 after.
<BLANKLINE>
  rank  host   offset     drift  residual  moved
     1  b     -900 ns  +1.5 ppm   0.25 us      -
>>> move = {"name": "buckets", "what": "2 -> 9", "step_s": 0.08, "remedy": "comm.bucket", "how": "DDP: ..."}
>>> answer = {"base_step_s": 0.1, "step_s": 0.08, "predicted_speedup": 1.25, "moves": [move], "ranks": 2, "note": ""}
>>> print(render_optimised(answer, plan_path="plan.json", width=60))
headway comm plan
<BLANKLINE>
  100 ms -> 80 ms per step on 2 ranks, 1.25x (predicted)
<BLANKLINE>
  80 ms  buckets  2 -> 9
                  by --apply, or by hand: DDP: ...
<BLANKLINE>
  Next  headway run --apply plan.json -- train.py
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Unpack

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway.core.units import (
    NS_PER_S,
    clean,
    count,
    device_seconds,
    finite,
    format_seconds,
    percent,
    plural,
    seconds,
    share,
    speedup,
)
from headway.ledger.buckets import UNSPLIT
from headway.report.answers import bucket_style, goodput_of, operation_lines
from headway.report.paper import (
    ScreenOptions,
    add_row,
    bar,
    command_line,
    draw,
    grid,
    headed,
    joined,
    next_of,
    paragraph,
    thin_bar,
    title,
)
from headway.report.screens import (
    verdict_lines,
    whole_amount,
)
from headway.why.answer import Json, StragglerRow, Why
from headway.why.verdict import WARNINGS, gain_words, is_win, lost_words, named_causes

SLOW_CREATION_S = 1.0
"""Creation of groups is told from here on, or when the job has several."""


def job_lines(why: Why) -> list[str]:
    """Return every line, in order: hang, machines, MFU, groups."""
    told: list[str] = []
    if why.hang:
        from headway.report.page.ranks import sentences

        told += [f"Hung: {line}" for line in sentences(why.hang)]
    if why.machines.slowdown:
        from headway.report.page.ranks import machine_lines

        told += [f"Machines: {line}" for line in machine_lines(why.machines)]
    return [*told, *mfu_lines(why), *operation_lines(why), *_creation(why)]


def mfu_lines(why: Why) -> list[str]:
    """Return MFU with what it rests on, or the rate alone and why there is no MFU."""
    entry = why.mfu
    if entry is None:
        return []
    rate, formula = entry.flops_per_s_per_device / 1e12, f"FLOPs: {clean(entry.formula)}"
    if entry.mfu is None:
        return [f"MFU is not known: {clean(entry.reason)}. {rate:.3g} TFLOP/s per device; {formula}"]
    again = clean(entry.recompute)
    hfu = f", HFU {percent(entry.hfu)} with {again} recomputation" if again != "none" else ""
    peak = f"{entry.peak_flops_per_s / 1e12:.4g} per {clean(entry.device)}"
    return [f"MFU {percent(entry.mfu)}{hfu}: {rate:.3g} TFLOP/s of {peak}; {formula}"]


def _creation(why: Why) -> list[str]:
    """Return what creating process groups cost, where it is worth a line."""
    entry = why.group_creation
    if entry is None or (entry.calls < 2 and entry.seconds < SLOW_CREATION_S):
        return []
    what = f"{plural(entry.groups, 'process group')} {'was' if entry.groups == 1 else 'were'} created"
    return [f"{what} in {plural(entry.calls, 'call')}: {seconds(entry.seconds)} on the slowest rank"]


MOST_CAUSES = 6
"""Causes told in full; the rest is named in one line."""

MOST_WORKERS = 5
"""Slowest workers named under an operation trace."""

MINOR_BUCKET = 0.01
"""Share of the device time below which a bucket's sub-lines are left to the report; failures are always told apart."""

BASIS_PHRASES: dict[str, str] = {
    "remainder": "time not otherwise explained",
    "sampled": "from sampled windows",
    "kernels": "from kernels",
}
"""How a bucket was obtained -> how that is said; anything else is said as it stands."""


def render_why(answer: Json, *, source: str = "", **screen: Unpack[ScreenOptions]) -> str:
    """Return the screen of a `headway.why/2` object; `source` is the run or trace as the user named it."""
    why, width, unicode = Why.of(answer), screen.get("width", 88), screen.get("unicode", True)
    steps = plural(why.steps, "step") if why.steps is not None else ""
    aside = joined([clean(source), plural(why.devices, "device"), steps, seconds(why.wall_s)])
    parts: list[RenderableType] = [title("headway why", aside, width=width), "", *verdict_lines(why)]
    if any(why.ledger.values()):
        parts += ["", *_ledger(why, width, unicode)]
    if why.straggler:
        parts += ["", *_straggler(why.straggler)]
    parts += _causes(why)
    lines = job_lines(why)
    if lines:
        parts += ["", Text("  The job", style="bold"), *(paragraph(line) for line in lines)]
    return draw([*parts, *next_of(why.verdict.command)], **screen)


def render_hints(answer: Json, *, reason: str, source: str = "", **screen: Unpack[ScreenOptions]) -> str:
    """Return the screen of `headway plan` where nothing can be predicted: why, and what to do about each cause."""
    why = Why.of(answer)
    parts: list[RenderableType] = [
        title("headway plan", clean(source), width=screen.get("width", 88)), "",
        paragraph(f"No predictions, and no plan: {clean(reason)}", style="bold"),
        *_causes(why), *next_of(why.verdict.command),
    ]  # fmt: skip
    return draw(parts, **screen)


def _ledger(why: Why, width: int, unicode: bool) -> list[RenderableType]:
    """Return the bar table: buckets that hold anything, sub-lines below them, bars to the scale of the largest."""
    total_s, ledger = why.total_device_s, why.ledger
    largest = max(ledger.values()) or 1.0
    bar_columns = max(8, width - 44)
    table = grid("left", "right", "right", "fill", gap=2)

    def line(name: str, amount: float, bucket: str, shape: Callable[..., str], dim: str = "") -> None:
        drawn = Text(shape(amount / largest, bar_columns, unicode=unicode), f"color({bucket_style(bucket).ansi})")
        part = percent(share(amount, total_s))
        add_row(table, Text(name, dim), Text(device_seconds(amount, largest), dim), Text(part, dim), drawn)

    for bucket, amount in ledger.items():
        if amount <= 0 and bucket != "unknown":
            continue
        line(bucket, amount, bucket, bar)
        for sub, part in _sub_lines(why, bucket).items():
            line(f"  {sub}", part, bucket, thin_bar, "dim")
    heading = Text.assemble("  ", ("Where ", "bold"), (whole_amount(total_s), "bold"), (" went", "bold"))
    return [heading, table, *_footnotes(why)]


def _sub_lines(why: Why, bucket: str) -> dict[str, float]:
    """Return sub-line -> device-seconds of one bucket, largest first; {} where they say no more than it."""
    prefix, total_s = f"{bucket}.", why.total_device_s
    rows = {name.removeprefix(prefix): value for name, value in why.sub.items() if name.startswith(prefix)}
    if sum(rows.values()) < MINOR_BUCKET * total_s and bucket != "restart":
        return {}
    kept = {name: value for name, value in rows.items() if value > 0.0005 * total_s}
    if len(kept) < 2 and not {f"{prefix}{name}" for name in kept} - UNSPLIT:
        return {}
    return dict(sorted(kept.items(), key=lambda row: -row[1]))


def _footnotes(why: Why) -> list[RenderableType]:
    """Return the line of ratios, and what is not measured directly."""
    fidelity = finite(why.fidelity)
    facts = [
        goodput_of(why) or "goodput unknown",
        f"covered {percent(why.coverage)}" if finite(why.coverage) is not None else "",
        f"replay within {percent(abs(fidelity - 1))}" if fidelity is not None else "",
    ]
    basis: dict[str, list[str]] = {}
    for bucket, how in why.basis.items():
        if why.ledger.get(bucket) and how not in ("measured", "recorded", ""):
            basis.setdefault(clean(how), []).append(bucket)
    for how, (*others, last) in basis.items():
        facts.append(f"{', '.join(others)}{' and ' * bool(others)}{last} {BASIS_PHRASES.get(how, how)}")
    told = [clean(note) for note in why.notes]
    told = [note[:1].upper() + note[1:] if note.endswith(".") else note for note in told]
    return ["", paragraph(joined(facts), style="dim"), *(paragraph(note, style="dim") for note in told)]


def _causes(why: Why) -> list[RenderableType]:
    """Return the ranked causes: place, name, device-seconds lost, predicted gain; below, where, evidence and fix."""
    causes = named_causes(why)
    if not causes:
        return []
    total_s = why.total_device_s
    parts: list[RenderableType] = ["", Text("  Causes and fixes", style="bold")]
    for place, cause in enumerate(causes, 1):
        if place > MOST_CAUSES and cause.cause not in WARNINGS:  # a warning loses no time, and comes last
            continue
        table = grid("left", "left", "fill", "right")
        gain = Text(gain_words(cause), style="bold green" if is_win(cause) else "dim")
        add_row(table, f"{place}", Text(clean(cause.cause), style="bold"), lost_words(cause, total_s), gain)
        below = grid("left", "fold", indent=5)
        for label, text in ("where", cause.where), ("seen", cause.evidence), ("fix", cause.fix), ("edit", cause.script):
            if text:
                add_row(below, Text(label.ljust(5), style="dim"), clean(text))
        parts += ["" if place > 1 else Group(), table, below]
    rest = [clean(c.cause) for c in causes[MOST_CAUSES:] if c.cause not in WARNINGS]
    if rest:
        parts += ["", paragraph(f"and {len(rest)} smaller: {', '.join(rest)}", style="dim")]
    return parts


def _straggler(report: StragglerRow) -> list[RenderableType]:
    """Return the figures of the what-if analysis of an operation trace.

    One line of ratios, then the slowest workers, operations, DP ranks and
    stages with their slowdowns (1.00x = costs nothing).
    """
    facts = [
        f"{speedup(report.slowdown)} slower than without stragglers",
        f"{percent(report.waste)} of the time wasted",
        f"of it the slowest workers explain {percent(report.m_w)} (M_W)",
        f"the last stage {percent(report.m_s)} (M_S)",
    ]
    table = grid("left", "fold")
    for label, key in (("worker dp/pp", "worker"), ("operation", "optype"), ("dp rank", "dp"), ("stage", "pp")):
        groups = {name: finite(value) for name, value in report.by.get(key, {}).items()}
        ranked = sorted(((v, name) for name, v in groups.items() if v is not None), reverse=True)
        if ranked:
            most = ", ".join(f"{clean(name)} {speedup(v)}" for v, name in ranked[:MOST_WORKERS])
            more = f" ({count(len(ranked) - MOST_WORKERS)} more)" if len(ranked) > MOST_WORKERS else ""
            add_row(table, Text(label, style="dim"), most + more)
    return [Text("  Stragglers", style="bold"), paragraph(joined(facts)), table]


SHOWN = 32
"""Ranks in the table: the reference and those whose clocks were farthest off; `--json` has all."""


def render_alignment(answer: Json, *, source: str = "", target: str = "", **screen: Unpack[ScreenOptions]) -> str:
    """Return the screen of a `headway.trace-align/1` object, of `Alignment.to_json`."""
    parts: list[RenderableType] = [title("headway trace align", source, width=screen.get("width", 88)), ""]
    before, after = answer["violations_before"], answer["violations"]
    matched = f"{count(answer['meetings'])} collectives and messages matched. "
    parts.append(paragraph(f"{matched}Ends before what they waited for: {count(before)} before, {count(after)} after."))
    if before == 0:
        parts.append(paragraph("The clocks as recorded agree already: the offsets are informational.", style="dim"))
    if after:
        worst = format_seconds(float(answer["shortfall_us"]) / 1e6)
        text = f"No clocks fulfil their order: the estimate misses it by {worst} at most."
        parts.append(paragraph(text, style="bold red"))
    rows = answer["ranks"]
    ranked = sorted(rows[1:], key=lambda row: (-abs(int(row["offset_ns"])), int(row["rank"])))
    farthest = sorted([*rows[:1], *ranked[: SHOWN - 1]], key=lambda row: int(row["rank"]))
    parts += ["", _clocks_table(farthest)]
    if len(rows) > SHOWN:
        parts += ["", paragraph(f"{len(rows) - SHOWN} more ranks: see --json.", style="dim")]
    if target:
        parts += ["", paragraph(Text.assemble(("written  ", "dim"), clean(target)))]
    return draw(parts, **screen)


def _clocks_table(rows: Sequence[Json]) -> Table:
    hosts = any(row["host"] for row in rows)
    titles = "rank", "host" if hosts else "", "offset", "drift", "residual", "moved"
    table = headed(*titles, align="right left right right right right")
    for row in rows:
        drift, moved = finite(row["drift_ppm"]), finite(row["moved_us"])
        times = _time(finite(row["residual_us"])), _time(moved) if moved else "-"
        cells = _signed(int(row["offset_ns"])), f"{drift:+.3g} ppm" if drift else "-", *times
        add_row(table, str(row["rank"]), clean(row["host"]), *cells)
    return table


def _signed(offset_ns: int) -> str:
    """Return an offset in the unit that suits it.

    >>> _signed(-900), _signed(48_215_000), _signed(0)
    ('-900 ns', '+48.2 ms', '0')
    """
    if abs(offset_ns) < 1000:
        return f"{offset_ns:+d} ns" if offset_ns else "0"
    return f"{'+' if offset_ns > 0 else '-'}{format_seconds(abs(offset_ns) / NS_PER_S)}"


def _time(value_us: float | None) -> str:
    return "-" if value_us is None else format_seconds(value_us / 1e6)


def render_optimised(answer: Json, *, source: str = "", plan_path: str = "", **screen: Unpack[ScreenOptions]) -> str:
    """Return the screen of a `headway.comm-plan/1` object.

    `plan_path` is where the plan was written, '' when there was nothing to write.
    """
    parts: list[RenderableType] = [title("headway comm plan", source, width=screen.get("width", 88)), ""]
    before, after = seconds(answer["base_step_s"]), seconds(answer["step_s"])
    gain = speedup(answer["predicted_speedup"])
    parts.append(paragraph(f"{before} -> {after} per step on {answer['ranks']} ranks, {gain} (predicted)"))
    if answer["moves"]:
        table = grid("right", "left", "fold")
        for row in answer["moves"]:
            by_hand = f"by hand: {clean(row['how'])}"
            how = f"by --apply, or {by_hand}" if row["remedy"] else by_hand
            add_row(table, seconds(row["step_s"]), clean(row["name"]), clean(row["what"]))
            add_row(table, "", "", how)
        parts += ["", table]
    if answer["note"]:
        parts += ["", paragraph(clean(answer["note"]), style="dim")]
    apply = f"headway run --apply {shlex.quote(clean(plan_path))} -- train.py"
    parts += ["", command_line("Next", apply) if plan_path else paragraph("No change is worth a plan.")]
    return draw(parts, **screen)
