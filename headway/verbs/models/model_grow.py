"""`headway model grow`: a larger model that starts at a trained smaller one's outputs.

`headway model grow --plan`: a size to grow a recorded run's model to, later judged by the run of the grown model.

The proposal is written into the folder of the run; `headway compare` reads it there, and says what training took.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
import numpy as np

from headway.core.errors import InputError
from headway.core.files.safe_files import decode_json, read_json, whole_file
from headway.core.units import plural
from headway.model.growth.proposal import fits, growths
from headway.report.paper import ScreenOptions, draw, paragraph
from headway.trace.recording.runs import Run
from headway.trace.rings.rank_tables import json_object, rank_tables
from headway.verbs.shared.output import AsJson, emit, imported
from headway.verbs.shared.run_options import GivenPath, OutPath, run_at
from headway.verbs.stored.ckpt_convert import checkpoint_at
from headway.why.model_flops import ModelSpec, mfu_entry

if TYPE_CHECKING:
    from headway.model.growth.apply import Grown

FILE = "growth.json"
"""A proposal, in the folder of the run that it was made for."""

WINDOW = 8
"""Points of a curve whose median counts as its loss there, where it has so many: those of single batches vary."""

TUNE = "model.tune"
"""The remedy whose trials train with other settings, and are taken back."""

BASIS = (
    "L = floor + scale / steps^exponent fitted to the run's losses, the floor falling with the weights as "
    "Kaplan et al. have it (exponent 0.076); LEMON itself took 43.3 % and 66.8 % of the steps for 8 times the weights"
)

NO_SAVING = "No larger size would save FLOPs: the loss still falls fast. Train this one for longer first."

NO_FLOOR = (
    "The losses of the run do not tell a floor yet, so nothing says what a larger model would gain. Train for longer "
    "first."
)
"""What `growths` returns no size for."""


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
    """Why no size is proposed; '' = the first one is. `sizes` may then be empty."""

    basis: str = BASIS
    schema: str = "headway.model-grow-plan/1"


def growth_plan(path: Path, model: str, budget: float) -> GrowthPlan:
    """Return larger sizes for the run at `path`, and write them there; `budget` in FLOPs. Raises `InputError`."""
    run = run_at(path)
    if _tuned(run):
        raise InputError(
            f"the losses of {path} are those of tuning too: its trials had other settings, and were taken back. Record "
            "the training with the settings that were found: headway run -- SCRIPT"
        )
    points = losses_of(run)
    if not points and any(run.facts.bad_losses.values()):
        raise InputError(f"the losses of {path} are not finite. Fix the training first, then record it again.")
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
    rate = mfu_entry(spec, steps_per_s=1.0, facts=run.facts, ranks=run.facts.world_size)
    sequences = rate["tokens_per_s"] / spec.model.sequence
    curves = fits(*np.array(points).T)
    last = curves[0].steps
    sizes = [
        Size(
            (large := each.model).layers, large.hidden, large.heads, large.kv_heads, large.ffn, large.num_parameters,
            each.share, each.share_range, max(1, round(each.share * last)), each.loss, each.flops, each.compute,
        )
        for each in growths(spec.model, curves, budget, sequences)
    ]  # fmt: skip
    saves = bool(sizes) and sizes[0].compute < 1
    plan = GrowthPlan(
        last, curves[0].at(last), rate["tokens_per_s"] * rate["flops_per_token"] * last, sizes,
        "" if saves else NO_SAVING if sizes else NO_FLOOR,
    )  # fmt: skip
    with whole_file(run.path / FILE) as draft:
        draft.write_bytes(msgspec.json.encode(plan))
    return plan


def losses_of(run: Run) -> list[tuple[int, float]]:
    """Return step, counted from 1, and loss of the lowest rank that has any, as far as they were recorded.

    Of several losses in one step, as of a closure that the optimizer calls again, the last one counts.
    """
    found = [table.losses for _, table in sorted(rank_tables(run.path).items())]
    return sorted(dict(next(filter(None, found), [])).items())


def _tuned(run: Run) -> bool:
    """Say whether losses of trials are among those of the run; a run that was killed has only its plan to tell it."""
    rows = [row for row in run.facts.applied if row.name == TUNE]
    if rows:
        return any(row.applied and (row.facts or {}).get("steps", 1) for row in rows)
    return any(row.get("name") == TUNE for row in json_object(run.path / "plan.json").get("remedies") or ())


def screen_of_plan(plan: GrowthPlan, screen: ScreenOptions) -> str:
    """Return the proposal in words."""
    steps = plural(plan.run_steps, "step")
    head = f"The run ends at a loss of {plan.run_loss:.4g} after {steps}, {plan.run_flops:.3g} FLOPs."
    advice = plan.reason or _advice(plan.sizes[0])
    rows = [
        f"{each.layers} x {each.hidden}: {each.share:.0%} of the steps, loss {each.loss:.4g}, {each.compute:.0%}"
        for each in plan.sizes[1:]
    ]
    return draw(map(paragraph, [head, advice, *rows, f"Basis: {plan.basis}."]), **screen)


def _advice(best: Size) -> str:
    low, high = best.share_range
    return (
        f"Grow to {best.layers} layers of {best.hidden} ({plural(best.heads, 'head')}, "
        f"{plural(best.parameters, 'parameter')}) and train for {best.share:.1%} of the schedule ({low:.0%} to "
        f"{high:.0%} as the losses vary): {plural(best.steps, 'step')}, {best.flops:.3g} FLOPs, to a loss of "
        f"{best.loss:.4g}. The run included that is {best.compute:.0%} of the FLOPs from scratch."
    )


def trained_parameters(run: Run) -> int:
    """Return the numbers that the optimizers of a run update; 0 where a run of an older headway does not say."""
    counts = run.parts.meta.get("parameters") or {}
    return 0 if None in counts.values() else sum(counts.values())


def judged_growth(before: Run, after: Run, steps: int) -> dict[str, object] | None:
    """Return what was proposed for `before` beside what `after` took in `steps`; None where nothing is to be said.

    A run of the same model is left out, and so are the run itself and one that was tuned.
    """
    if trained_parameters(before) == trained_parameters(after) != 0:
        return None
    if not (before.path / FILE).exists() or before.facts.run_id == after.facts.run_id or _tuned(after):
        return None
    plan = read_json(before.path / FILE, GrowthPlan, fix="Delete it, or run `headway model grow --plan` again.")
    points = losses_of(after)
    if plan.reason or not plan.sizes or not points:
        return None
    best, losses = plan.sizes[0], [loss for _, loss in points]
    window = max(1, min(WINDOW, sum(step <= best.steps for step, _ in points)))
    ends = range(window, len(points) + 1)
    met = next((end for end in ends if np.median(losses[end - window : end]) <= best.loss), None)
    return {
        "layers": best.layers, "hidden": best.hidden, "proposed_steps": best.steps, "proposed_loss": best.loss,
        "steps": steps, "loss": float(np.median(losses[-window:])),
        "reached_at": None if met is None else points[met - 1][0], "reached_in_first_window": met == window,
    }  # fmt: skip


def growth_sentence(row: dict[str, Any]) -> str:
    """Say in words what `judged_growth` returned."""
    if row["reached_at"] is None:
        reached = "not reached"
    elif row["reached_in_first_window"]:
        reached = f"reached within the first {plural(row['reached_at'], 'step')}"
    else:
        reached = f"first reached at step {row['reached_at']:,}"
    return (
        f"growth to {row['layers']} layers of {row['hidden']} was proposed with "
        f"{plural(row['proposed_steps'], 'step')} to a loss of {row['proposed_loss']:.4g}; if the second run is the "
        f"grown model, it took {row['steps']:,}, to {row['loss']:.4g} ({row['proposed_loss']:.4g} was {reached})"
    )


GROWING = {
    "MODULE:BUILD": "", "--small": "", "--large": "", "--checkpoint": None, "-o": None, "--family": "auto",
    "--depth": "zero", "--split": "random", "--prefix": None, "--seed": 0,
}  # fmt: skip
"""What only growing takes, with the defaults."""

PLANNING = {"--model": "", "--budget": math.inf}
"""What only --plan takes."""


def grow(
    target: str = "", /, *, small: str = "", large: str = "", checkpoint: GivenPath | None = None,
    out: OutPath | None = None, family: str = "auto", depth: str = "zero", split: str = "random",
    prefix: str | None = None, seed: int = 0, plan: GivenPath | None = None, model: str = "", budget: float = math.inf,
    json: AsJson = False,
) -> int:  # fmt: skip
    """Write a larger model whose outputs are those of a trained smaller one; or propose how large.

    Both are run on drawn inputs and compared. The head size stays; where norms come after the addition, the width must
    be a multiple. The optimizer's state is not grown: it starts afresh.

    Example: `headway model grow my.model:build --small s.json --large l.json --checkpoint runs/s -o runs/l/step-0`

    Args:
      target: MODULE:BUILD of a function, or class, that returns the model.
      small: Its arguments for the trained model: a JSON object, or the path of a file with one.
      large: Its arguments for the larger model.
      checkpoint:
        A checkpoint, headway's or torch's, of a run its newest one; or a .safetensors, .pt, .pth, .bin or .ckpt file.
      out:
        What to write: a file that ends in .safetensors, .pt, .pth, .bin or .ckpt, or a checkpoint's folder. It must
        not exist.
      family: Names of the parameters: gpt2, llama, bert, vit, torch, or one that was added; found by default.
      depth: What new blocks write at first: zero, or weights that cancel over copies.
      split: Weights of copies: random, so that they learn to differ, or equal.
      prefix: What comes before the model's names in the checkpoint; found by default.
      seed: Of what is drawn.
      plan:
        Nothing is grown: propose a size, and a share of the schedule, from the losses of this recorded run.
        `headway compare` with the run of the grown model says what it took.
      model: With --plan: the shape that was trained, as in `headway why --model layers=12,hidden=768,...`.
      budget: With --plan: the most FLOPs for the grown model.
    """
    _one_mode(plan, (target, small, large, checkpoint, out, family, depth, split, prefix, seed), (model, budget))
    if plan is not None:
        made = growth_plan(plan, model, budget)
        return emit(msgspec.to_builtins(made), lambda screen: screen_of_plan(made, screen), as_json=json)
    checkpoint, out = _given(target, small, large, checkpoint, out)
    from headway.checkpoint.torch_dcp.sources import open_source
    from headway.model.growth.apply import grow_saved

    build = imported(target, "my_project.model:build", absent="no model", form="MODULE:BUILD")
    if not callable(build):
        raise InputError(f"{target} is a {type(build).__name__}. Name a function, or a class, that returns a module.")
    sizes = (_sizes("--small", small), _sizes("--large", large))
    if out.exists():
        raise InputError(f"{out} exists already; nothing is written over. Remove it, or name another place.")
    with open_source(checkpoint_at(checkpoint) if checkpoint.is_dir() else checkpoint) as source:
        grown = grow_saved(
            build, sizes, source, prefix=prefix, family=family, depth=cast("Any", depth), split=cast("Any", split),
            seed=seed,
        )  # fmt: skip
    answer, (before, after), error = _written(grown, out), grown.parameters, grown.max_relative_error
    text = grown.not_compared if error is None else f"outputs on drawn inputs differ by {error:.1e} of the largest"
    head = f"{out}: {plural(after, 'parameter')}, grown from {before:,} ({grown.family})."
    return emit(answer, lambda screen: draw([paragraph(head), paragraph(text)], **screen), as_json=json)


def _written(grown: Grown, out: Path) -> dict[str, Any]:
    """Write the grown tensors to `out`, and return what the verb answers."""
    from headway.checkpoint.torch_dcp.convert import export, rewrite
    from headway.checkpoint.torch_dcp.sources import TORCH_SUFFIXES, StateSource

    state = StateSource(str(out), grown.state)
    if out.suffix in (".safetensors", *TORCH_SUFFIXES):
        export(state, out)
    else:
        rewrite(state, out, prefix=grown.prefix)
    return {
        "schema": "headway.model-grow/1", "max_relative_error": grown.max_relative_error,
        "parameters": list(grown.parameters), "path": str(out), "family": grown.family, "prefix": grown.prefix,
        "not_compared": grown.not_compared,
    }  # fmt: skip


def _one_mode(plan: Path | None, growing: Sequence[object], planning: Sequence[object]) -> None:
    """Raise `InputError` where something is given that the other mode takes; values are in the order of the tables."""
    table, values = (PLANNING, planning) if plan is None else (GROWING, growing)
    given = [name for (name, default), value in zip(table.items(), values, strict=True) if value != default]
    if given:
        mode = "without --plan RUN" if plan is None else "with --plan, which grows nothing"
        raise InputError(f"{', '.join(given)} says nothing {mode}. Omit {'it' if len(given) == 1 else 'them'}.")


def _given(target: str, small: str, large: str, checkpoint: Path | None, out: Path | None) -> tuple[Path, Path]:
    """Return the two paths. Raises `InputError` where something that growing needs is not given."""
    given = {"MODULE:BUILD": target, "--small": small, "--large": large, "--checkpoint": checkpoint, "-o": out}
    absent = ", ".join(name for name, value in given.items() if not value)
    if checkpoint is None or out is None or absent:
        raise InputError(f"{absent} is missing. Give all of {', '.join(given)}; or --plan RUN for a proposal.")
    return checkpoint, out


def _sizes(option: str, text: str) -> dict[str, Any]:
    """Return the arguments of one model."""
    fix = 'Pass a JSON object, such as {"width": 768}.'
    try:
        found = decode_json(text, option, fix=fix) if text.lstrip().startswith("{") else read_json(text, fix=fix)
    except (ValueError, OSError) as error:
        raise InputError(f"{option} is {text!r}: {error}. {fix}") from error
    if not isinstance(found, dict):
        raise InputError(f"{option} holds a {type(found).__name__}. {fix}")
    return found
