"""The parts of the HTML report that the page's script draws into: frames, controls, descriptions.

Each frame can be reached with the Tab key and says in words what it shows and
which keys it takes; without scripts a sentence stands in its place.

The parts of a page that show the host and its devices over time: cores that the job and others kept busy, memory of
the job; utilisation, memory, clock, power and temperature of devices.

Drawn as SVG, so that it needs no script, prints as it is and fits any width.

>>> host_part(None), device_part(None)
('', '')
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.core.units import count, format_bytes, percent, plural, seconds
from headway.report.page.charts import HeatMap
from headway.report.page.sections import heat_table, legend, section, text
from headway.trace.recording.host_series import DeviceSeries, HostSeries
from headway.trace.recording.run_facts import RankMemory

CHART_KEYS = "Drag to zoom, double-click for everything. Keys: arrows, + and -, Home."
SELECTION_KEYS = (
    "Click an operation, or Shift and arrows, to see what it waited for (w: go there) and what waited for it (d)."
)
TIMELINE_KEYS = "Drag to move, Ctrl and wheel to zoom, double-click for everything. Keys: arrows, + and -, Home."

STEP_CLOCKS: dict[str, str] = {
    "": "",
    "device": " A step ends when the device is done with it.",
    "host": " A step ends when the host has launched it: the device may be behind.",
}
"""Whose clock the step times are -> how that is said."""


def steps_part(chart: Mapping[str, Any] | None, wanted: bool, clock: str = "") -> str:
    """Return the frame of step times; an empty state when there was no step to show.

    `chart` is what `charts.step_chart` returned; `wanted` tells whether the
    caller had step times at all, `clock` (a key of `STEP_CLOCKS`) whose they are.
    """
    if chart is None:
        return section("steps", "Step time", "", '<p class="empty">No step times were recorded.</p>') if wanted else ""
    chooser = _rank_chooser(chart) if len(chart["ranks"]) > 1 else ""
    tools = f'{chooser}<label class="check"><input type="checkbox" id="steps-log">Logarithmic</label>'
    return section("steps", "Step time", steps_lead(chart, clock), _frame("steps", "Step time over steps", tools))


def steps_lead(chart: Mapping[str, Any], clock: str = "") -> str:
    """Return the sentence above the step times: how many there are, by whose clock and how they are drawn."""
    width = chart["width"]
    many = len(chart["ranks"]) > 1
    thinned = f" Each point stands for {width} steps; the band keeps their extremes." if width > 1 else ""
    what = "The line is the median over ranks, the band reaches from the fastest to the slowest." if many else ""
    marks = {"epoch": "grey rules: an epoch begins", "evaluation": "ticks at the foot: evaluation"}
    shown = "; ".join(words for kind, words in marks.items() if chart.get("marks", {}).get(kind))
    said = f" {shown[0].upper()}{shown[1:]}." if shown else ""
    return f"{plural(chart['steps'], 'step')}.{STEP_CLOCKS[clock]} {what}{thinned}{said}".strip()


def _rank_chooser(chart: Mapping[str, Any]) -> str:
    """Return the list of ranks to highlight: those whose lines were sent, the slowest of very many."""
    more = chart["all_ranks"] - len(chart["ranks"])
    every = "All ranks" if not more else f"All {count(chart['all_ranks'])} ranks"
    hint = "Highlight a rank" + (f" of the {len(chart['ranks'])} slowest" if more else "")
    return _chooser("steps-rank", hint, every, [f"Rank {rank}" for rank in chart["ranks"]])


def _chooser(name: str, hint: str, every: str, names: Sequence[str]) -> str:
    """Return a list of `names` to choose one of, `every` before them for none."""
    options = "".join(f'<option value="{index}">{row}</option>' for index, row in enumerate(names))
    options = f'<option value="">{every}</option>{options}'
    return f'<select id="{name}" aria-label="{hint}" title="{hint}">{options}</select>'


def shares_part(chart: Mapping[str, Any] | None) -> str:
    """Return the frame of bucket shares over steps and their legend, '' when `charts.share_chart` had nothing."""
    if chart is None or not chart["shares"]:
        return ""
    body = _frame("shares", "Shares of device time over steps", "") + legend(list(chart["shares"]))
    return section("shares", "Shares over time", shares_lead(chart), body)


def shares_lead(chart: Mapping[str, Any]) -> str:
    """Return the sentence above the shares."""
    width = chart["width"]
    each = f" Each column stands for {width} steps." if width > 1 else ""
    return f"Device time of each step by bucket, all ranks together.{each}"


def _frame(name: str, title: str, tools: str) -> str:
    """Return a frame for a chart over steps: controls, a readout, the plot.

    The script finds its parts by the ids `<name>-figure`, `<name>-plot` and `<name>-readout`.
    """
    readout = f'<span class="readout" id="{name}-readout" aria-live="polite"></span>'
    controls = f'<div class="bar-tools">{tools}{readout}</div>'
    plot = f'<div class="plot" id="{name}-plot"></div>'
    label = f'role="group" aria-label="{text(title)}. {text(CHART_KEYS)}"'
    return f'<figure id="{name}-figure" tabindex="0" {label} >{controls}{plot}</figure>{_without_script()}'


def timeline_part(panels: Sequence[Mapping[str, Any]]) -> str:
    """Return the frame of the timelines, recorded and ideal one below the other; '' when there is none.

    Says how many ranks and spans had to be left out.
    """
    if not panels:
        return ""
    used = sorted({b for panel in panels for b in panel["used"]}, key=panels[0]["buckets"].index)
    hidden = sum(panel["hidden"] for panel in panels)
    drawn, present = panels[0]["ranks"], panels[0]["all_ranks"]
    some = f"{drawn} of {present} ranks are drawn." if drawn < present else ""
    missing = f" {plural(hidden, 'span')} too short to see {'is' if hidden == 1 else 'are'} left out." if hidden else ""
    waits = " A wait for a late rank has the colour of comm here; the ledger books it as straggler."
    waits *= "comm" in used and present > 1
    tools = "".join(
        f'<button type="button" id="timeline-{name}" aria-label="{label}">{sign}</button>'
        for name, label, sign in (("in", "Zoom in", "+"), ("out", "Zoom out", "−"), ("all", "Show everything", "All"))
    )
    canvas = '<canvas id="timeline-canvas"></canvas><div class="tip" id="timeline-tip" role="status"></div>'
    linked = any(side["n"] for side in panels[0]["links"])
    keys = f"{TIMELINE_KEYS} {SELECTION_KEYS}" if linked else TIMELINE_KEYS
    tools += _group_chooser(panels[0])
    hint = f'<span class="readout">{keys}</span>'
    canvas += '<div class="waits note" id="timeline-waits" aria-live="polite"></div>'
    label = f'role="group" aria-label="Timeline of a window. {text(keys)}"'
    tools = f'<div class="bar-tools">{tools}{hint}</div>'
    body = (
        f'<figure id="timeline-figure" tabindex="0" {label}>{tools}{canvas}</figure>{legend(used)}{_without_script()}'
    )
    return section("timeline", "Timeline of a window", (some + missing + waits).strip(), body)


def _group_chooser(panel: Mapping[str, Any]) -> str:
    """Return the list of parallel groups to show alone, '' when the window has none."""
    if not panel["groups"]:
        return ""
    every = "All ranks" if not panel["first"] or len(panel["first"]) == panel["ranks"] else "Ranks spread over the job"
    names = [text(name) for name, _ in panel["groups"]]
    return _chooser("timeline-group", "Show the ranks of one group", every, names)


SMALL_ROWS, SMALL_CELLS = 16, 256
"""A heat map of at most so many rows and cells is a table with figures; larger ones are drawn."""


def is_small(heat: HeatMap) -> bool:
    """Tell whether a heat map is shown as a table."""
    return len(heat.values) <= SMALL_ROWS and heat.values.size <= SMALL_CELLS and heat.values.shape[1] <= SMALL_ROWS


def heat_part(heats: Sequence[HeatMap], drawn: Sequence[Mapping[str, Any]]) -> str:
    """Return all heat maps: small ones as tables, the others as frames.

    `drawn` holds the page's objects (`charts.heat_chart`) of those that are not
    small, in the same order.
    """
    body, index = "", 0
    for heat in heats:
        body += f"<h3>{text(heat.title)}</h3>"
        if is_small(heat):
            body += heat_table(heat)
        else:
            body += _heat_frame(index, heat, drawn[index])
            index += 1
    lead = "1.00 is as fast as without stragglers." + " Joined cells keep the largest value." * bool(index)
    return section("heat", "Heat map", lead, body)


def _heat_frame(index: int, heat: HeatMap, drawn: Mapping[str, Any]) -> str:
    """Return the frame of the `index`-th drawn heat map: scale, readout, canvas."""
    name = f"heat-{index}"
    scale = f'<span class="scale"><span id="{name}-low"></span><i></i><span id="{name}-high"></span></span>'
    readout = f'<span class="readout" id="{name}-readout" aria-live="polite"></span>'
    label = f"{heat.title}: {len(drawn['rows'])} by {len(drawn['columns'])} cells. Keys: arrows."
    return (
        f'<figure id="{name}-figure" tabindex="0" role="group" aria-label="{text(label)}">'
        f'<div class="bar-tools">{scale}{readout}</div><canvas id="{name}-canvas"></canvas></figure>{_without_script()}'
    )


def _without_script() -> str:
    """Return the remark that only readers without scripts see."""
    return '<p class="note no-script">This picture is drawn by the script in this file; allow it to run to see it.</p>'


WIDTH, HEIGHT = 1000, 72
"""Units of a chart; it is stretched to the width of the page."""


def host_part(series: HostSeries | None) -> str:
    """Return the charts, '' without any reading."""
    if series is None or len(series.end_s) < 2:
        return ""
    both = [own + other for own, other in zip(series.own_cores, series.other_cores, strict=True)]
    most_cores = max(series.cores, *both)
    most_bytes = max(series.memory_bytes)
    end_s = series.end_s
    areas = _area(end_s, both, most_cores, "others") + _area(end_s, series.own_cores, most_cores, "job")
    title = f"Cores that the job kept busy, and other processes above it, of {series.cores}"
    load = _chart(title, areas, end_s[-1])
    title = f"Memory of the job's processes, up to {format_bytes(most_bytes)}; what they share counts for each"
    memory = _chart(title, _area(end_s, series.memory_bytes, most_bytes, "job"), end_s[-1])
    return section("host", "Host over time", "", load + (memory if most_bytes else ""))


_GAUGES: tuple[tuple[str, str, Callable[[float], str], str, str], ...] = (
    ("utilization_fraction", "GPU utilisation, the share of time in which some kernel ran", percent, "", ""),
    ("memory_bytes", "Device memory, of all processes", format_bytes, "memory_total_bytes", "of"),
    ("clock_hz", "Clock of the multiprocessors", lambda hz: f"{hz / 1e9:.2f} GHz", "clock_limit_hz", "of at most"),
    ("power_w", "Power", "{:.0f} W".format, "power_limit_w", "of the limit of"),
    ("temperature_c", "Temperature", "{:.0f} °C".format, "", ""),
)
"""Columns of `DeviceGauges`: title, a value in words, the field with the most that a device can have, words before."""


def device_part(series: DeviceSeries | None, memory: Mapping[str, RankMemory | None] | None = None) -> str:
    """Return a chart for each gauge that the driver told, '' without any; `memory` is what each rank took at most.

    Several devices share a chart: their mean, and behind it the largest value of any of them.
    """
    if series is None or len(series.end_s) < 2:
        return ""
    charts = "".join(_gauge_chart(series, *gauge) for gauge in _GAUGES)
    lead = f"{', '.join(sorted({device.name for device in series.devices}))}: {plural(len(series.devices), 'device')}."
    lead += " Blue is the mean, grey above it the device with the largest value." * (len(series.devices) > 1)
    ranks = [row for row in (memory or {}).values() if row is not None and row.device_peak_bytes is not None]
    if ranks:
        fullest = max(ranks, key=lambda row: row.device_peak_bytes or 0)
        lead += f" At most torch reserved {format_bytes(fullest.device_peak_bytes or 0)} for a rank"
        allocated = fullest.device_allocated_bytes
        lead += f", {format_bytes(allocated)} of it for tensors." if allocated is not None else "."
    return section("device", "Device over time", lead, charts)


def _gauge_chart(
    series: DeviceSeries, column: str, title: str, worded: Callable[[float], str], limit: str, before: str
) -> str:
    """Return the chart of one gauge, '' where no device tells it."""
    devices = [device for device in series.devices if getattr(device, column)]
    spans = [[x for x in span if x is not None] for span in zip(*(getattr(d, column) for d in devices), strict=True)]
    if not any(spans):
        return ""
    means, largest = [sum(span) / (len(span) or 1) for span in spans], [max(span, default=0.0) for span in spans]
    limits = [value for device in devices if limit and (value := getattr(device, limit))]
    top = 1.0 if column.endswith("_fraction") else max([*limits, *largest])
    every = [x for span in spans for x in span]
    title += f": mean {worded(sum(every) / len(every))}, highest {worded(max(every))}"
    title += f" {before} {worded(max(limits))}" if limits else ""
    areas = _area(series.end_s, largest, top, "others") if len(devices) > 1 else ""
    return _chart(title, areas + _area(series.end_s, means, top, "job"), series.end_s[-1])


def queue_chart(
    title: str, end_s: Sequence[float], submitted: Sequence[float], waiting: Sequence[float], top: float
) -> str:
    """Return a chart of a queue: jobs that are submitted and not done, and those of them that have not started."""
    return _chart(title, _area(end_s, submitted, top, "others") + _area(end_s, waiting, top, "job"), end_s[-1])


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
