"""The ranks of a job: which block it, on the grid of its parallel axes, what each is in; machines by speed.

Both forms of a hang take the `headway.hang/1` object: `render_hang` returns terminal text, `hang_part` a section of
the HTML page. The grid has a row per pipeline stage and a column per rank of that stage, in groups of the last axis.

>>> hung = {"mesh": {"tp": 1, "dp": 2}, "world_size": 2, "states": ["waiting", "silent"], "deadlocks": [],
...         "origins": [{"ranks": [1], "coordinates": [{"tp": 0, "dp": 1}], "reason": "silent", "num_waiting": 1,
...                      "awaited": "all_reduce 7 of group dp"}], "ongoing": {"0": "all_reduce 7 of group dp"}}
>>> sentences(hung)
['Rank 1 (dp 1) is silent; 1 rank waits for it, in all_reduce 7 of group dp.']
>>> print(render_hang(hung, width=60, unicode=False).splitlines()[-1])
  no report                 1 rank: 1

The heat maps of machines come from `headway.ledger.machines.MachineTimes`, the text from the `machines` entry of a
`headway.why/2` object.

>>> slow = {"machine": "d", "ranks": [6, 7], "slowdown": 1.4, "sigmas": 40.0, "lost_s": 3.2}
>>> entry = {"slowdown": {"a": 1.0, "b": 1.0, "c": 1.01, "d": 1.4}, "outliers": [slow]}
>>> machine_lines(MachinesRow.of(entry))[0]
'd computes 1.40x as long as its peers (2 ranks): the job waited for it 3.20 s at most'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from headway.core.mesh import Mesh
from headway.core.units import clean, count, device_seconds, finite, plural, speedup
from headway.ledger.machines import BASES, LEAST_MACHINES, MachineTimes
from headway.report.page.charts import HeatMap
from headway.report.page.sections import section, text
from headway.report.paper import ScreenOptions, add_row, draw, grid, paragraph, title
from headway.why.answer import Json, MachinesRow

MOST_ORIGINS = 8
"""Origins told in a sentence each; the rest is counted."""

MOST_OPERATIONS = 12
"""Operations listed with the ranks that are in them."""

MOST_CELLS = 4_096
"""Ranks drawn; of more, only the replicas (dp) in which something is wrong."""

MOST_RANKS_NAMED = 12

NEWLINE = "\n"

MOST_STACKS, MOST_FRAMES = 4, 5
"""Blocking ranks whose stacks are shown, and how many of their innermost frames."""

SIGNS: dict[str, tuple[str, str]] = {
    "waiting": ("·", "dim"), "busy": ("-", "dim"), "silent": ("X", "bold red"), "absent": ("A", "bold red"),
    "differs": ("M", "bold red"), "stuck": ("S", "bold red"), "deadlock": ("D", "bold red"),
}  # fmt: skip
"""State of a rank -> its sign on the terminal's grid, and its style."""

QUIET = ("waiting", "busy")
"""States of ranks that block nobody."""

MEANINGS = {
    "waiting": "waits", "busy": "busy", "silent": "silent", "absent": "has not entered",
    "differs": "in another collective", "stuck": "entered, does not end", "deadlock": "waits in a circle",
}  # fmt: skip
"""State of a rank -> what the legend calls it."""


def sentences(hang: Json) -> list[str]:
    """Return the verdict: one sentence per origin and per deadlock, the most awaited first."""
    mesh = Mesh(hang["mesh"])
    told = [_origin(row, mesh) for row in hang["origins"][:MOST_ORIGINS]]
    if len(hang["origins"]) > MOST_ORIGINS:
        told.append(f"{plural(len(hang['origins']) - MOST_ORIGINS, 'further origin')} of the blockage.")
    for ranks in hang["deadlocks"][:MOST_ORIGINS]:
        steps = [f"rank {rank} is in {clean(hang['ongoing'][str(rank)])}" for rank in ranks[:4]]
        told.append(f"{_ranks(ranks)} wait for each other in a circle: {', '.join(steps)}.")
    ignored = hang.get("ignored_reports")
    told += [f"{plural(ignored, 'report')} of another attempt left out."] if ignored else []
    explained = list(hang.get("explained", {}).items())[:MOST_ORIGINS]
    alone = [f"Rank {rank} is in {clean(doing)}." for rank, doing in explained]
    return told or alone or ["Nobody waits: no rank blocks another."]


