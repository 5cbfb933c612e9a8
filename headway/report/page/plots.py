"""Charts that need no script: what ran when, a quantity over time beside its limit, candidates side by side.

A chart is data; `markup` draws it as SVG or boxes in percent of their frame, so that it prints as it is and fits any
width. `picture_page` makes one page of several.

>>> gantt = Gantt("two ranks", ("rank 0", "rank 1"), (GanttSpan(0, 0.0, 1.0, "F", "0"),), 2.0, {"F": "forward"})
>>> 'left:0.00%;width:50.00%' in gantt.markup()
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from headway.core.files.safe_files import whole_file
from headway.core.units import seconds
from headway.report.page.charts import thinned
from headway.report.page.html import ReportData, head_part, page
from headway.report.page.sections import text

WIDTH, HEIGHT = 1000, 120
"""Units of a line chart; it is stretched to the width of the page."""

BINS = 500
"""Groups of samples in a line: their extremes are samples."""

WIDE_LABEL, LABEL = 0.05, 0.018
"""Share of a lane from which on a span shows its label on a narrow screen, and on a wide one."""


@dataclass(frozen=True, slots=True)
class GanttSpan:
    """Something that a lane did."""

    lane: int
    """Index of the lane."""
    start_s: float
    """Start."""
    end_s: float
    """End."""
    action: str
    """What it is, a key of the chart's `actions`."""
    label: str = ""
    """What is written on it where it has room."""


@dataclass(frozen=True, slots=True)
class Gantt:
    """What lanes did when, side by side on one axis of time."""

    title: str
    """What is shown, in a sentence."""
    lanes: Sequence[str]
    """Names of the lanes, from the top."""
    spans: Sequence[GanttSpan]
    """What they did."""
    end_s: float
    """End of the axis, which begins at 0."""
    actions: Mapping[str, str]
    """Action -> its name in the legend; `page.css` has a colour for each of F, B, I, W, R."""

    def markup(self) -> str:
        """Return the figure."""
        boxes: list[list[str]] = [[] for _ in self.lanes]
        for span in self.spans:
            begin, width = span.start_s / self.end_s, (span.end_s - span.start_s) / self.end_s
            size = " wide" if width >= WIDE_LABEL else " fits" if width >= LABEL else ""
            times = f"{seconds(span.start_s)} to {seconds(span.end_s)}"
            hint = text(f"{self.actions[span.action]} {span.label}, {times}")
            boxes[span.lane].append(
                f'<i class="k-{span.action}{size}" style="left:{100 * begin:.2f}%;width:{100 * width:.2f}%" '
                f'title="{hint}">{text(span.label) if size else ""}</i>'
            )
        rows = "".join(
            f'<span>{text(name)}</span><div class="lane">{"".join(inside)}</div>'
            for name, inside in zip(self.lanes, boxes, strict=True)
        )
        used = [action for action in self.actions if any(span.action == action for span in self.spans)]
        names = "".join(f'<li><i class="k-{action}"></i>{text(self.actions[action])}</li>' for action in used)
        ends = f'<span></span><div class="ends"><span>0 s</span><span>{seconds(self.end_s)}</span></div>'
        body = f'<div class="lanes" role="img" aria-label="{text(self.title)}">{rows}{ends}</div>'
        return _figure("gantt", self.title, f'{body}<ul class="legend">{names}</ul>')


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A quantity over time, beside the limit that it has to keep below."""

    title: str
    """What is shown, in a sentence, with its largest value and unit."""
    values: ArrayLike
    """[t] Values at equal distances over the axis; NaN = not known."""
    ends: tuple[str, str]
    """What stands at both ends of the axis."""
    limit: float | None = None
    """The limit; None = there is none."""
    top: float = 0.0
    """Upper end of the vertical axis; 0 = the largest value or the limit, with a little room."""
    bottom: float = 0.0
    """Its lower end; what is beyond either end is drawn there."""

    def markup(self) -> str:
        """Return the figure."""
        line = np.asarray(self.values, np.float64)
        samples = thinned(line[None, :], BINS).lines[0]
        finite = samples[np.isfinite(samples)]
        top = self.top or 1.08 * max(float(finite.max(initial=0.0)), self.limit or 0.0) or 1.0
        samples = np.repeat(samples, 2) if samples.size == 1 else samples  # one value for all of the axis
        high = HEIGHT * (top - np.clip(samples, self.bottom, top)) / (top - self.bottom)
        points = " ".join(
            f"{x:.1f},{y:.1f}"
            for x, y in zip(np.linspace(0, WIDTH, samples.size).tolist(), high.tolist(), strict=True)
            if np.isfinite(y)
        )
        drawn = f'<polyline class="line" points="{points}"/>'
        if self.limit is not None:
            y = HEIGHT * (top - self.limit) / (top - self.bottom)
            drawn = (
                f'<rect class="over" width="{WIDTH}" height="{max(y, 0):.1f}"/>{drawn}'
                f'<line class="limit" x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
        svg = (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
            f'aria-label="{text(self.title)}">{drawn}</svg>'
        )
        first, last = map(text, self.ends)
        return _figure("host line", self.title, f'{svg}<div class="ends"><span>{first}</span><span>{last}</span></div>')


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of several ways."""

    name: str
    """What it is."""
    value: float
    """What it costs, or gives."""
    printed: str
    """The value as it is printed, with its unit."""
    chosen: bool = False
    """Whether it is the best, or the one in use."""


@dataclass(frozen=True, slots=True)
class Bars:
    """Candidates by one value, side by side."""

    title: str
    """What is shown, in a sentence."""
    candidates: Sequence[Candidate]
    """In the order in which they are drawn."""

    def markup(self) -> str:
        """Return the figure."""
        top = max((row.value for row in self.candidates), default=0.0) or 1.0
        rows = "".join(
            f'<tr class="{"best" if row.chosen else ""}"><td>{text(row.name)}</td><td class="n">{text(row.printed)}'
            f'</td><td class="bar"><svg width="100%" height="11"><rect class="host-{"job" if row.chosen else "others"}"'
            f' width="{100 * row.value / top:.1f}%" height="11"/></svg></td></tr>'
            for row in self.candidates
        )
        return _figure("candidates", self.title, f'<table class="bars">{rows}</table>')


def _figure(style: str, title: str, body: str) -> str:
    return f'<figure class="{style}"><figcaption>{text(title)}</figcaption>{body}</figure>'


def picture_page(name: str, heading: str, charts: Sequence[Gantt | Line | Bars], *, lead: str = "") -> str:
    """Return a page with these charts below a heading; `name` is what it is about."""
    remark = f'<p class="lead">{text(lead)}</p>' if lead else ""
    drawn = "".join(chart.markup() for chart in charts)
    return page_around(name, f"{name}: {heading}", f'<section id="picture">{remark}{drawn}</section>')


def page_around(name: str, heading: str, body: str) -> str:
    """Return a page in the report's style with other content than a run's."""
    data = ReportData(name, {"devices": 0, "steps": 0, "wall_s": 0.0})
    return page(data).replace(head_part(data), f'<div id="head"><h1>{text(heading)}</h1></div>{body}')


def write_page(path: Path, markup: str) -> str:
    """Write a page through a temporary file beside it, and return its path; raises `InputError` without the folder."""
    with whole_file(path) as draft:
        draft.write_text(markup, encoding="utf-8")
    return str(path)
