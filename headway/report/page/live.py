"""The live page: the report's page, about a run that still goes on.

`live_page` writes the whole page, `live_parts` the parts of it that change,
`live_charts` what its pictures show. All three take a `LiveView`: plain facts
and a `LiveFigures`. The sections, words, colours and pictures are those of the
report; what only a finished run can tell (causes, plan, timeline) is left out.

>>> view = LiveView("runs/x", "waiting")
>>> "Waiting for the run to begin" in live_page(view), sorted(live_parts(view))
(True, ['head', 'live-now'])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.core.units import NS_PER_S, count, format_fraction, format_rate, plural, seconds
from headway.ledger.buckets import BUCKETS
from headway.ledger.live_ledger import LiveFigures, LiveSeries, RankState
from headway.report.page import frames, sections
from headway.report.page.charts import MOST_LINES, share_chart, step_chart
from headway.report.page.html import Live, ReportData, head_part, page
from headway.report.page.sections import text
from headway.why.answer import Why

CAUSES = ("input", "comm", "bubble", "straggler", "checkpoint", "host")
"""Buckets that a live verdict blames: what a remedy could win back."""

MOST_RANKS = 64
"""Ranks with a row of their own; of more, those with the fewest steps."""

LATE_NS = 10 * NS_PER_S
"""A rank without a step for so long, and for many times its usual step, is marked."""

LONG_NS = NS_PER_S
"""An operation that a rank has been in for so long is named; shorter ones would only flicker."""

STATES = {
    "waiting": "Waiting for the run to begin.", "running": "No training step yet.",
    "lost": "The launcher is gone, and so are its ranks.", "ended": "The run has ended.",
}  # fmt: skip
"""State of a `LiveFeed` -> the sentence that stands where there is no verdict yet."""


@dataclass(frozen=True, slots=True)
class LiveView:
    """What is known of a run at one moment."""

    title: str
    """The run as its watcher named it."""

    state: str
    """One of `STATES`."""

    figures: LiveFigures | None = None
    """Its account; None before it has begun."""

    mfu: float | None = None
    """Model FLOPs utilisation of rank 0, 0..1; None where it is not known."""

    doing: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    """Rank -> (recorded name, begin in ns) of the operation that it is in."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """Name -> value, for the foot of the page."""

    created: str = ""
    """When the run began, as text."""

    reason: str = ""
    """Why there is no report of a run that is over, '' when that is not the case."""


def live_page(view: LiveView, series: LiveSeries | None = None) -> str:
    """Return the page as text; `series` is what its charts show at first."""
    link = '<span id="live-link" data-link="new">connecting</span>'
    head = f'<p class="live">{link}{_now(view)}</p>'
    return page(_data(view, series), Live(head, _ranks(view), live_key(view), _headline(view)))


def live_key(view: LiveView) -> str:
    """Return what decides which sections the page has and what their frames hold; equal keys, equal frames."""
    figures = view.figures
    stage = f"{view.state}{'.' if view.reason else ''}"
    if figures is None:
        return stage
    ranks = [str(rank.rank) for rank in figures.ranks]
    rows = ",".join(ranks) if len(ranks) <= MOST_LINES else str(len(ranks))
    return f"{stage} {figures.attempt} {rows} {','.join(figures.charted)}"


def live_parts(view: LiveView) -> dict[str, str]:
    """Return id -> markup of the parts that change with every step."""
    data = _data(view)
    ledger = sections.ledger_part(Why.of(data.why), data.rank_ledger)
    parts = {"live-now": _now(view), "head": head_part(data, _headline(view)), "ledger": ledger, "ranks": _ranks(view)}
    return {name: markup for name, markup in parts.items() if markup}


def live_charts(series: LiveSeries) -> dict[str, object]:
    """Return name -> the page's object of each chart over steps, and the sentences above them."""
    steps = step_chart(series.step_s, series.ranks, series.first_step)
    shares = share_chart(series.bucket_s, series.first_step)
    above = frames.steps_lead(steps, series.clock) if steps else "", frames.shares_lead(shares) if shares else ""
    return {"steps": steps, "shares": shares, "leads": dict(zip(("steps", "shares"), above, strict=True))}


def live_why(figures: LiveFigures) -> dict[str, object]:
    """Return the account as a `headway.why/2` object: what the sections of the report are made of.

    Its causes are whole buckets, as booked; nothing is predicted.
    """
    amounts = figures.bucket_ns
    wall_ns = figures.wall_ns
    total_ns = max(figures.devices * wall_ns, 1)
    lost = sorted(((amounts[name], name) for name in CAUSES if amounts[name]), reverse=True)
    return {
        "schema": "headway.why/2", "devices": figures.devices, "steps": figures.steps,
        "wall_ns": wall_ns, "wall_s": wall_ns / NS_PER_S,
        "goodput": figures.goodput if figures.tells_goodput else None,
        "ledger": {name: amount / NS_PER_S for name, amount in amounts.items()}, "ledger_ns": amounts, "sub": {},
        "basis": dict.fromkeys(BUCKETS, "recorded") | {"useful": "device events" if figures.by_device else "remainder"},
        "causes": [{"cause": name, "lost_device_s": amount / NS_PER_S} for amount, name in lost],
        "straggler": None, "coverage": 1 - amounts["unknown"] / total_ns, "fidelity": None,
        "notes": ["An account up to the last complete step; the finished run's own ledger decides."],
    }  # fmt: skip


