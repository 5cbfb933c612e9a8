"""`headway data profile` and `headway data plan`: how an input pipeline should run, and why."""

from __future__ import annotations

import json as jsonlib
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from headway.core.errors import InputError
from headway.core.files.safe_files import whole_file
from headway.core.machine.host import host_cores
from headway.core.tables import pick
from headway.core.units import parse_bytes
from headway.data.pipeline.operators import ops_text, read_ops, read_stats, stats_text
from headway.data.pipeline.optimize import Op, PipelinePlan, PipelineProfile, Resources, op_costs
from headway.data.pipeline.optimize import plan as best_plan
from headway.report.paper import ScreenOptions, add_row, draw, headed, paragraph
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import GivenPath, Size


def plan(
    pipeline: str | None = None, /, *, stats: GivenPath | None = None, ops: GivenPath | None = None,
    cores: int | None = None, slots: int = 32, variant: str | None = None, target: float | None = None,
    cache: Size = "0", examples: int = 0, explain: bool = False, check: bool = False, out: GivenPath | None = None,
    json: AsJson = False,
) -> int:  # fmt: skip
    """Choose order, cache, workers, offload and fusion of an input pipeline from its profile.

    The profile is a file (--stats with --ops), or measured on the spot on a
    headway.data.Pipeline, named as FILE.py:NAME. Every order that the
    declared dependencies allow is compared. Exit code 3 when --check finds
    that the chosen order changes an example.

    Example: `headway data plan --stats cedar_remote.yaml --ops simclrv2.toml --explain`

    Example: `headway data plan train.py:pipeline --check`

    Args:
      pipeline: FILE.py:NAME of a headway.data.Pipeline.
      stats: Profile in cedar's YAML layout; `headway data profile` writes one.
      ops: TOML file with one [[op]] row per operator: id, name, depends_on, fixed, random, source.
      cores: Cores of the host that trains; 8 for a profile (the published set-up), those of this host for a pipeline.
      slots: Actors that may run elsewhere, together; 0 when there are no other machines.
      variant: Where slices may run, as the profile calls it; RAY by default.
      target: Examples/s that training consumes; as fast as it goes by default.
      cache: Free space for a cache, such as 100GB: on disk, in memory for a pipeline.
      examples: Examples of the dataset, which a cache must hold.
      explain: Print why, decision by decision.
      check: With a pipeline: run 64 examples in both orders and compare them bit by bit.
      out: Write the plan there, as JSON.
    """
    loaded = _pipeline(pipeline) if pipeline is not None else None
    given = cores if cores is not None else Resources().cores if loaded is None else host_cores()
    resources = Resources(given, slots, variant or Resources().variant, target, parse_bytes(cache), examples)
    if loaded is None and check:
        raise InputError("--check runs examples: it needs a pipeline. Pass FILE.py:NAME.")
    declared, profile = _measured(loaded, stats, ops)
    if variant is not None:
        pick(profile.offloaded, variant, "variant of this profile")
    if loaded is not None and resources.cache_bytes and not examples:
        resources = replace(resources, num_examples=len(loaded))
    chosen = best_plan(declared, profile, resources)
    if out is not None:
        _write(out, jsonlib.dumps(chosen.to_json()) + "\n")
    answer = plan_answer(chosen, explain=explain)
    if loaded is not None and check:
        answer["check"] = loaded.check(chosen).to_json()
    emit(answer, lambda screen: _screen(answer, chosen, declared, profile, screen), as_json=json)
    return 0 if answer.get("check", {}).get("equal", True) else 3


def _measured(pipeline: Any, stats: Path | None, ops: Path | None) -> tuple[Sequence[Op], PipelineProfile]:
    """Return operators and profile, from a pipeline or from the two files. Raises `InputError` on neither, or both."""
    if pipeline is not None:
        if stats or ops:
            raise InputError("a pipeline and --stats or --ops exclude each other. Drop one.")
        return pipeline.ops(), pipeline.profile()
    if stats is None or ops is None:
        raise InputError(
            "there is nothing to plan. Pass --stats FILE.yaml with --ops OPS.toml, or a pipeline FILE.py:NAME."
        )
    return read_ops(ops), read_stats(stats)


