"""The hang view: which ranks block a job, on the grid of its parallel axes, and what every rank is in.

Both forms take the `headway.hang/1` object: `render_hang` returns terminal
text, `hang_part` a section of the HTML page. The grid has a row per pipeline
stage and a column per rank of that stage, in groups of the last axis.

>>> hung = {"mesh": {"tp": 1, "dp": 2}, "world_size": 2, "states": ["waiting", "silent"], "deadlocks": [],
...         "origins": [{"ranks": [1], "coordinates": [{"tp": 0, "dp": 1}], "reason": "silent", "num_waiting": 1,
...                      "awaited": "all_reduce 7 of group dp"}], "ongoing": {"0": "all_reduce 7 of group dp"}}
>>> sentences(hung)
['Rank 1 (dp 1) is silent; 1 rank waits for it, in all_reduce 7 of group dp.']
>>> print(render_hang(hung, width=60, unicode=False).splitlines()[-1])
  no report                 1 rank: 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from rich.console import RenderableType
from rich.text import Text

from headway.core.mesh import Mesh
from headway.core.units import clean, count, plural
from headway.report.page.sections import section, text
from headway.report.paper import ScreenOptions, add_row, draw, grid, paragraph, title
from headway.why.answer import Json

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
    "waiting": ("·", "dim"),
    "busy": ("-", "dim"),
    "silent": ("X", "bold red"),
    "absent": ("A", "bold red"),
    "differs": ("M", "bold red"),
    "stuck": ("S", "bold red"),
    "deadlock": ("D", "bold red"),
}
"""State of a rank -> its sign on the terminal's grid, and its style."""

QUIET = ("waiting", "busy")
"""States of ranks that block nobody."""

MEANINGS: dict[str, str] = {
    "waiting": "waits",
    "busy": "busy",
    "silent": "silent",
    "absent": "has not entered",
    "differs": "in another collective",
    "stuck": "entered, does not end",
    "deadlock": "waits in a circle",
}
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
    alone = [
        f"Rank {rank} is in {clean(doing)}." for rank, doing in list(hang.get("explained", {}).items())[:MOST_ORIGINS]
    ]
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
