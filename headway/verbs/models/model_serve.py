"""`headway model serve`: which device of a cluster serves which layers of a language model, in how many bits."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import read_json, read_toml
from headway.core.tables import pick, suggestion
from headway.core.units import format_seconds
from headway.cost.specs import Specs, with_entries
from headway.cost.transformer import Transformer
from headway.model.serving.costs import BITS, LayerSeconds, ServingLoad, ServingRow, layer_omega, measured, roofline
from headway.model.serving.heuristic import transferred
from headway.model.serving.plan import BETWEEN_HOSTS, ServePlan, ServingGoal, serve_plan, serving_row
from headway.model.serving.times import pipelines
from headway.report.paper import ScreenOptions, add_row, draw, headed, paragraph, uncut
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import GivenPath

ENGINES = ("vllm",)
"""What --export writes for."""


def serve(
    *, layers: Path, cluster: Path, prompt: int, new: int, batch: int, bits: str = ",".join(map(str, BITS)),
    theta: float | None = None, gap: float = 1e-3, sensitivity: GivenPath | None = None,
    latency: GivenPath | None = None, heuristic: bool = False, export: str | None = None, json: AsJson = False,
) -> int:  # fmt: skip
    """Choose devices, layers, bits per layer and micro-batches to serve a model on unlike devices (LLM-PQ).

    One integer program for each order of devices and each pair of micro-batch sizes. All times are predicted. Without
    --theta the plan loses no more than the best uniform precision and is no slower.

    Example: `headway model serve --layers model.json --cluster hosts.toml --prompt 512 --new 100 --batch 32`

    Args:
      layers:
        A JSON file: layers, hidden, heads, sequence, vocabulary, and what else `headway.cost.transformer.Transformer`
        has.
      cluster:
        A TOML file with a [[device]] for each host: name in the table of devices, count, and link to other hosts
        (ethernet-10g by default); within a host the device's own link. [devices.NAME], [links.NAME] add to the tables.
      prompt: Tokens of a prompt.
      new: Tokens generated for each.
      batch: Sequences, served together.
      bits: Bits offered, separated by commas.
      theta: Seconds that one of the indicator is worth; 0 = as fast as can be.
      gap: How far the plan may be above the proven bound, as a share.
      sensitivity:
        A JSON file in place of the indicator: bits -> a number for each layer, such as {"4": [1.5, 2.0]}; what 16 bits
        lose is 0 where it is not given.
      latency:
        A JSON file in place of the roofline: a list of measured rows, each with device, bits, phase (prefill, decode,
        head), batch, tokens (of each prompt; behind which one more is made), seconds of one layer.
      heuristic: Say beside it what LLM-PQ's heuristic comes to.
      export: vllm: print VLLM_PP_LAYER_PARTITION for another engine instead.
    """
    if export is not None:
        pick(dict.fromkeys(ENGINES), export, "engine")
    specs, rows = _cluster(cluster)
    model, load, widths = _model(layers), ServingLoad(prompt, new, batch), _bits(bits)
    omega = None if sensitivity is None else _sensitivity(sensitivity, model.layers, widths)
    seconds = None if latency is None else _latency(latency, {row.device.name for row in rows}, specs)
    plan = serve_plan(model, rows, load, bits=widths, theta=theta, gap=gap, omega=omega, seconds=seconds)
    result = _result_of(plan)
    if heuristic:
        table = layer_omega(model, widths) if omega is None else omega
        limit = np.inf if theta is not None or plan.uniform is None else plan.uniform.omega
        quick = transferred(
            list(pipelines(model, rows, load, widths, seconds or roofline(model))),
            ServingGoal(table, theta or 0.0, limit),
        )
        result["heuristic"] = {
            "makespan_s": quick.makespan_s, "tokens_per_s": batch * new / quick.makespan_s, "omega": quick.omega(table)
        }  # fmt: skip
    if export is not None and not json:
        print(f"export {result['vllm']}")
        return 0
    return emit(result, lambda screen: _screen(result, plan, screen), as_json=json)


def _result_of(plan: ServePlan) -> dict[str, Any]:
    partition = ",".join(str(stage.last - stage.first + 1) for stage in plan.stages)
    stages = [
        {
            "device": stage.device, "layers": [stage.first, stage.last],
            "bits": stage.bits[0] if len(set(stage.bits)) == 1 else list(stage.bits),
        }
        for stage in plan.stages
    ]  # fmt: skip
    return {
        "schema": "headway.model-serve/1", "simulated": True, "stages": stages,
        "prefill_microbatch": plan.choice.costs.prefill_microbatch,
        "decode_microbatch": plan.choice.costs.decode_microbatch,
        "makespan_s": plan.choice.makespan_s, "tokens_per_s": plan.tokens_per_s, "omega": plan.omega,
        "theta": plan.theta, "objective": plan.objective, "bound": plan.bound, "solve_s": plan.solve_s,
        "uniform": msgspec.to_builtins(plan.uniform), "uniforms": msgspec.to_builtins(plan.uniforms),
        "vllm": f"VLLM_PP_LAYER_PARTITION={partition}",
    }  # fmt: skip


def _model(path: Path) -> Transformer:
    """Read a model's shape; raises `InputError` naming the key."""
    table = _json_object(path)
    known_fields = {field.name: field for field in fields(Transformer)}
    for key, value in table.items():
        needed = bool if isinstance(pick(known_fields, key, f"key of {path.name}").default, bool) else int
        if type(value) is not needed:
            raise InputError(
                f"{key} is {value!r} in {path.name}; give {'true or false' if needed is bool else 'a whole number'}."
            )
    for key, field in known_fields.items():
        if field.default is MISSING and key not in table:
            raise InputError(f"{path.name} has no {key}. Add it: layers, hidden, heads, sequence, vocabulary.")
    return Transformer(**table)


