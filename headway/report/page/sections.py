"""The parts of the HTML report that need no script: sentences, tables, bars drawn as SVG.

Each function returns the markup of one part, '' when there is nothing to say.
Every text that came from a run goes through `text`, which escapes it. Bars
are in percent of their box, so that they fit any width and print as drawn.

>>> text("<script>alert('x')</script>")
'&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;'
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from headway.core.units import (
    clean,
    count,
    device_seconds,
    finite,
    format_rate,
    percent,
    plural,
    seconds,
    share,
    speedup,
)
from headway.ledger.buckets import ONCE_PER_RUN, SUB_LINES
from headway.report import answers
from headway.report.answers import BUCKET_STYLES, PlanAnswer, ProposalRow, RunAnswer, operation_lines, start_of
from headway.report.page.charts import HeatMap
from headway.report.screens import (
    WHOLE_PLAN,
    applied,
    by_hand,
    measured_words,
    nothing_to_apply,
    prediction_error,
    whole_amount,
)
from headway.trace.events.loader_facts import AppliedRow
from headway.why.answer import CauseRow, Why
from headway.why.verdict import ending, gain_words, is_win, lost_words, named_causes, predicted, verdict

MILD_SLOWDOWN = 1.1
"""A heat map's darkest colour stands for at least this slowdown, so that noise stays pale."""

EMPTY: tuple[object, ...] = (None, "", [], {})
"""Values of facts that say nothing."""

MOST_STEP_BARS, STEP_BAR_HEIGHT = 300, 72
"""Bars in the picture of slowdowns by step, and their largest height in pixels."""

MOST_STACKS = 64
"""Ranks with a bar of their own in the ledger; of more, those with the least useful time."""


def text(value: object) -> str:
    """Return any value as text that HTML shows literally."""
    return html.escape(clean(value), quote=True)


def section(name: str, heading: str, lead: str, body: str) -> str:
    """Return a titled part of the page, '' without a body."""
    remark = f'<p class="lead">{text(lead)}</p>' if lead else ""
    return f'<section id="{name}"><h2>{text(heading)}</h2>{remark}{body}</section>' if body else ""


def swatch(bucket: str) -> str:
    """Return the colour square of a bucket."""
    return f'<svg class="swatch" width="11" height="11" aria-hidden="true">{_rect(bucket, 0, 100, 11)}</svg>'


def _rect(bucket: str, left: float, width: float, height: int, hint: str = "") -> str:
    """Return a rectangle in a bucket's colour, striped where the style says so; `left` and `width` in percent."""
    known = bucket if bucket in BUCKET_STYLES else "unknown"
    box = f'x="{left:.3f}%" width="{width:.3f}%" height="{height}"'
    title = f"<title>{text(hint)}</title>" if hint else ""
    stripes = f'<rect {box} fill="url(#hatch)" pointer-events="none"/>' if BUCKET_STYLES[known].hatched else ""
    return f'<rect class="b-{known}" {box}>{title}</rect>{stripes}'


def verdict_part(why: Why) -> str:
    """Return the headline, the fix, the user's own edit and the next command of a `headway.why/2` object."""
    answer = verdict(why)
    gain = f' <span class="gain">Predicted {text(answer.gain)} the steps per second.</span>' if answer.gain else ""
    gain += f' <span class="badge {answer.confidence.replace(" ", "-")}">{answer.confidence}</span>'
    remedy = f'<p class="remedy"><b>Fix:</b> {text(answer.fix.rstrip("."))}.{gain}</p>' if answer.fix else ""
    command = "" if why.verdict.command.startswith("headway report ") else why.verdict.command  # it is this page
    copies = [("In the script", answer.script), ("Next", command)]
    blocks = "".join(
        f'<div class="copy"><span>{label}</span><code>{text(line)}</code></div>' for label, line in copies if line
    )
    return f"<h1>{text(answer.sentence).replace(' x ', ' × ')}</h1>{remedy}{blocks}"


