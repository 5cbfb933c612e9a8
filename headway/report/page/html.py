"""One self-contained HTML page about one run: nothing is fetched, everything is inside.

`write_report` takes plain data (the `--json` objects, arrays of step times, a
window of a trace) and writes a page that shows the verdict, the ledger, the
causes, predicted beside measured, step times and bucket shares over steps, a
timeline, heat maps, the plan and the facts of the run. What is not given is
left out. The page's policy forbids every request; scripts run only if their
hash is the one written into it. Times in seconds, shares as fractions.

>>> data = ReportData("demo", {"devices": 1, "steps": 0, "wall_s": 2.0, "ledger": {"startup": 2.0}})
>>> "https://" in page(data), "No training step was recorded" in page(data)
(False, True)

The ledger as a fragment of a page: what a notebook shows below a cell.

`fragment` takes the `headway.why/2` object and returns one `<div>` with its
own style: no script, no request, no heading or id that the notebook's own
page could trip over. Text and rules take the colour of the page around them,
so that light and dark themes both work; bars have the colours of the report.

>>> why = {"devices": 1, "steps": 9, "wall_s": 10.0, "goodput": 0.4, "coverage": 1.0,
...        "ledger": {"useful": 4.0, "input": 6.0}, "causes": []}
>>> fragment(why).startswith('<div class="headway"><style>')
True
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

import headway
from headway.core.errors import InputError
from headway.core.files.safe_files import whole_file
from headway.core.units import clean, finite
from headway.report.answers import BUCKET_STYLES, PlanAnswer, RunAnswer
from headway.report.page import frames, sections
from headway.report.page.charts import HeatMap, heat_chart, share_chart, step_chart, worker_heat_map
from headway.report.page.frames import device_part, host_part
from headway.report.page.ranks import hang_part, machines_part
from headway.report.page.sections import text
from headway.report.page.timeline import Timeline
from headway.trace.recording.host_series import DeviceSeries, HostSeries
from headway.trace.recording.run_facts import RankMemory
from headway.why.answer import CauseRow, Json, Why
from headway.why.verdict import gain_words, lost_words, named_causes, verdict

ASSETS = Path(__file__).parent.parent / "assets"
"""Template, style and script of the page; uPlot and its licence."""


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything a page may show; only `title` and `why` are needed."""

    title: str
    """The run or trace as its owner knows it; shown in the header and as the page's title."""

    why: Json
    """The `headway.why/2` object."""

    run: Json | None = None
    """The `headway.run/1` object: steps per second, and predicted beside measured when a plan was applied."""

    plan: Json | None = None
    """The `headway.plan/1` object."""

    step_s: NDArray[np.float64] | None = None
    """[ranks, steps] Duration of each step on each rank in seconds; NaN where nothing was recorded."""

    step_clock: str = ""
    """What ends a step: 'device' its events, 'host' the host, which may run ahead of a device; '' no device."""

    ranks: Sequence[int] = ()
    """[ranks] Numbers of the rows of `step_s`; 0, 1, ... when empty."""

    first_step: int = 0
    """Number of the first column of `step_s` and of `bucket_s`."""

    marks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Steps in which an 'epoch' began, or an 'evaluation' took place."""

    bucket_s: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Bucket -> [steps] device-seconds of that bucket in each step, all ranks together."""

    rank_ledger: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Rank -> bucket -> device-seconds."""

    timeline: Timeline | None = None
    """A window of the recorded trace."""

    ideal: Timeline | None = None
    """The same window replayed without the losses; drawn below, to the same scale."""

    heat_maps: Sequence[HeatMap] = ()
    """Slowdowns as matrices; an operation trace's dp x pp map is taken from `why` when there is none."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """Name -> value: host, versions, script (already redacted)."""

    host: HostSeries | None = None
    """Load of the host and memory of the job over time."""

    devices: DeviceSeries | None = None
    """What the devices did over time."""

    memory: Mapping[str, RankMemory | None] = field(default_factory=dict)
    """Rank -> what it took at most of the memory of its host and device."""

    created: str = ""
    """When the run was recorded, as text for the header."""


@dataclass(frozen=True, slots=True)
class Live:
    """What a page that follows a run shows and knows beside the parts of a report."""

    head: str
    """Markup above the verdict: how the run stands."""

    ranks: str
    """Section of the ranks, '' without any."""

    key: str
    """What the page was made of; the server tells it to load anew once that has changed."""

    headline: str = ""
    """Sentence in the verdict's place, '' for the verdict."""


def write_report(data: ReportData, path: str | Path) -> int:
    """Write the page to `path` through a temporary file beside it, and return its size in bytes.

    Raises `InputError` when the folder does not exist.
    """
    with whole_file(path) as draft:
        return draft.write_bytes(page(data).encode("utf-8", "replace"))


