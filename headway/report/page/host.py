"""The part of a page that shows the host over time: cores that the job and others kept busy, memory of the job.

Drawn as SVG, so that it needs no script, prints as it is and fits any width.

>>> host_part(None)
''
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.machine.host_load import HostSeries
from headway.core.units import format_bytes
from headway.report.figures import seconds
from headway.report.page.sections import section

WIDTH, HEIGHT = 1000, 72
"""Units of a chart; it is stretched to the width of the page."""


def host_part(series: HostSeries | None) -> str:
    """Return the charts, '' without any reading."""
    if series is None or len(series.end_s) < 2:
        return ""
    both = [own + other for own, other in zip(series.own_cores, series.other_cores, strict=True)]
    most_cores = max(series.cores, *both)
    most_bytes = max(series.memory_bytes)
    others, job = (
        _area(series.end_s, both, most_cores, "others"),
        _area(series.end_s, series.own_cores, most_cores, "job"),
    )
    load = _chart(
        f"Cores that the job kept busy, and other processes above it, of {series.cores}", others + job, series.end_s[-1]
    )
    memory = _chart(
        f"Memory of the job's processes, up to {format_bytes(most_bytes)}; what they share counts for each",
        _area(series.end_s, series.memory_bytes, most_bytes, "job"),
        series.end_s[-1],
    )
    return section("host", "Host over time", "", load + (memory if most_bytes else ""))


def _area(end_s: Sequence[float], values: Sequence[float], most: float, kind: str) -> str:
    """Return the area below steps of `values`, each up to its `end_s`, at most `most` high.

    |   ___
    |__|   |___
    0  e0  e1  e2
    """
    scale_x, scale_y = WIDTH / end_s[-1], HEIGHT / (most or 1)
    points, left = [f"0,{HEIGHT}"], 0.0
    for end, value in zip(end_s, values, strict=True):
        top = HEIGHT - value * scale_y
        points += [f"{left:.1f},{top:.1f}", f"{end * scale_x:.1f},{top:.1f}"]
        left = end * scale_x
    points.append(f"{WIDTH},{HEIGHT}")
    return f'<polygon class="host-{kind}" points="{" ".join(points)}"/>'


def _chart(title: str, areas: str, end_s: float) -> str:
    return (
        f'<figure class="host"><figcaption>{title}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{title}">{areas}</svg>'
        f'<div class="ends"><span>0 s</span><span>{seconds(end_s)}</span></div></figure>'
    )