def key_figures(why: Why, run: RunAnswer) -> str:
    """Return the row of ratios under the verdict; what is not known is left out.

    Replay error is the distance of `fidelity` (replayed over measured, or the
    reverse) from 1.
    """
    rate, fidelity = finite(run.steps_per_s), finite(why.fidelity)
    rows = [
        ("Devices", count(why.devices)),
        ("Wall time", seconds(why.wall_s)),
        ("Steps", count(why.steps)),
        ("Steps per second", format_rate(rate) if rate is not None else "-"),
        ("Speedup", next((measured_words(row) for row in run.applied if row.name == WHOLE_PLAN), "-")),
        ("Goodput", percent(why.goodput)),
        ("Goodput in steps", percent(why.step_goodput)),
        ("MFU", percent(why.mfu.mfu if why.mfu else why.compute.mfu)),
        ("Straggler slowdown", speedup(why.straggler and why.straggler.slowdown)),
        ("Coverage", percent(why.coverage)),
        ("Replay error", percent(abs(fidelity - 1)) if fidelity is not None else "-"),
    ]
    known = "".join(f"<div><dt>{name}</dt><dd>{text(value)}</dd></div>" for name, value in rows if value != "-")
    operations = "".join(f'<p class="note">{text(line)}</p>' for line in operation_lines(why))
    num_tiles = known.count("<dt>")
    style = "; ".join(f"--{width}: {answers.columns(num_tiles, limit)}" for width, limit in answers.TILES.items())
    return f'<dl class="figures" style="{style}">{known}</dl>{operations}'


def ledger_part(why: Why, rank_ledger: Mapping[int, Mapping[str, float]]) -> str:
    """Return bars per rank (`rank_ledger`: rank -> bucket -> device-seconds), or one for all, table, and notes."""
    if not any(why.ledger.values()):
        return ""
    stacks = _stacks(why.ledger, rank_ledger)
    lead = (
        "Every nanosecond of every device is in exactly one bucket; together they are "
        f"{whole_amount(why.total_device_s)} ({plural(why.devices, 'device')} x {seconds(why.wall_s)})."
    )
    usual = _usual_basis(why)
    lead += f" Basis: {usual}." if usual not in ("", "measured", "recorded") else ""
    notes = "".join(f'<p class="note">{text(note)}</p>' for note in why.notes)
    return section("ledger", "Where the time went", lead, f"{stacks}{ledger_table(why)}{notes}")


def ledger_table(why: Why) -> str:
    """Return the table of buckets and sub-lines, '' where nothing was booked."""
    largest = max(why.ledger.values(), default=0.0)
    if not largest:
        return ""
    rows = "".join(_bucket_rows(why, bucket, amount, largest) for bucket, amount in why.ledger.items())
    head = '<tr><th>Bucket</th><th class="n">Device time</th><th class="n">Share</th><th class="bar"></th></tr>'
    return f'<table class="ledger">{head}{rows}</table>'


def _bucket_rows(why: Why, bucket: str, amount: float, largest: float) -> str:
    """Return the table rows of one bucket and its sub-lines, '' when it is empty."""
    if amount <= 0 and bucket != "unknown":
        return ""
    total_s = why.total_device_s
    subs = {n: value for n, value in why.sub.items() if n.startswith(f"{bucket}.") and value >= 0.0005 * total_s}
    basis = why.basis.get(bucket)
    how = f' <span class="dim">({text(basis)})</span>' if basis and basis != _usual_basis(why) else ""
    if len(subs) == 1 and next(iter(subs.values())) > 0.98 * amount:
        how = f' <span class="dim">{text(subs.popitem()[0].removeprefix(f"{bucket}."))}</span>{how}'
    held = ' class="held"' if subs else ""
    name = f"{swatch(bucket)}{text(bucket)}{how}"
    rows = [f"<tr{held}><td>{name}</td>{_amounts(bucket, amount, largest, total_s, 14)}</tr>"]
    ranked = sorted(subs.items(), key=lambda row: -row[1])
    for place, (name, value) in enumerate(ranked, 1):
        last = " last" if place == len(ranked) else ""
        label = f'<td title="{text(SUB_LINES.get(name, ""))}">{text(name.removeprefix(f"{bucket}."))}</td>'
        rows.append(f'<tr class="sub{last}">{label}{_amounts(bucket, value, largest, total_s, 5)}</tr>')
    return "".join(rows)