def page(data: ReportData, live: Live | None = None) -> str:
    """Return the page as text; one with `live` goes on to follow the run at `events` beside its own address."""
    why, run = Why.of(data.why), RunAnswer.of(data.run)
    payload = _payload(data) | ({"live": live.key} if live else {})
    heats = _heat_maps(data)
    parts = {
        "ledger": sections.ledger_part(why, data.rank_ledger),
        "ranks": live.ranks if live else "",
        "causes": "" if live else sections.causes_part(why),
        "applied": sections.applied_part(run),
        "plan": sections.plan_part(PlanAnswer.of(data.plan), data.title),
        "hang": hang_part(why.hang),
        "machines": machines_part(why.machines),
        "stragglers": sections.straggler_part(why),
        "steps": frames.steps_part(payload["steps"], wanted=data.step_s is not None, clock=data.step_clock),
        "shares": frames.shares_part(payload["shares"]),
        "timeline": frames.timeline_part(payload["timelines"]),
        "heat": frames.heat_part(heats, payload["heat"]),
        "device": device_part(data.devices, data.memory),
        "host": host_part(data.host),
        "failure": sections.traceback_part(run),
        "facts": sections.facts_part(data.facts),
    }
    head = (live.head if live else "") + head_part(data, live.headline if live else "")
    parts["terms"] = terms_part("".join([head, *parts.values()]))
    shown = {name: markup for name, markup in parts.items() if markup}
    links = "".join(f'<a href="#{name}">{TITLES[name]}</a>' for name in shown)
    contents = f'<nav aria-label="Sections">{links}</nav>'
    written = json.dumps(payload, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    uplot = asset("uplot.min.js")
    script = asset("page.js").replace("/*LIVE*/", asset("live.js") if live else "")
    library = f"/* {asset('uplot.LICENSE').strip()} */\n{uplot.partition('*/')[2].lstrip()}"
    return Template(asset("page.html")).substitute(
        policy=_policy(library, script) + ("; connect-src 'self'" if live else ""),
        version=text(headway.__version__),
        title=text(f"{clean(data.title)}: headway report"),
        style=_style(),
        name=text(data.title),
        when=text(data.created),
        verdict=head + contents * (len(shown) > 1),
        sections="\n".join(shown.values()),
        footer=f"{'Served' if live else 'Written'} by headway {text(headway.__version__)}. {FOOTERS[live is not None]}",
        data=written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),  # no markup can end it
        uplot=library,
        script=script,
    )


def head_part(data: ReportData, headline: str = "") -> str:
    """Return the verdict, or the `headline` in its place, and the key figures."""
    why = Why.of(data.why)
    first = f"<h1>{text(headline)}</h1>" if headline else sections.verdict_part(why)
    return f'<div id="head">{first}{sections.key_figures(why, RunAnswer.of(data.run))}</div>'


FOOTERS = ("This file is complete: it loads nothing.", "Figures are estimates until the run has ended.")
"""Last words of a report, and of a page that follows a run."""


def asset(name: str) -> str:
    """Return the text of a file that is part of the pages."""
    return (ASSETS / name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    """Return the content security policy: no request at all, and only these scripts run."""
    hashes = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode("ascii") for s in scripts)
    allowed = " ".join(f"'sha256-{h}'" for h in hashes)
    rest = "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {allowed}; {rest}"


def _style() -> str:
    """Return the style sheet with both themes' bucket colours filled in."""
    light = "".join(f"--b-{name}: {style.light}; " for name, style in BUCKET_STYLES.items())
    dark = "".join(f"--b-{name}: {style.dark}; " for name, style in BUCKET_STYLES.items())
    classes = "".join(f".b-{name} {{ fill: var(--b-{name}); }}\n" for name in BUCKET_STYLES)
    own = asset("page.css").replace("/*LIGHT*/", f":root {{ {light} }}").replace("/*DARK*/", DARK + dark)
    return f"{asset('uplot.min.css')}\n{own}\n{classes}"


DARK = (
    "--paper: #14181c; --ink: #e4e8ec; --quiet: #98a3ae; --rule: #2c333a; --soft: #1c2227; --accent: #6db1ee; "
    "--good: #63c58a; --bad: #ff8a7a; --heat-0: #20272d; --heat-1: #ff7a5c; --heat-ink: #14181c; "
    "--hatch: rgba(0, 0, 0, .5); --mark: #3d464e; color-scheme: dark; "
)
"""Colours of the dark theme; those of the light one stand in `page.css`."""

TITLES = {
    "ledger": "Ledger", "ranks": "Ranks", "causes": "Causes", "applied": "Predicted and measured", "plan": "Plan",
    "hang": "Hang", "machines": "Machines",
    "stragglers": "Stragglers", "steps": "Step time", "shares": "Shares over time", "timeline": "Timeline",
    "heat": "Heat map", "device": "Device", "host": "Host", "failure": "Failure", "facts": "Facts", "terms": "Terms",
}  # fmt: skip
"""Section -> its name in the table of contents."""