def _cluster(path: Path) -> tuple[Specs, list[ServingRow]]:
    """Read the rows of devices, with the tables that the file adds; raises `InputError` naming the row."""
    content = read_toml(path)
    rows = content.pop("device", [])
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise FormatError(f'{path.name} has no devices. Write them as [[device]] with name = "T4", count = 3.')
    specs = with_entries(content, path)
    cluster = []
    for number, row in enumerate(rows):
        for key in row:
            if key not in ("name", "count", "link"):
                raise FormatError(
                    f"{path.name}: device {number} has an unknown key {key!r}. "
                    f"{suggestion(('name', 'count', 'link'), key)}"
                )
        name, count, link = row.get("name"), row.get("count", 1), row.get("link", BETWEEN_HOSTS)
        if not isinstance(name, str) or type(count) is not int or not isinstance(link, str):
            raise FormatError(f"{path.name}: device {number} is {row}; write a name, a whole count and a link.")
        cluster.append(serving_row(specs, name, count, link))
    return specs, cluster


def _bits(text: str) -> tuple[int, ...]:
    """Return the bits offered, ascending."""
    try:
        return tuple(sorted({int(width) for width in text.split(",")}))
    except ValueError:
        raise InputError(f"--bits is {text!r}; write whole numbers separated by commas, such as 3,4,8,16.") from None


def _sensitivity(path: Path, layers: int, widths: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the indicator of a file, [layers, bits]; raises `FormatError` naming the bits."""
    table = _json_object(path)
    columns = []
    for width in widths:
        column: Any = table.get(str(width), [0.0] * layers if width >= 16 else None)
        fits = isinstance(column, list) and len(column) == layers
        if not fits or not all(type(value) in (int, float) for value in column):
            raise FormatError(
                f"{path.name} has {str(column)[:60]} for {width} bits; write a list of {layers} numbers, one per layer."
            )
        columns.append(column)
    return np.array(columns, np.float64).T


def _latency(path: Path, names: set[str], specs: Specs) -> LayerSeconds:
    """Return the latencies of a measured table; a device may be called as its driver does."""
    rows = _read(path)
    if not isinstance(rows, list) or not rows:
        raise FormatError(f"{path.name} has no rows. Write a list of objects with device, bits, phase, ..., seconds.")
    for row in rows:
        reported = specs.reported(str(row.get("device"))) if isinstance(row, dict) else None
        if reported is not None and reported.name in names:
            row["device"] = reported.name
    return measured(rows, path.name)


def _json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    content = _read(path)
    if not isinstance(content, dict):
        raise FormatError(f"{path.name} holds a {type(content).__name__}; write a JSON object.")
    return content


def _read(path: Path) -> Any:
    try:
        return read_json(path, fix="Correct the file.")
    except OSError as cause:
        raise InputError(f"cannot read {path}: {cause.strerror}. Give the path of a JSON file.") from cause


def _screen(result: dict[str, Any], plan: ServePlan, screen: ScreenOptions) -> str:
    rows = headed("stage", "device", "layers", "bits", align="right left right left")
    for number, stage in enumerate(plan.stages):
        counts = ", ".join(f"{stage.bits.count(width)} x {width}" for width in sorted(set(stage.bits), reverse=True))
        add_row(rows, str(number), stage.device, f"{stage.first}..{stage.last}", counts)
    compared = headed("", "tokens/s", "indicator")
    add_row(compared, "this plan", f"{plan.tokens_per_s:,.1f}", f"{plan.omega:.4g}", style="bold")
    for uniform in plan.uniforms:
        mark = ", the best" if uniform == plan.uniform else ""
        add_row(compared, f"all in {uniform.bits} bits{mark}", f"{uniform.tokens_per_s:,.1f}", f"{uniform.omega:.4g}")
    if quick := result.get("heuristic"):
        add_row(compared, "LLM-PQ's heuristic", f"{quick['tokens_per_s']:,.1f}", f"{quick['omega']:.4g}")
    text = (
        f"{format_seconds(plan.choice.makespan_s)} for the batch: prefill in micro-batches of "
        f"{result['prefill_microbatch']}, decode of {result['decode_microbatch']}. No plan is below "
        f"{plan.bound:.6g} (makespan + {plan.theta:.3g} x indicator, here {plan.objective:.6g}); proven in "
        f"{plan.solve_s:.1f} s of CPU."
    )
    head = Text(f"  {plan.tokens_per_s:,.1f} tokens per second, predicted")
    return draw([head, "", uncut(rows), "", uncut(compared), "", paragraph(text), paragraph(result["vllm"])], **screen)