def _usual_basis(why: Why) -> str:
    """Return how most of the non-empty buckets were obtained, '' when that is not said."""
    said = [how for bucket, how in why.basis.items() if why.ledger.get(bucket)]
    return max(said, key=said.count, default="")


def _amounts(bucket: str, amount: float, largest: float, total_s: float, height: int) -> str:
    """Return the three cells of a ledger row: device-seconds, share, bar to the scale of the largest."""
    drawn = _rect(bucket, 0, 100 * amount / largest if largest else 0, height)
    bar = f'<svg width="100%" height="{height}" aria-hidden="true">{drawn}</svg>'
    of_all = percent(share(amount, total_s))
    return f'<td class="n">{device_seconds(amount, largest)}</td><td class="n">{of_all}</td><td class="bar">{bar}</td>'


def _stacks(ledger: Mapping[str, float], rank_ledger: Mapping[int, Mapping[str, float]]) -> str:
    """Return one stacked bar per rank, or one of the whole job when ranks are not known; the table is the legend."""
    bars, note = {f"rank {rank}": parts for rank, parts in rank_ledger.items()} or {"all devices": ledger}, ""
    if len(bars) > MOST_STACKS:
        worst = sorted(bars, key=lambda name: bars[name].get("useful", 0.0))[:MOST_STACKS]
        note = f'<p class="note">The {MOST_STACKS} of {count(len(bars))} ranks with the least useful time.</p>'
        bars = {name: bars[name] for name in bars if name in set(worst)}
    steady = {name: amount for name, amount in ledger.items() if name not in ONCE_PER_RUN}
    if (
        0 < sum(steady.values()) < (1 - answers.STARTS_SHOW) * sum(ledger.values())
    ):  # a bar of its own, to a scale of its own
        bar = _stack("in steps", steady, sum(steady.values()), 20)
        note += f'<div class="stack apart">{bar}</div><p class="note">In steps: without what comes once in a run.</p>'
    longest = max((sum(parts.values()) for parts in bars.values()), default=0.0)
    height = 20 if len(bars) <= 16 else 8
    rows = "".join(_stack(name, parts, longest, height) for name, parts in bars.items())
    dense = " dense" if len(bars) > 16 else ""
    return f'<div class="stack{dense}">{rows}</div>{note}'


def _stack(name: str, parts: Mapping[str, float], longest: float, height: int) -> str:
    """Return one stacked bar of `parts` (bucket -> seconds), as long as its sum beside `longest`.

    Screen readers get the shares of at least 0.5 % in words, pointers get each part's figures.
    """
    left, drawn = 0.0, []
    whole = sum(parts.values())
    for bucket in [*(b for b in BUCKET_STYLES if b in parts), *(b for b in parts if b not in BUCKET_STYLES)]:
        amount = parts[bucket]
        if amount > 0 and longest > 0:
            width, hint = 100 * amount / longest, f"{device_seconds(amount)}, {percent(amount / whole)}"
            drawn.append(_rect(bucket, left, width, height, f"{name}: {bucket} {hint}"))
            left += width
    summary = ", ".join(f"{b} {percent(v / whole)}" for b, v in parts.items() if whole and v / whole >= 0.005)
    label = f'role="img" aria-label="{text(name)}: {text(summary)}"'
    picture = f'<svg width="100%" height="{height}" {label}>{"".join(drawn)}</svg>'
    return f'<span class="label">{text(name)}</span>{picture}'


def legend(buckets: Sequence[str]) -> str:
    """Return the colours of `buckets` by name."""
    return f'<ul class="legend">{"".join(f"<li>{swatch(b)}{text(b)}</li>" for b in buckets)}</ul>'


def causes_part(why: Why) -> str:
    """Return the ranked causes of a `headway.why/2` object that are worth naming, all of them, in its order."""
    causes = named_causes(why)
    if not causes:
        return ""
    rows = "".join(_cause(place, cause, why.total_device_s) for place, cause in enumerate(causes, 1))
    replayed = any(finite(cause.predicted_speedup) is not None for cause in causes)
    lost = "what a run without the cause would have won, found by replaying it" if replayed else "as booked"
    lead = f"Lost time is {lost}; causes may overlap and need not add up."
    return section("causes", "Causes and fixes", lead, f'<ol class="causes">{rows}</ol>')