def _origin(row: Json, mesh: Mesh) -> str:
    """Return one origin in words."""
    ranks, waiting = row["ranks"], row["num_waiting"]
    place = ", ".join(f"{axis} {at}" for axis, at in row["coordinates"][0].items() if mesh.size(axis) > 1)
    who = f"Rank {ranks[0]}{f' ({place})' if place else ''}" if len(ranks) == 1 else _ranks(ranks)
    if row["reason"] == "stuck":
        what = f"are all in {clean(row.get('doing', ''))}, which does not end"
    elif row["reason"] == "silent":
        what = "is silent"
    elif row["reason"] == "differs":
        what = f"is in another collective than most of its group ({clean(row.get('doing') or 'under the same number')})"
    else:
        what = f"is the blocker{', in ' + clean(row['doing']) if row.get('doing') else ''}"
    awaited = f", in {clean(row['awaited'])}" if row.get("awaited") else ""
    others = f"{plural(waiting, 'rank')} {'waits' if waiting == 1 else 'wait'}" if waiting else "nobody waits"
    return f"{who} {what}; {others} for {'them' if len(ranks) > 1 else 'it'}{awaited}."


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words: 'Ranks 0, 1, 2 and 40 more'."""
    more = f" and {count(len(ranks) - MOST_RANKS_NAMED)} more" if len(ranks) > MOST_RANKS_NAMED else ""
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:MOST_RANKS_NAMED]))}{more}"


def stacks(hang: Json) -> list[tuple[str, list[str]]]:
    """Return ('Rank 3 stands at', its innermost frames) for the ranks that block, as far as their stacks are known."""
    known = list(hang.get("stacks", {}).items())[:MOST_STACKS]
    return [(f"Rank {rank} stands at", [clean(frame) for frame in frames[:MOST_FRAMES]]) for rank, frames in known]


def rows_of_grid(hang: Json) -> list[tuple[str, list[list[int]]]]:
    """Return the grid: per pipeline stage its name and its ranks, in groups of one replica.

    Of more than `MOST_CELLS` ranks only replicas with an origin or a deadlock
    are there.
    """
    mesh = Mesh(hang["mesh"])
    along = "pp" if mesh.sizes.get("pp", 1) > 1 else ""
    inner = [axis for axis in mesh.sizes if axis not in (along, "dp")]
    shown = _replicas(hang, mesh)
    rows = []
    for stage in range(mesh.size(along) if along else 1):
        groups = []
        for replica in shown:
            first = mesh.rank(**({along: stage} if along else {}), **({"dp": replica} if "dp" in mesh.sizes else {}))
            groups.append(mesh.group_of(first, *inner))
        rows.append((f"pp {stage}" if along else "", groups))
    return rows


def _replicas(hang: Json, mesh: Mesh) -> Sequence[int]:
    """Return the indices along dp that are drawn."""
    if "dp" not in mesh.sizes:
        return [0]
    if mesh.world_size <= MOST_CELLS:
        return range(mesh.size("dp"))
    odd = {mesh.coordinates(rank)["dp"] for rank, state in enumerate(hang["states"]) if state not in QUIET}
    return sorted(odd)[:16] or [0]


def _operations(hang: Json) -> list[tuple[str, list[int]]]:
    """Return (what ranks are in, the ranks), most ranks first."""
    ranks: dict[str, list[int]] = {}
    for rank, said in hang["ongoing"].items():
        ranks.setdefault(clean(said), []).append(int(rank))
    silent = [rank for rank, state in enumerate(hang["states"]) if state == "silent"]
    known = sorted(ranks.items(), key=lambda row: (-len(row[1]), row[1]))[:MOST_OPERATIONS]
    return [*known, *([("no report", silent)] if silent else [])]


def render_hang(hang: Json, *, source: str = "", **screen: Unpack[ScreenOptions]) -> str:
    """Return the screen of a `headway.hang/1` object: the verdict, the grid, what ranks are in."""
    mesh = Mesh(hang["mesh"])
    head = title("headway hang", f"{clean(source)} · {mesh.product()}".strip(" ·"), width=screen.get("width", 88))
    parts: list[RenderableType] = [head, ""]
    parts += [paragraph(sentence, style="bold") for sentence in sentences(hang)]
    for heading, frames in stacks(hang):
        parts += ["", Text(f"  {heading}", style="bold"), *(Text(f"    {frame}") for frame in frames)]
    rows = rows_of_grid(hang)
    if max(sum(map(len, groups)) + len(groups) for _, groups in rows) <= screen.get("width", 88) - 12:
        parts += ["", *_grid_lines(rows, hang["states"])]
    parts += ["", Text("  What ranks are in", style="bold")]
    table = grid("left", "fold")
    for said, ranks in _operations(hang):
        add_row(table, said, f"{plural(len(ranks), 'rank')}: {_ranks(ranks).partition(' ')[2]}")
    return draw([*parts, table], **screen)


def _grid_lines(rows: Sequence[tuple[str, list[list[int]]]], states: Sequence[str]) -> list[RenderableType]:
    """Return the grid, a sign per rank, and the legend of the signs in it."""
    lines: list[RenderableType] = []
    for name, groups in rows:
        line = Text(f"  {name:6}")
        for group in groups:
            for rank in group:
                line.append(*SIGNS[states[rank]])
            line.append(" ")
        lines.append(line)
    used = [state for state in SIGNS if state in {states[r] for _, groups in rows for group in groups for r in group}]
    legend = "   ".join(f"{SIGNS[state][0]} {MEANINGS[state]}" for state in used)
    return [*lines, Text(f"        {legend}", style="dim")]


def hang_part(hang: Json | None) -> str:
    """Return the section of the page, '' without a hang."""
    if not hang:
        return ""
    told = "".join(f"<li>{text(sentence)}</li>" for sentence in sentences(hang))
    stood = "".join(
        f'<p>{text(heading)}</p><pre class="mono">{text(NEWLINE.join(frames))}</pre>'
        for heading, frames in stacks(hang)
    )
    body = f"<ul>{told}</ul>{stood}{_picture(hang)}"
    rows = "".join(
        f'<tr><td class="mono">{text(said)}</td><td class="n">{len(ranks)}</td><td>{text(_ranks(ranks))}</td></tr>'
        for said, ranks in _operations(hang)
    )
    head = '<tr><th>Operation</th><th class="n">Ranks</th><th></th></tr>'
    lead = f"{plural(hang['world_size'], 'rank')}: {Mesh(hang['mesh']).product()}."
    return section("hang", "Where it hangs", lead, f'{body}<div class="scroll"><table>{head}{rows}</table></div>')


CELL, GAP, LABEL = 12, 6, 44
"""Pixels of a rank's square with its margin, between groups, and of a row's name."""


def _picture(hang: Json) -> str:
    """Return the grid as SVG: a square per rank, those that block filled and lettered."""
    rows, states, ongoing = rows_of_grid(hang), hang["states"], hang["ongoing"]
    drawn: list[str] = []
    width = 0
    for line, (name, groups) in enumerate(rows):
        y, x = line * (CELL + 2), LABEL
        drawn.append(f'<text x="0" y="{y + 10}" class="grid-name">{text(name)}</text>')
        for group in groups:
            for rank in group:
                said = ongoing.get(str(rank), "no report")
                hint = f"<title>rank {rank}: {MEANINGS[states[rank]]}, {text(said)}</title>"
                box = f'x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}"'
                drawn.append(f'<rect class="rank-{states[rank]}" {box}>{hint}</rect>')
                if states[rank] not in QUIET:
                    drawn.append(f'<text x="{x + 2}" y="{y + 9}" class="grid-sign">{SIGNS[states[rank]][0]}</text>')
                x += CELL
            x += GAP
        width = max(width, x)
    height = len(rows) * (CELL + 2)
    label = text(" ".join(sentences(hang)))
    used = [state for state in SIGNS if state in states]
    keys = "".join(
        f'<li><svg class="swatch" width="11" height="11" aria-hidden="true"><rect class="rank-{state}" width="10" '
        f'height="10"/></svg>{"" if state in QUIET else SIGNS[state][0] + " "}{MEANINGS[state]}</li>'
        for state in used
    )
    picture = f'<svg width="{width}" height="{height}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'
    return f'<div class="scroll" tabindex="0">{picture}</div><ul class="legend">{keys}</ul>'


MOST_OUTLIERS = 5
"""Machines named; the rest is counted."""


def machine_lines(entry: MachinesRow) -> list[str]:
    """Return one sentence per machine that stands out, or the one that says none does; [] where too few compare."""
    known = {name: value for name, raw in entry.slowdown.items() if (value := finite(raw))}
    if len(known) < LEAST_MACHINES:
        return []
    odd = entry.outliers
    lines = [
        f"{clean(row.machine)} computes {speedup(row.slowdown)} as long as its peers "
        f"({plural(len(row.ranks), 'rank')}): the job waited for it {device_seconds(row.lost_s)} at most"
        for row in odd[:MOST_OUTLIERS]
    ]
    if len(odd) > MOST_OUTLIERS:
        lines.append(f"and {count(len(odd) - MOST_OUTLIERS)} more of {count(len(known))} machines")
    if not lines:
        slowest = max(known, key=lambda name: known[name])
        lines = [f"none stands out of {count(len(known))}; the slowest is {clean(slowest)}, {speedup(known[slowest])}"]
    return lines


def machines_part(entry: MachinesRow) -> str:
    """Return the sentences as a section of the page, '' without machines."""
    lines = machine_lines(entry)
    body = "".join(f"<li>{text(line)}</li>" for line in lines)
    lead = f"Mean forward and backward time, {BASES.get(entry.basis, '')}." if lines else ""
    return section("machines", "Machines", lead, f"<ul>{body}</ul>" if lines else "")


def machine_heat_maps(times: MachineTimes | None, where: dict[int, tuple[int, int]]) -> list[HeatMap]:
    """Return forward and backward slowdowns as matrices.

    `where` maps ranks to (dp, pp); with it there is a dp x pp map per pass,
    else one with a row per rank, of machine after machine.
    """
    if times is None or len(times.ranks) < 2:
        return []
    if all(rank in where for rank in times.ranks.tolist()):
        return [_grid(times, where, column, name) for column, name in enumerate(("forward", "backward"))]
    order = np.argsort(times.machine_of, kind="stable")
    names = [f"{rank}" for rank in times.ranks.tolist()]
    if len(times.machines) < len(names):
        names = [f"{name} ({times.machines[m]})" for name, m in zip(names, times.machine_of.tolist(), strict=True)]
    ordered = tuple(names[index] for index in order.tolist())
    title = "Mean time of a forward and of a backward against ranks with the same work"
    return [HeatMap(title, times.slowdown[order], "rank", "", ordered, ("forward", "backward"))]


def _grid(times: MachineTimes, where: dict[int, tuple[int, int]], column: int, name: str) -> HeatMap:
    """Return the dp x pp map of one pass; of several ranks in one place the slowest."""
    dps, pps = (sorted({place[axis] for place in where.values()}) for axis in (0, 1))
    values = np.full((len(dps), len(pps)), np.nan)
    for rank, slowdown in zip(times.ranks.tolist(), times.slowdown[:, column].tolist(), strict=True):
        place = dps.index(where[rank][0]), pps.index(where[rank][1])
        values[place] = np.fmax(values[place], slowdown)
    title = f"Mean {name} time of each worker against the median of its stage"
    return HeatMap(title, values, "dp", "pp", tuple(map(str, dps)), tuple(map(str, pps)))
