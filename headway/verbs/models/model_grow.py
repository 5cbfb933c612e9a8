"""`headway model grow`: a larger model that starts at a trained smaller one's outputs."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
from cyclopts import Parameter

from headway.core.errors import InputError
from headway.core.files.bounded_json import decode_json, read_json
from headway.core.units import plural
from headway.report.paper import ScreenOptions, draw, paragraph
from headway.verbs.models.growth_plan import growth_plan, screen_of_plan
from headway.verbs.shared.output import emit
from headway.verbs.stored.ckpt_convert import checkpoint_at

if TYPE_CHECKING:
    from headway.model.growth.torch_saved import Grown


GROWING = {
    "MODULE:BUILD": "", "--small": "", "--large": "", "--checkpoint": None, "-o": None, "--family": "auto",
    "--depth": "zero", "--split": "random", "--prefix": None, "--seed": 0,
}  # fmt: skip
"""What only growing takes, with the defaults."""

PLANNING = {"--model": "", "--budget": math.inf}
"""What only --plan takes."""


def grow(
    target: str = "",
    /,
    *,
    small: str = "",
    large: str = "",
    checkpoint: Path | None = None,
    out: Annotated[Path | None, Parameter(alias="-o")] = None,
    family: str = "auto",
    depth: str = "zero",
    split: str = "random",
    prefix: str | None = None,
    seed: int = 0,
    plan: Path | None = None,
    model: str = "",
    budget: float = math.inf,
    json: bool = False,
) -> int:
    """Write a larger model whose outputs are those of a trained smaller one; or propose how large.

    Both are run on drawn inputs and compared. The head size stays; where norms come after the addition, the width must
    be a multiple. The optimizer's state is not grown: it starts afresh.

    Example: `headway model grow my.model:build --small s.json --large l.json --checkpoint runs/s -o runs/l/step-0`

    Parameters
    ----------
    target
        MODULE:BUILD of a function, or class, that returns the model.
    small
        Its arguments for the trained model: a JSON object, or the path of a file with one.
    large
        Its arguments for the larger model.
    checkpoint
        A checkpoint, headway's or torch's, of a run its newest one; or a .safetensors, .pt, .pth, .bin or .ckpt file.
    out
        What to write: a file that ends in .safetensors, .pt, .pth, .bin or .ckpt, or a checkpoint's folder. It must
        not exist.
    family
        Names of the parameters: gpt2, llama, bert, vit, torch, or one that was added; found by default.
    depth
        What new blocks write at first: zero, or weights that cancel over copies.
    split
        Weights of copies: random, so that they learn to differ, or equal.
    prefix
        What comes before the model's names in the checkpoint; found by default.
    seed
        Of what is drawn.
    plan
        Nothing is grown: propose a size, and a share of the schedule, from the losses of this recorded run.
        `headway compare` with the run of the grown model says what it took.
    model
        With --plan: the shape that was trained, as in `headway why --model layers=12,hidden=768,...`.
    budget
        With --plan: the most FLOPs for the grown model.
    json
        Print one JSON object instead of text.
    """
    _one_mode(plan, (target, small, large, checkpoint, out, family, depth, split, prefix, seed), (model, budget))
    if plan is not None:
        made = growth_plan(plan, model, budget)
        emit(msgspec.to_builtins(made), lambda screen: screen_of_plan(made, screen), as_json=json)
        return 0
    checkpoint, out = _given(target, small, large, checkpoint, out)
    from headway.checkpoint.torch_dcp.sources import open_source
    from headway.model.growth.torch_saved import grow_saved

    build, sizes = _imported(target), (_sizes("--small", small), _sizes("--large", large))
    if out.exists():
        raise InputError(f"{out} exists already; nothing is written over. Remove it, or name another place.")
    with open_source(checkpoint_at(checkpoint) if checkpoint.is_dir() else checkpoint) as source:
        grown = grow_saved(
            build, sizes, source, prefix=prefix, family=family, depth=cast(Any, depth), split=cast(Any, split),
            seed=seed,
        )  # fmt: skip
    answer = _written(grown, out)
    emit(answer, lambda screen: _screen(answer, screen), as_json=json)
    return 0


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
    absent = [name for name, value in given.items() if not value]
    if checkpoint is None or out is None or absent:
        raise InputError(
            f"{', '.join(absent)} is missing. Give all of {', '.join(given)}; or --plan RUN for a proposal."
        )
    return checkpoint, out


def _imported(target: str) -> Any:
    """Return what MODULE:BUILD names."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise InputError(f"{target!r} names no model. Write MODULE:BUILD, such as my_project.model:build.")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"cannot import {target}: {error}. Run this where Python finds the module.") from error
    if not callable(found):
        raise InputError(f"{target} is a {type(found).__name__}. Name a function, or a class, that returns a module.")
    return found


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


def _screen(answer: dict[str, Any], screen: ScreenOptions) -> str:
    before, after = answer["parameters"]
    error = answer["max_relative_error"]
    compared = (
        answer["not_compared"] if error is None else f"outputs on drawn inputs differ by {error:.1e} of the largest"
    )
    parts = [
        paragraph(f"{answer['path']}: {plural(after, 'parameter')}, grown from {before:,} ({answer['family']})."),
        paragraph(compared),
    ]
    return draw(parts, **screen)