def _cause(place: int, cause: CauseRow, total_s: float) -> str:
    """Return one ranked cause: name, seconds lost, predicted gain; below them what is known of it."""
    style = "gain" if is_win(cause) else "dim"
    lost = lost_words(cause, total_s)
    facts = "".join(
        f'<dt>{label}</dt><dd class="{label.lower()}">{text(said)}</dd>'
        for label, said in (("Where", cause.where), ("Evidence", cause.evidence), ("Fix", cause.fix))
        if said
    )
    if cause.script:
        facts += f'<dt>Edit</dt><dd class="edit"><code>{text(cause.script)}</code></dd>'
    name = f"{swatch(cause.cause.partition('.')[0])}{text(cause.cause)}"
    head = (
        f'<div class="head"><h3>{name}</h3><span class="lost">{text(lost)}</span>'
        f'<span class="won {style}">{text(gain_words(cause))}</span></div>'
    )
    return f'<li><span class="place">{place}</span><div>{head}<dl>{facts}</dl></div></li>'


def applied_part(run: RunAnswer) -> str:
    """Return predicted beside measured for every remedy of an applied plan.

    All pictures share one axis of speedups that holds 1 and every value; refused
    remedies are named below with their reason.
    """
    if not run.applied:
        return ""
    done = applied(run.applied)
    known = [value for row in done for value in (row.predicted_speedup, row.measured_speedup, *(row.interval or ()))]
    values = [v for raw in known if (v := finite(raw)) is not None]
    low, high = min([*values, 1.0]), max([*values, 1.0])
    pad = 0.06 * (high - low) or 0.1
    body = "".join(_applied_row(row, (low - pad, high + pad)) for row in done)
    head = (
        '<tr><th>Remedy</th><th class="n">Predicted</th><th class="n">Measured</th><th class="n">Off by</th>'
        '<th class="bar">tick and line: predicted, with its interval; dot: measured; hairline: 1x</th></tr>'
    )
    table = f'<div class="scroll"><table class="ledger">{head}{body}</table></div>' if done else ""
    notes = ""
    for row in run.applied:
        if reason := text(row.reason_not_applied or ""):
            notes += f'<p class="note"><span class="mono">{text(row.name)}</span> was not applied: {reason}.</p>'
    if done and done[-1].inconclusive:
        notes += f'<p class="note">What was measured is inconclusive: {text(done[-1].inconclusive)}.</p>'
    lead = f"Steps per second against {clean(run.baseline) or 'the run before'}."
    return section("applied", "Predicted and measured", lead, table + notes)


def _applied_row(row: AppliedRow, axis: tuple[float, float]) -> str:
    """Return the table row of one applied remedy; the row of the whole plan is set in bold."""
    error = prediction_error(row)
    off = "-" if error is None else f"{100 * error:+.1f} %"
    total = ' class="total"' if row.name == WHOLE_PLAN else ""
    return (
        f'<tr{total}><td class="mono">{text(row.name)}</td><td class="n">{text(predicted(row))}</td>'
        f'<td class="n">{measured_words(row)}</td><td class="n">{off}</td>'
        f'<td class="bar">{_gain_picture(row, axis)}</td></tr>'
    )


def _gain_picture(row: AppliedRow, axis: tuple[float, float]) -> str:
    """Return the predicted interval as a line, the prediction as a tick on it, the measurement as a dot."""
    marks = [_upright(1.0, axis, "0", "18", 'stroke="var(--rule)"')]
    bounds = [v for raw in row.interval or () if (v := finite(raw)) is not None]
    if len(bounds) == 2:
        ends = f'x1="{_at(bounds[0], axis)}" x2="{_at(bounds[1], axis)}" y1="9" y2="9"'
        marks.append(f'<line {ends} stroke="var(--accent)" stroke-width="3" stroke-opacity=".45"/>')
    expected, measured = finite(row.predicted_speedup), finite(row.measured_speedup)
    if expected is not None:
        marks.append(_upright(expected, axis, "3", "15", 'stroke="var(--accent)" stroke-width="2"'))
    if measured is not None:
        marks.append(f'<circle cx="{_at(measured, axis)}" cy="9" r="4.5" fill="var(--ink)"/>')
    return f'<svg width="100%" height="18" aria-hidden="true">{"".join(marks)}</svg>'