def _data(view: LiveView, series: LiveSeries | None = None) -> ReportData:
    figures = view.figures
    if figures is None:
        return ReportData(view.title, {"devices": 0, "steps": 0, "wall_s": 0.0}, facts=view.facts)
    return ReportData(
        title=view.title,
        why=live_why(figures),
        run={"steps_per_s": figures.steps_per_s or None},
        step_s=series.step_s if series and series.step_s.size else None,
        step_clock=series.clock if series else "",
        ranks=series.ranks if series and series.step_s.size else (),
        first_step=series.first_step if series else 0,
        bucket_s=series.bucket_s if series else {},
        rank_ledger={
            rank: dict(zip(BUCKETS, (amounts / NS_PER_S).tolist(), strict=True))
            for rank, amounts in figures.rank_ns.items()
        },
        facts=view.facts,
        created=view.created,
    )


def _headline(view: LiveView) -> str:
    """Return the sentence that stands in the verdict's place, '' once there is a verdict."""
    if view.reason:
        return f"{STATES[view.state]} {view.reason}"
    if view.figures is not None and view.figures.steps and view.state == "running":
        return ""
    return STATES[view.state]


def _now(view: LiveView) -> str:
    """Return the line that says how far the run is."""
    figures = view.figures
    parts = []
    if figures is not None:
        parts = [f"step {count(figures.steps)}"] if figures.steps else []
        parts += [f"{format_rate(figures.steps_per_s)} steps/s"] if figures.steps_per_s else []
        parts += [f"MFU {format_fraction(view.mfu)}"] if view.mfu is not None else []
        parts += [f"steps take {figures.slower:g}x as long as at first"] if figures.slower > 1 else []
        training = sum(rank.begun and not rank.ended for rank in figures.ranks)
        parts += [f"{training} of {plural(figures.devices, 'rank')} training"]
        parts += [f"attempt {figures.attempt + 1}"] if figures.attempt else []
        parts += [f"{seconds((figures.now_ns - figures.start_ns) / NS_PER_S)} since the start"]
    return f'<span id="live-now">{text(" · ".join(parts))}</span>'


def _ranks(view: LiveView) -> str:
    """Return the table of ranks, '' before any was seen."""
    figures = view.figures
    if figures is None or not figures.ranks:
        return ""
    front = max(rank.steps for rank in figures.ranks)
    shown = figures.ranks
    lead = ""
    if len(shown) > MOST_RANKS:
        shown = tuple(sorted(sorted(shown, key=lambda rank: rank.steps)[:MOST_RANKS], key=lambda rank: rank.rank))
        lead = f"The {MOST_RANKS} of {count(len(figures.ranks))} ranks with the fewest steps."
    head = (
        '<tr><th>Rank</th><th>State</th><th class="n">Step</th><th class="n">Behind</th>'
        '<th class="n">Newest step</th><th class="n">Last step</th><th>Doing</th><th class="n">Process</th></tr>'
    )
    rows = ""
    for rank in shown:
        name, since_ns = view.doing.get(rank.rank, ("", figures.now_ns))
        lasted_ns = figures.now_ns - since_ns
        rows += _rank_row(rank, figures.now_ns, front, f"{name} for {_ago(lasted_ns)}" * (lasted_ns >= LONG_NS))
    return sections.section("ranks", "Ranks", lead, f'<div class="scroll"><table>{head}{rows}</table></div>')


def _rank_row(rank: RankState, now_ns: int, front: int, doing: str) -> str:
    """Return the row of one rank."""
    ago_ns = now_ns - rank.last_step_ns
    late = rank.begun and not rank.ended and rank.last_step_ns > 0 and ago_ns > max(LATE_NS, 10 * rank.step_ns)
    state = "ended" if rank.ended else "no step for long" if late else "training" if rank.begun else "starting up"
    cells = [
        count(rank.steps), count(front - rank.steps) if front > rank.steps else "",
        seconds(rank.step_ns / NS_PER_S) if rank.step_ns else "", f"{_ago(ago_ns)} ago" if rank.last_step_ns else "",
    ]  # fmt: skip
    mark = ' class="bad"' if late else ""
    figures = "".join(f'<td class="n">{text(cell)}</td>' for cell in cells)
    last = f'<td>{text(doing)}</td><td class="n">{rank.pid or ""}</td>'
    return f"<tr><td>{rank.rank}</td><td{mark}>{state}</td>{figures}{last}</tr>"


def _ago(duration_ns: int) -> str:
    """Return an age in whole seconds, so that it does not flicker."""
    return "< 1 s" if duration_ns < NS_PER_S else seconds(duration_ns // NS_PER_S)