TERMS = {
    "goodput": "useful device-seconds whose result was kept / allocated device-seconds, 0..1",
    "MFU": "model FLOPs / (time x peak), without / with recompute; None when precisions mix (torchtitan)",
    "coverage": "share of the allocated device time that the ledger names: 1 less `unknown`",
    "replay error": "how far the replay of the run, unedited, is from the time measured; predictions need it within "
    "5 % (10 % up to 300 steps)",
    "straggler": "rank or op slower than peers; actual / ideal, >= 1",
    "won with cause": "one remedy answers both causes; its gain stands once, with cause N",
    "cpu_wait": "computing, the training thread or its pool was ready to run and no core was free; not useful",
    "teardown": "from the last step to the end of the process, its last collections included",
    "headroom": "memory of the host, or of the fullest device, that the job at its peak did not use",
    "--allow": "permission for what may change results, given by name: `--allow result-equivalent`, `--allow lossy`, "
    "`--allow data.threads`",
    "result-equivalent": "a remedy draws other random numbers of the same distribution; needs `--allow "
    "result-equivalent`",
}
"""Terms of the page that a reader may not know -> what docs/glossary.md says of them."""


def terms_part(markup: str) -> str:
    """Return what the terms of `TERMS` mean that stand in `markup`, folded; '' without any."""
    rows = "".join(
        f"<dt>{text(name)}</dt><dd>{text(meaning.replace('`', ''))}</dd>"
        for name, meaning in TERMS.items()
        if name.lower() in markup.lower()
    )
    folded = f'<details><summary>What they mean</summary><dl class="facts">{rows}</dl></details>' if rows else ""
    return sections.section("terms", "Terms", "", folded)


def _heat_maps(data: ReportData) -> list[HeatMap]:
    found = None if data.heat_maps else worker_heat_map(Why.of(data.why).straggler)
    return [heat for heat in (*data.heat_maps, *([found] if found else [])) if heat.values.size]


def _payload(data: ReportData) -> dict[str, Any]:
    """Return what the page's script draws."""
    panels = [("Recorded", data.timeline), ("Ideal: replayed without the losses", data.ideal)]
    steps, num_rows = None, 0 if data.step_s is None else len(data.step_s)
    if data.step_s is not None:
        if data.ranks and len(data.ranks) != num_rows:
            numbers = f"{len(data.ranks)} rank numbers name {num_rows} rows of step times"
            raise InputError(f"{numbers}. Give one number per row.")
        steps = step_chart(data.step_s, data.ranks or range(num_rows), data.first_step, data.marks)
    return {
        "buckets": list(BUCKET_STYLES),
        "steps": steps,
        "shares": share_chart(data.bucket_s, data.first_step),
        "timelines": [{"title": title, **line.to_json()} for title, line in panels if line is not None and line.rows],
        "mild": sections.MILD_SLOWDOWN,
        "heat": [heat_chart(heat) for heat in _heat_maps(data) if not frames.is_small(heat)],
    }


MOST_CAUSES = 3
"""Causes named below the ledger; the report has all of them."""

DARK_PAGES = "body[data-jp-theme-light=false]", "body.vscode-dark", "html[theme=dark]"
"""How JupyterLab, Visual Studio Code and Colab mark a dark page."""


def fragment(answer: Json) -> str:
    """Return the markup of a `headway.why/2` object: verdict, key figures, ledger, largest causes, next command."""
    why = Why.of(answer)
    found = verdict(why)
    gain = f' <span class="gain">Predicted {text(found.gain)} the steps per second.</span>' if found.gain else ""
    parts = [f'<div class="title">{text(found.sentence)}</div>']
    if found.fix:
        parts.append(f'<p class="remedy"><b>Fix:</b> {text(found.fix.rstrip("."))}.{gain}</p>')
    parts += [sections.key_figures(why, RunAnswer()), sections.ledger_table(why)]
    if causes := "".join(_cause(cause) for cause in named_causes(why)[:MOST_CAUSES]):
        parts.append(f"<ol>{causes}</ol>")
    parts += [f'<p class="note">{text(note)}</p>' for note in why.notes]
    if why.verdict.command:
        parts.append(f'<p class="note">Next, in a terminal: <code>{text(why.verdict.command)}</code></p>')
    return f'<div class="headway"><style>{style()}</style>{"".join(parts)}</div>'


def style() -> str:
    """Return the style sheet of the fragment; it reaches nothing outside the fragment."""
    light = "".join(f".headway .b-{name} {{ fill: {style.light}; }} " for name, style in BUCKET_STYLES.items())
    dark = "".join(
        f"{page} .headway .b-{name} {{ fill: {style.dark}; }} "
        for page in DARK_PAGES
        for name, style in BUCKET_STYLES.items()
    )
    good = "".join(f"{page} .headway .gain.gain.gain.gain {{ color: #63c58a; }} " for page in DARK_PAGES)
    return f"{asset('notebook.css')}{light}{dark}{good}"


def _cause(cause: CauseRow) -> str:
    lost = lost_words(cause)
    gain = f", {gain_words(cause)}" if finite(cause.predicted_speedup) is not None else ""
    said = (line for line in (cause.where, cause.evidence, cause.fix) if line)
    lines = "".join(f'<div class="dim">{text(line)}</div>' for line in said)
    head = f"{sections.swatch(cause.cause.partition('.')[0])}<b>{text(cause.cause)}</b>"
    return f"<li>{head} {text(lost + gain)}{lines}</li>"