def _at(value: float, axis: tuple[float, float]) -> str:
    """Return the place of `value` between the ends of `axis`, in percent of the width."""
    return f"{100 * (value - axis[0]) / (axis[1] - axis[0]):.2f}%"


def _upright(value: float, axis: tuple[float, float], y1: str, y2: str, stroke: str) -> str:
    """Return an upright line at `value`, from height `y1` to `y2` in pixels."""
    return f'<line x1="{_at(value, axis)}" x2="{_at(value, axis)}" y1="{y1}" y2="{y2}" {stroke}/>'


def plan_part(plan: PlanAnswer, source: str) -> str:
    """Return the proposals of every room for the run `source`, chosen ones marked."""
    rows = "".join(_proposal(row, row.name in plan.chosen) for row in plan.proposals if not row.slows)
    if not rows:
        return ""
    head = '<tr><th></th><th>Proposal</th><th class="n">Predicted</th>'
    head += "<th>Applied by</th><th>Cost</th><th>Risk</th></tr>"
    lead = f"{nothing_to_apply(plan, source)}{by_hand(plan)}"
    notes = "".join(f'<p class="note">{text(row.name)}: {text(row.reason)}</p>' for row in plan.refused if row.unsafe)
    if plan.chosen:
        lead = f"The chosen ones (✓) together: predicted {predicted(plan)} the steps per second.{start_of(plan)}"
        notes = ""
    table = f'<div class="scroll"><table class="proposals">{head}{rows}</table></div>'
    return section("plan", "Plan", lead, f"{table}{notes}")


def _proposal(row: ProposalRow, chosen: bool) -> str:
    """Return the table row of one proposal: who applies it, what it costs and risks."""
    by = "headway" if row.applies else "you"
    style = ' class="chosen"' if chosen else ""
    cells = "".join(f"<td>{text(said or '-')}</td>" for said in (row.cost, row.risk))
    return (
        f'<tr{style}><td>{"✓" if chosen else ""}</td><td class="mono">{text(row.name)}</td>'
        f'<td class="n">{text(predicted(row))}</td><td>{by}</td>{cells}</tr>'
    )


def straggler_part(why: Why) -> str:
    """Return the what-if analysis of an operation trace: shares explained, slowdowns by group and by step.

    A group's slowdown is that of a job in which only this group keeps its
    observed durations (`S_g`); 1 = costs nothing.
    """
    report = why.straggler
    if report is None:
        return ""
    slowdown, waste = speedup(report.slowdown), percent(report.waste)
    lead = (
        f"Without stragglers the job would run {slowdown} as fast; {waste} of the time is wasted. The slowest workers "
        f"explain {percent(report.m_w)} of it (M_W), the last stage {percent(report.m_s)} (M_S)."
    )
    tables = "".join(
        _groups(heading, report.by.get(key, {}))
        for heading, key in (("By operation", "optype"), ("By data-parallel rank", "dp"), ("By pipeline stage", "pp"))
    )
    body = f'<div class="groups">{tables}</div>{_step_slowdowns(report.step_slowdown)}'
    return section("stragglers", "Stragglers", lead, body)


