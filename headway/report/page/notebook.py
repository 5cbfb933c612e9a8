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

from headway.report.figures import BUCKET_STYLES, Json, device_seconds, finite, gain_words, named_causes, verdict
from headway.report.page import sections
from headway.report.page.html import asset
from headway.report.page.sections import text

MOST_CAUSES = 3
"""Causes named below the ledger; the report has all of them."""

DARK_PAGES = "body[data-jp-theme-light=false]", "body.vscode-dark", "html[theme=dark]"
"""How JupyterLab, Visual Studio Code and Colab mark a dark page."""


def fragment(why: Json) -> str:
    """Return the markup of a `headway.why/2` object: verdict, key figures, ledger, largest causes, next command."""
    answer = verdict(why)
    gain = f' <span class="gain">Predicted {text(answer.gain)} the steps per second.</span>' if answer.gain else ""
    parts = [f'<div class="title">{text(answer.sentence)}</div>']
    if answer.fix:
        parts.append(f'<p class="remedy"><b>Fix:</b> {text(answer.fix.rstrip("."))}.{gain}</p>')
    parts += [sections.key_figures(why, None), sections.ledger_table(why), _causes(why)]
    parts += [f'<p class="note">{text(note)}</p>' for note in why.get("notes") or ()]
    command = (why.get("verdict") or {}).get("command")
    if command:
        parts.append(f'<p class="note">Next, in a terminal: <code>{text(command)}</code></p>')
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


def _causes(why: Json) -> str:
    """Return the largest causes that are worth naming, one line each and their fix."""
    causes = named_causes(why)[:MOST_CAUSES]
    rows = "".join(_cause(cause) for cause in causes)
    return f"<ol>{rows}</ol>" if rows else ""


def _cause(cause: Json) -> str:
    name = str(cause.get("cause", ""))
    lost = f"{device_seconds(cause.get('lost_device_s'))} lost"
    gain = f", {gain_words(cause)}" if finite(cause.get("predicted_speedup")) is not None else ""
    lines = "".join(
        f'<div class="dim">{text(cause[key])}</div>' for key in ("where", "evidence", "fix") if cause.get(key)
    )
    return f"<li>{sections.swatch(name.partition('.')[0])}<b>{text(name)}</b> {text(lost + gain)}{lines}</li>"
