"""docs/compatibility.md, written from the kept result of `headway bench world`.

`python benchmarks/world/page.py` writes it; `headway bench world --keep` does so too.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
BAR_POINTS = 3.0

HEAD = """# Compatibility

Generated from `benchmarks/results/world.json` by `headway bench world --keep`; do not edit.

Frameworks and public training scripts that this project did not write, unedited. Each row runs four times: under a
clock of its own, which counts optimizer updates, backward passes and root forwards and times `next(loader)` and the
functions that the row names (an evaluation, a hand-made batch); under `headway run` and that clock, which gives both
sides' seconds of one run; under `headway run` alone; and with headway's own plan applied. Two shared CPU cores, no
accelerator, small random models, made-up data.

- *steps*: headway's / the clock's, per device.
- *losses*: whether what the script prints is equal to the digit under headway, and with the plan applied; `varies` =
  the script itself prints other numbers in a second plain run.
- *seen*: seconds that headway books / seconds of the clock, where they agree within 3 points of wall. `eval` is
  evaluation, sampling and generation; `script` is the script's own time between an update and the next forward;
  `either` is a rollout, which is one or the other; `input` is the wait for a DataLoader while training.
- *not seen*: the same where they differ by more, and what else is wrong.
- *plan*: what headway's plan promises -> what a second run measured, in steps per second. Runs this short leave little
  to win: start-up and evaluation stay.
"""

STAND_INS = """
torchvision, gymnasium (for the reinforce example), requests and tqdm (x-transformers) are replaced by small modules of
the benchmark's own: they make up data in place of a download, or end a loop whose length is a constant. Examples that
refuse to run without two accelerators (pytorch/examples: distributed/ddp, FSDP2, tensor_parallelism) are left out.
"""


def page(result: Mapping[str, Any]) -> str:
    """Return the text of docs/compatibility.md for a result of `bench world`."""
    rows = result["rows"]
    lines = [
        HEAD,
        f"{result['rows_met']} of {result['rows_run']} rows are as they should be ({result.get('date', 'not dated')}).",
        *([f"Not run this time: {', '.join(result['left_out'])}."] if result["left_out"] else []),
        "",
        "| what | version | steps | losses | with the plan | seen | not seen | plan |",
        "|---|---|---|---|---|---|---|---|",
        *(line(name, row) for name, row in rows.items()),
    ]
    return "\n".join(lines) + "\n" + STAND_INS


def line(name: str, row: Mapping[str, Any]) -> str:
    """Return one row of the table."""
    if "failed" in row:
        cells = [name, "", "", "", "", "", f"not run: {row['failed'].splitlines()[0][:200]}", ""]
        return f"| {' | '.join(cells)} |"
    steps, true_steps = row["steps"]
    devices, true_devices = row["devices"]
    cells = [
        name,
        row["version"],
        f"{steps} / {true_steps}" + (f" on {true_devices} devices" if true_devices > 1 else ""),
        equality(row["losses_equal"], row["deterministic"]),
        equality(row["applied_losses_equal"], row["deterministic"]),
        ", ".join(booked(row, seen=True)) or "-",
        ", ".join([
            *([f"{true_steps - steps} steps"] if steps != true_steps else []),
            *([f"{devices} devices, not {true_devices}"] if devices != true_devices else []),
            *booked(row, seen=False),
        ]) or "-",
        planned(row),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def planned(row: Mapping[str, Any]) -> str:
    """Return the cell about the plan: promised and measured, and why remedies did not stay in force to the end."""
    if not row["remedies"]:
        return "none"
    left = f"; not all of it to the end: {'; '.join(row['left'])}" if row.get("left") else ""
    return f"{row['promised']}x -> {row['measured']}x ({', '.join(row['remedies'])}{left})"


def booked(row: Mapping[str, Any], *, seen: bool) -> list[str]:
    """Return "eval 1.2 / 1.3 s" for each line of the account that agrees with the clock, or does not."""
    agree = {kind: abs(points) <= BAR_POINTS for kind, points in row["points_off"].items()}
    return [
        f"{kind} {ours_s:.2f} / {true_s:.2f} s"
        for kind, (ours_s, true_s) in row["seconds"].items()
        if agree[kind] == seen and (ours_s or true_s)
    ]


def equality(equal: bool | None, deterministic: bool) -> str:
    """Return a cell about losses."""
    if equal is None:
        return "no plan"
    return "equal" if equal else "**differ**" if deterministic else "varies"


if __name__ == "__main__":
    result = json.loads((ROOT / "benchmarks" / "results" / "world.json").read_text())
    (ROOT / "docs" / "compatibility.md").write_text(page(result))
