"""`headway model grow --plan`: a size to grow a recorded run's model to, later judged by the run of the grown model.

The proposal is written into the folder of the run; `headway compare` reads it there, and says what training took.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from headway.core.errors import InputError
from headway.core.files.bounded_json import read_json
from headway.core.files.whole_file import whole_file
from headway.core.units import plural
from headway.model.growth.proposal import Growth, fits, growths
from headway.report.paper import ScreenOptions, draw, paragraph
from headway.trace.recording.assemble import json_object
from headway.trace.recording.runs import Run
from headway.verbs.shared.model_flops import ModelSpec, mfu_entry
from headway.verbs.shared.source import run_at

FILE = "growth.json"
"""A proposal, in the folder of the run that it was made for."""

WINDOW = 8
"""Points of a curve whose median counts as its loss there: those of single batches vary."""

BASIS = (
    "L = floor + scale / steps^exponent fitted to the run's losses, the floor falling with the weights as "
    "Kaplan et al. have it (exponent 0.076); LEMON itself took 43.3 % and 66.8 % of the steps for 8 times the weights"
)


NO_SAVING = "No larger size would save FLOPs: the loss still falls fast. Train this one for longer first."


class Size(msgspec.Struct, frozen=True):
    """One larger size."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    parameters: int
    share: float
    """Of the schedule from scratch, in (0, 1)."""

    share_range: tuple[float, float]
    """The same over all curves that the losses do not tell apart."""

    steps: Annotated[int, msgspec.Meta(ge=1)]
    """That share of the recorded run's steps."""

    loss: float
    """Predicted at their end, as from scratch at the end of the whole schedule."""

    flops: float
    """Of these steps."""

    compute: float
    """FLOPs of the recorded run and of these steps, as a fraction of those from scratch."""


class GrowthPlan(msgspec.Struct, frozen=True):
    """What is proposed."""

    run_steps: int
    run_loss: float
    """Of the fitted curve, at the end of the run."""

    run_flops: float
    sizes: list[Size]
    """What saves most is first."""

    reason: str
    """Why no size is proposed; '' = the first one is."""

    basis: str = BASIS
    schema: str = "headway.model-grow-plan/1"


def growth_plan(path: Path, model: str, budget: float) -> GrowthPlan:
    """Return larger sizes for the run at `path`, and write them there; `budget` in FLOPs. Raises `InputError`."""
    run = run_at(path)
    points = losses_of(run)
    if not points:
        raise InputError(
            f"{path} has no losses. They are recorded where backward() begins at a loss of one element on the CPU, one "
            "in eight updates; a run of an earlier version has none. Record it again: headway run -- SCRIPT"
        )
    if not model:
        raise InputError(
            "a step's FLOPs follow from the shape of the model, which the run does not know. Add it: --model "
            "layers=12,hidden=768,heads=12,sequence=1024,vocabulary=50257"
        )
    spec = ModelSpec.parse(model)
    rate = mfu_entry(spec, steps_per_s=1.0, facts=run.meta, ranks=int(run.meta.get("world_size") or 1))
    sequences = rate["tokens_per_s"] / spec.model.sequence
    curves = fits(*np.array(points).T)
    last = curves[0].steps
    sizes = [_size(each, last, sequences) for each in growths(spec.model, curves, budget / sequences)]
    saves = sizes[0].compute < 1
    plan = GrowthPlan(
        last, curves[0].at(last), rate["tokens_per_s"] * rate["flops_per_token"] * last, sizes,
        "" if saves else NO_SAVING,
    )  # fmt: skip
    with whole_file(run.path / FILE) as draft:
        draft.write_bytes(msgspec.json.encode(plan))
    return plan


def losses_of(run: Run) -> list[tuple[int, float]]:
    """Return step, counted from 1, and loss of the lowest rank that has any, as far as they were recorded."""
    files = sorted((run.path / "tables").glob("r*.json"), key=lambda file: int(file.stem[1:]))
    found = (json_object(file).get("losses") for file in files)
    return [(int(step), float(loss)) for step, loss in next((rows for rows in found if rows), [])]


def _size(growth: Growth, steps: int, sequences: float) -> Size:
    large = growth.model
    return Size(
        large.layers, large.hidden, large.heads, large.kv_heads, large.ffn, large.num_parameters, growth.share,
        growth.share_range, max(1, round(growth.share * steps)), growth.loss, growth.flops * sequences, growth.compute,
    )  # fmt: skip


def screen_of_plan(plan: GrowthPlan, screen: ScreenOptions) -> str:
    """Return the proposal in words."""
    steps = plural(plan.run_steps, "step")
    head = f"The run ends at a loss of {plan.run_loss:.4g} after {steps}, {plan.run_flops:.3g} FLOPs."
    best = plan.sizes[0]
    low, high = best.share_range
    advice = plan.reason or (
        f"Grow to {best.layers} layers of {best.hidden} ({best.heads} heads, {best.parameters:,} parameters) and train "
        f"for {best.share:.1%} of the schedule ({low:.0%} to {high:.0%} as the losses vary): {best.steps:,} steps, "
        f"{best.flops:.3g} FLOPs, to a loss of {best.loss:.4g}. The run included that is {best.compute:.0%} of the "
        "FLOPs from scratch."
    )
    rows = [
        paragraph(
            f"{each.layers} x {each.hidden}: {each.share:.0%} of the steps, loss {each.loss:.4g}, {each.compute:.0%}"
        )
        for each in plan.sizes[1:]
    ]
    return draw([paragraph(head), paragraph(advice), *rows, paragraph(f"Basis: {plan.basis}.")], **screen)


def judged_growth(before: Run, after: Run, steps: int) -> dict[str, Any] | None:
    """Return what was proposed for `before` beside what `after` took in its `steps`; None without either's losses."""
    if not (before.path / FILE).exists():
        return None
    plan = read_json(before.path / FILE, GrowthPlan, fix="Delete it, or run `headway model grow --plan` again.")
    points = losses_of(after)
    if plan.reason or len(points) < WINDOW:
        return None
    best, losses = plan.sizes[0], [loss for _, loss in points]
    reached = next(
        (points[end - 1][0] for end in range(WINDOW, len(points) + 1)
         if np.median(losses[end - WINDOW : end]) <= best.loss), None,
    )  # fmt: skip
    return {
        "layers": best.layers, "hidden": best.hidden, "proposed_steps": best.steps, "proposed_loss": best.loss,
        "steps": steps, "loss": float(np.median(losses[-WINDOW:])), "reached_at": reached,
    }  # fmt: skip


def growth_sentence(row: dict[str, Any]) -> str:
    """Say in words what `judged_growth` returned."""
    reached = f"first reached at step {row['reached_at']:,}" if row["reached_at"] is not None else "not reached"
    return (
        f"growth to {row['layers']} layers of {row['hidden']} was proposed with {row['proposed_steps']:,} steps to a "
        f"loss of {row['proposed_loss']:.4g}; the second run took {row['steps']:,}, to {row['loss']:.4g} "
        f"({row['proposed_loss']:.4g} was {reached})"
    )
