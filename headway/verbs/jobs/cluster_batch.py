"""`headway cluster batch`: the batch size with which a recorded job learns most per second, and the plan for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from headway.cluster.adaptive.recorded import batch_answer, write_batch_plan
from headway.core.errors import InputError
from headway.core.files.planfile import granted
from headway.report.paper import ScreenOptions, add_row, draw, grid, paragraph, uncut
from headway.verbs.shared.output import emit
from headway.verbs.shared.source import run_at


def batch(
    run: Path | None = None, /, *, also: str = "", batch_size: int = 0, largest: int = 0, micro_most: int = 0,
    devices: int = 0, out: Path | None = None, allow: str | None = None, json: bool = False,
) -> int:  # fmt: skip
    """Find the batch size, accumulation and number of devices with the most useful examples per second.

    Useful: throughput times how much of it still teaches something, by the noise scale of the gradients. A run that
    has no noise scale is ranked by throughput alone; the plan that --out writes then measures it.

    Example: `headway cluster batch headway-runs/train-1 --out batch.json --allow lossy`

    Parameters
    ----------
    run
        A run folder; the newest one by default.
    also
        Further run folders of the same job with other batches or ranks, separated by commas: they fit the speed.
    batch_size
        Examples per rank and step, where no loader says it.
    largest
        Largest batch of all ranks; 16 times the recorded one by default.
    micro_most
        Most examples that fit a device at once; not limited by default: memory is not modelled.
    devices
        Devices that may be used; those of the run by default.
    out
        Write a plan for `headway run --apply`.
    allow
        'lossy': the plan may change the batch, which changes what is learned.
    json
        Print one JSON object instead of text.
    """
    if min(batch_size, largest, micro_most, devices) < 0:
        raise InputError("--batch-size, --largest, --micro-most and --devices must not be below 0; 0 = not given.")
    runs = [run_at(run), *(run_at(Path(name.strip())) for name in also.split(",") if name.strip())]
    result = batch_answer(
        runs, batch_size=batch_size, largest=largest, micro_most=micro_most, devices=devices
    )  # fmt: skip
    if out is not None:
        if result["noise_scale"] is not None and "lossy" not in granted(allow):
            raise InputError("another batch size changes what is learned. Grant it: --allow lossy, or drop --out.")
        result["plan"] = {"path": str(out), "does": write_batch_plan(result, out, str(runs[0].path))}
    emit(result, lambda screen: _screen(result, screen), as_json=json)
    return 0


def _screen(result: Mapping[str, Any], screen: ScreenOptions) -> str:
    """Draw a row per number of devices."""
    noise, now, best = result["noise_scale"], result["now"], result["best"]
    rows = grid("left", "right", "right", "right", "right", "right")
    add_row(rows, "devices", "batch", "of each", "accumulated", "step, s", "useful examples/s", style="dim")
    for row in result["table"]:
        cells = [f"{row[key]:,}" for key in ("num_replicas", "batch_size", "microbatch_size", "accumulation")]
        style = "bold" if row == best else ""
        add_row(rows, *cells, f"{row['step_s']:.4g}", f"{row['useful_examples_per_s']:,.1f}", style=style)
    words = [f"Now: a batch of {now['batch_size']:,}, {now['useful_examples_per_s']:,.1f} useful examples per second."]
    if now["predicted_useful_examples_per_s"]:
        words.append(f"The plan in force promised {now['predicted_useful_examples_per_s']:,.1f}.")
    if noise is None:
        words.append("No noise scale was measured: throughput only. --out PLAN writes a plan that measures it.")
    else:
        kind = ", from consecutive gradients (biased)" if result["biased"] else ""
        words.append(f"Noise scale: {noise:,.0f} examples, from {result['noise_steps']:,} steps{kind}.")
    if result["skipped_steps"]:
        words.append(f"{result['skipped_steps']:,} steps had gradients that were not finite, and are left out.")
    if result["num_configurations"] < 2:
        words.append("The speed is fitted to one configuration, and optimistic for others: --also RUN adds some.")
    if "plan" in result:
        words.append(
            f"{result['plan']['path']} {result['plan']['does']}: headway run --apply {result['plan']['path']}."
        )
    head = Text(f"  best: {best['batch_size']:,} on {best['num_replicas']}, by {result['basis']}")
    return draw([head, "", uncut(rows), "", *(paragraph(word) for word in words)], **screen)
