"""Terminal screen of `headway trace align`: how far the clocks stood apart, how well they agree now.

Takes the object that the verb prints with `--json`. Offsets in seconds with
their unit, drift in ppm, residuals in us.

>>> rank = {"rank": 1, "host": "b", "offset_ns": -900, "drift_ppm": 1.5, "residual_us": 0.25, "moved_us": 0.0}
>>> print(render_alignment({"ranks": [rank], "violations_before": 2, "violations": 0, "meetings": 9},
...                        width=69))
headway trace align
<BLANKLINE>
  9 collectives and messages matched. Ends before what they waited
  for: 2 before, 0 after.
<BLANKLINE>
  rank  host   offset     drift  residual  moved
     1  b     -900 ns  +1.5 ppm   0.25 us      -

Terminal screen of `headway comm plan`: what to change about a training step, and what each change wins.

Takes the object that the verb prints with `--json`, times in seconds.

>>> move = {"name": "buckets", "what": "2 -> 9", "step_s": 0.08, "remedy": "comm.bucket", "how": "DDP: ..."}
>>> answer = {"base_step_s": 0.1, "step_s": 0.08, "predicted_speedup": 1.25, "moves": [move], "ranks": 2, "note": ""}
>>> print(render_optimised(answer, plan_path="plan.json", width=60))
headway comm plan
<BLANKLINE>
  100 ms -> 80 ms per step on 2 ranks, 1.25x (predicted)
<BLANKLINE>
  80 ms  buckets  2 -> 9
                  by --apply, or by hand: DDP: ...
<BLANKLINE>
  Next  headway run --apply plan.json -- train.py
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Unpack

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from headway.core.units import NS_PER_S, clean, count, finite, format_seconds, seconds, speedup
from headway.report.paper import ScreenOptions, add_row, command_line, draw, grid, paragraph, title
from headway.why.answer import Json

SHOWN = 32
"""Ranks in the table: the reference and those whose clocks were farthest off; `--json` has all."""


def render_alignment(answer: Json, *, source: str = "", target: str = "", **screen: Unpack[ScreenOptions]) -> str:
    """Return the screen of a `headway.trace-align/1` object, of `Alignment.to_json`."""
    parts: list[RenderableType] = [title("headway trace align", source, width=screen.get("width", 88)), ""]
    before, after = answer["violations_before"], answer["violations"]
    parts.append(
        paragraph(
            f"{count(answer['meetings'])} collectives and messages matched. "
            f"Ends before what they waited for: {count(before)} before, {count(after)} after."
        )
    )
    if before == 0:
        parts.append(paragraph("The clocks as recorded agree already: the offsets are informational.", style="dim"))
    if after:
        worst = format_seconds(float(answer["shortfall_us"]) / 1e6)
        text = f"No clocks fulfil their order: the estimate misses it by {worst} at most."
        parts.append(paragraph(text, style="bold red"))
    rows = answer["ranks"]
    ranked = sorted(rows[1:], key=lambda row: (-abs(int(row["offset_ns"])), int(row["rank"])))
    farthest = sorted([*rows[:1], *ranked[: SHOWN - 1]], key=lambda row: int(row["rank"]))
    parts += ["", _table(farthest)]
    if len(rows) > SHOWN:
        parts += ["", paragraph(f"{len(rows) - SHOWN} more ranks: see --json.", style="dim")]
    if target:
        parts += ["", paragraph(Text.assemble(("written  ", "dim"), clean(target)))]
    return draw(parts, **screen)


def _table(rows: Sequence[Json]) -> Table:
    hosts = any(row["host"] for row in rows)
    table = grid("right", "left", "right", "right", "right", "right")
    add_row(table, "rank", "host" if hosts else "", "offset", "drift", "residual", "moved", style="dim")
    for row in rows:
        drift, moved = finite(row["drift_ppm"]), finite(row["moved_us"])
        add_row(
            table,
            str(row["rank"]),
            clean(row["host"]),
            _signed(int(row["offset_ns"])),
            f"{drift:+.3g} ppm" if drift else "-",
            _time(finite(row["residual_us"])),
            _time(moved) if moved else "-",
        )
    return table


def _signed(offset_ns: int) -> str:
    """Return an offset in the unit that suits it.

    >>> _signed(-900), _signed(48_215_000), _signed(0)
    ('-900 ns', '+48.2 ms', '0')
    """
    if abs(offset_ns) < 1000:
        return f"{offset_ns:+d} ns" if offset_ns else "0"
    return f"{'+' if offset_ns > 0 else '-'}{format_seconds(abs(offset_ns) / NS_PER_S)}"


def _time(value_us: float | None) -> str:
    return "-" if value_us is None else format_seconds(value_us / 1e6)


# Terminal screen of `headway comm plan`: what to change about a training step, and what each change wins.


def render_optimised(answer: Json, *, source: str = "", plan_path: str = "", **screen: Unpack[ScreenOptions]) -> str:
    """Return the screen of a `headway.comm-plan/1` object.

    `plan_path` is where the plan was written, '' when there was nothing to write.
    """
    parts: list[RenderableType] = [title("headway comm plan", source, width=screen.get("width", 88)), ""]
    before, after = seconds(answer["base_step_s"]), seconds(answer["step_s"])
    gain = speedup(answer["predicted_speedup"])
    parts.append(paragraph(f"{before} -> {after} per step on {answer['ranks']} ranks, {gain} (predicted)"))
    if answer["moves"]:
        table = grid("right", "left", "fold")
        for row in answer["moves"]:
            by_hand = f"by hand: {clean(row['how'])}"
            how = f"by --apply, or {by_hand}" if row["remedy"] else by_hand
            add_row(table, seconds(row["step_s"]), clean(row["name"]), clean(row["what"]))
            add_row(table, "", "", how)
        parts += ["", table]
    if answer["note"]:
        parts += ["", paragraph(clean(answer["note"]), style="dim")]
    apply = f"headway run --apply {shlex.quote(clean(plan_path))} -- train.py"
    parts += ["", command_line("Next", apply) if plan_path else paragraph("No change is worth a plan.")]
    return draw(parts, **screen)
