"""Terminal screen of `headway comm plan`: what to change about a training step, and what each change wins.

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
from typing import Unpack

from rich.console import RenderableType

from headway.report.answers import Json
from headway.report.figures import clean, seconds, speedup
from headway.report.paper import ScreenOptions, add_row, command_line, draw, grid, paragraph, title


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
