"""The ledger as a fragment of a page: what a notebook shows below a cell.

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

from headway.report.answers import CauseRow, Json, RunAnswer, Why
from headway.report.figures import BUCKET_STYLES, device_seconds, finite, gain_words, named_causes, verdict
from headway.report.page import sections
from headway.report.page.html import asset
from headway.report.page.sections import text

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
    parts += [sections.key_figures(why, RunAnswer()), sections.ledger_table(why), _causes(why)]
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


def _causes(why: Why) -> str:
    """Return the largest causes that are worth naming, one line each and their fix."""
    causes = named_causes(why)[:MOST_CAUSES]
    rows = "".join(_cause(cause) for cause in causes)
    return f"<ol>{rows}</ol>" if rows else ""


def _cause(cause: CauseRow) -> str:
    lost = f"{device_seconds(cause.lost_device_s)} lost"
    gain = f", {gain_words(cause)}" if finite(cause.predicted_speedup) is not None else ""
    said = (line for line in (cause.where, cause.evidence, cause.fix) if line)
    lines = "".join(f'<div class="dim">{text(line)}</div>' for line in said)
    head = f"{sections.swatch(cause.cause.partition('.')[0])}<b>{text(cause.cause)}</b>"
    return f"<li>{head} {text(lost + gain)}{lines}</li>"