def plan_answer(chosen: PipelinePlan, *, explain: bool = False) -> dict[str, Any]:
    """Return what `headway data plan --json` prints: milliseconds, and per slice its first operator's id as key."""
    answer: dict[str, Any] = {
        "schema": "headway.data-plan/1", "cost_ms": 1000 * chosen.cost_s, "baseline_ms": 1000 * chosen.baseline_s,
        "order": list(chosen.order), "fused": [list(part.ops) for part in chosen.slices],
        "submit_batch": {str(part.ops[0]): part.submit_batch for part in chosen.slices},
        "actors": {str(part.ops[0]): part.actors for part in chosen.slices}, "planned_ms": 1000 * chosen.planned_s,
        "orders": chosen.num_orders, "cache_after": chosen.cache_after, "workers": chosen.workers,
    }  # fmt: skip
    return answer | ({"why": list(chosen.reasons)} if explain else {})


def profile(pipeline: str, /, *, examples: int = 256, out: GivenPath | None = None, json: AsJson = False) -> int:
    """Measure what each operator of a headway.data.Pipeline costs: CPU time and bytes per example.

    With --out, two files are written that `headway data plan` reads:
    OUT.yaml (--stats) and OUT.toml (--ops).

    Example: `headway data profile train.py:pipeline --out images`

    Args:
      pipeline: FILE.py:NAME of a headway.data.Pipeline.
      examples: Examples to run.
      out: Path of the two files without their ending.
    """
    loaded = _pipeline(pipeline)
    measured: PipelineProfile = loaded.profile(examples)
    declared: tuple[Op, ...] = loaded.ops()
    rows: list[dict[str, Any]] = [
        {
            "id": op.id, "name": op.name, "seconds": measured.seconds[op.id], "in_bytes": measured.in_bytes[op.id],
            "out_bytes": measured.out_bytes[op.id], "depends_on": list(op.depends_on),
        }
        for op in declared
    ]  # fmt: skip
    answer = {"schema": "headway.data-profile/1", "examples_per_s": measured.examples_per_s, "ops": rows}
    if out is not None:
        _write(out.with_name(out.name + ".yaml"), stats_text(measured))
        _write(out.with_name(out.name + ".toml"), ops_text(declared))
    table = headed("id", "operator", "ms", "bytes in", "bytes out", align="right left right right right")
    for row in rows:
        cells = (f"{1000 * row['seconds']:.4g}", f"{row['in_bytes']:.0f}", f"{row['out_bytes']:.0f}")
        add_row(table, str(row["id"]), row["name"], *cells)
    return emit(answer, lambda screen: draw([table], **screen), as_json=json)


def _write(path: Path, text: str) -> None:
    with whole_file(path) as part:
        part.write_text(text)


def _pipeline(target: str) -> Any:
    """Return the pipeline called FILE.py:NAME. Raises `InputError` when it is not there."""
    file, _, name = target.rpartition(":")
    if not file.endswith(".py") or not Path(file).is_file():
        raise InputError(f"{target!r} names no pipeline. Pass FILE.py:NAME, with a Python file that is there.")
    found = runpy.run_path(file, run_name="headway_pipeline").get(name)
    if not all(hasattr(found, method) for method in ("ops", "profile", "check")):
        raise InputError(f"{name!r} of {file} is {type(found).__name__}. Name a headway.data.Pipeline at module level.")
    return found


def _screen(
    answer: Mapping[str, Any], chosen: PipelinePlan, ops: Sequence[Op], profile: PipelineProfile, screen: ScreenOptions
) -> str:
    """Return the plan as a table, and the reasons when they were asked for."""
    names = {op.id: op.name for op in ops}
    costs, place = op_costs(profile, chosen.order), {op: part for part in chosen.slices for op in part.ops}
    table = headed("id", "operator", "ms", "where", align="right left right left")
    for op in chosen.order:
        where = f"{place[op].variant} (with {len(place[op].ops) - 1} more)" if op in place else "worker"
        add_row(table, str(op), names[op], f"{1000 * costs[op]:.4g}", where)
    head = f"  {answer['cost_ms']:.4g} ms per example and core, {answer['baseline_ms']:.4g} as written"
    parts: list[Any] = [Text(head, style="bold"), table]
    parts.append(paragraph(f"With cache, offload and fusion: {answer['planned_ms']:.4g} ms, {chosen.workers} workers."))
    parts += [paragraph(line.strip()) for line in answer.get("why", ())]
    if "check" in answer:
        found = answer["check"]
        verdict = "equal bit by bit" if found["equal"] else f"DIFFERENT, by {found['largest_difference']:.4g} at most"
        parts.append(Text(f"  {found['examples']} examples in both orders: {verdict}.", style="bold"))
    return draw(parts, **screen)