def _step_slowdowns(slowdowns: Mapping[str, Any]) -> str:
    """Return one upright bar per step, as high as its slowdown above 1; neighbours are joined, the largest kept."""
    named = [(str(step), value) for step, raw in slowdowns.items() if (value := finite(raw)) is not None]
    known = sorted(named, key=lambda row: (not row[0].isdecimal(), len(row[0]), row[0]))
    if len(known) < 2:
        return ""
    width = -(-len(known) // MOST_STEP_BARS)
    shown = [max(known[i : i + width], key=lambda row: row[1]) for i in range(0, len(known), width)]
    top = max(MILD_SLOWDOWN, *(value for _, value in shown))
    bars = ""
    for place, (step, value) in enumerate(shown):
        height = STEP_BAR_HEIGHT * max(0.0, value - 1) / (top - 1)
        box = f'x="{100 * place / len(shown):.3f}%" width="{80 / len(shown):.3f}%"'
        edge = f'y="{STEP_BAR_HEIGHT - height:.1f}" height="{height:.1f}"'
        bars += f'<rect class="b-straggler" {box} {edge}><title>step {text(step)}: {speedup(value)}</title></rect>'
    middle = float(np.median([value for _, value in known]))
    said = f"median {speedup(middle)}, largest {speedup(max(value for _, value in known))}"
    picture = f'<svg class="steps" width="100%" height="{STEP_BAR_HEIGHT}" role="img" aria-label="{said}">{bars}</svg>'
    return f'<h3>By step <span class="dim">{said}, axis from 1x to {speedup(top)}</span></h3>{picture}'


def _groups(heading: str, groups: Mapping[str, Any]) -> str:
    """Return a small table of slowdowns, the largest first, at most 12."""
    known = sorted(((v, str(name)) for name, raw in groups.items() if (v := finite(raw)) is not None), reverse=True)
    if not known:
        return ""
    excess = max(value for value, _ in known) - 1
    rows = ""
    for value, name in known[:12]:  # the longest bar stands for `excess` above 1
        drawn = _rect("straggler", 0, 100 * max(0.0, value - 1) / excess if excess > 0 else 0, 9)
        bar = f'<svg width="100%" height="9" aria-hidden="true">{drawn}</svg>'
        rows += f'<tr><td>{text(name)}</td><td class="n">{speedup(value)}</td><td class="bar">{bar}</td></tr>'
    more = f'<p class="note">and {count(len(known) - 12)} more</p>' if len(known) > 12 else ""
    return f"<div><h3>{heading}</h3><table>{rows}</table>{more}</div>"


def heat_table(heat: HeatMap) -> str:
    """Return a small heat map as a table with its figures in the cells.

    Figures stay readable without colour, for screen readers and on paper.
    """
    rows, columns = heat.names()
    known = heat.values[np.isfinite(heat.values)]
    most = max([MILD_SLOWDOWN, *known.tolist()])
    head = "".join(f'<th scope="col">{text(heat.column_title)} {text(name)}</th>' for name in columns)
    body = ""
    for name, values in zip(rows, heat.values.tolist(), strict=True):
        cells = "".join(_heat_cell(value, most) for value in values)
        body += f'<tr><th scope="row">{text(heat.row_title)} {text(name)}</th>{cells}</tr>'
    return f'<div class="scroll"><table class="heat"><tr><td></td>{head}</tr>{body}</table></div>'


def _heat_cell(value: float, most: float) -> str:
    """Return a table cell whose shade runs from 1 (pale) to `most`; a dash where nothing was recorded."""
    if not np.isfinite(value):
        return '<td class="dim">–</td>'
    part = max(0.0, value - 1) / (most - 1)
    paint = f"background:color-mix(in oklab,var(--heat-1) {100 * part:.0f}%,var(--heat-0))"
    return f'<td{" class=hot" if part > 0.5 else ""} style="{paint}">{value:.2f}</td>'


def facts_part(facts: Mapping[str, Any]) -> str:
    """Return what is known of the run: host, versions, script; the caller has removed secrets.

    Empty values are left out.
    """
    rows = ""
    for name, value in facts.items():
        if isinstance(value, Mapping):  # an entry per line
            markup = "<br>".join(f"{text(k)} = {text(_inner_fact(v))}" for k, v in value.items() if v not in EMPTY)
        else:
            markup = text(_inner_fact(value))
        rows += f"<dt>{text(str(name).replace('_', ' '))}</dt><dd>{markup}</dd>" if value not in EMPTY else ""
    return section("facts", "Facts of the run", "", f'<dl class="facts">{rows}</dl>' if rows else "")


def _inner_fact(value: object) -> str:
    """Return a value as words: mappings as 'name value; name value', without the empty ones."""
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {_inner_fact(part)}" for name, part in value.items() if part not in EMPTY)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def traceback_part(run: RunAnswer) -> str:
    """Return the first failing rank's traceback, verbatim but for characters that cannot be printed."""
    end = run.exit
    if end is None or not end.traceback:
        return ""
    lines = "\n".join(
        html.escape("".join(c if c.isprintable() else " " for c in line)) for line in end.traceback.splitlines()
    )
    said = ending(msgspec.structs.replace(end, traceback=None))
    return section("failure", "How it failed", said, f"<pre>{lines}</pre>")
