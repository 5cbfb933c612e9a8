"""`headway cost transfer|calibrate|predict`: what a new device, or a model's step, takes before it is measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import InputError
from headway.core.files.safe_files import whole_file
from headway.core.rng import stream
from headway.core.tables import pick
from headway.cost.cost_table import CostTable, LatencyTable, add_line, check_host, read_table
from headway.cost.predictors import PREDICTORS, SELECTIONS, TransferTask, mape, standardised
from headway.report.paper import ScreenOptions, add_row, draw, headed, paragraph, uncut
from headway.verbs.shared.learned_step import TABLE, check_threads, learned_step
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import OutPath

DTYPES = {name: name for name in ("float32", "bfloat16", "float64")}
"""Precisions that can be calibrated."""

PEERS = ("ridge", "one_hot")
"""Predictors that the answer always compares with."""


def transfer(
    *, data: Path, target: str, sources: str = "", samples: int = 10, seed: int = 0, predictor: str = "kernel",
    select: str = "clusters", json: AsJson = False,
) -> int:  # fmt: skip
    """Predict a device's latencies from a few of its samples, and say how wrong the predictions of the others are.

    The file holds every sample's latency on the target too: those that were
    not chosen are what the error is measured on.

    Example: `headway cost transfer --data fbnet.npz --target raspi4 --samples 10`

    Args:
      data: NPZ file of ops [n, layers], op_names, settings [s] and latency_ms [s, n].
      target: The setting that stands for the new device.
      sources: Settings that are known in full, separated by commas; all others by default.
      samples: Samples that are measured on the new device, at least 2.
      seed: Seed of the choice of samples and of the learned weights.
      predictor: kernel, ridge, one_hot, tree (scikit-learn) or network (about 35 s).
      select: How the samples are chosen: clusters (of the sources' latencies) or random.
    """
    pick(PREDICTORS, predictor, "predictor")
    choose = pick(SELECTIONS, select, "selection")
    table = LatencyTable.read(data)
    (target_s,) = table.rows([target])
    names = [name.strip() for name in sources.split(",") if name.strip()]
    names = names or [name for name in table.settings if name != target]
    if target in names:
        raise InputError(f"{target} is the target and a source; drop it from --sources.")
    if not 2 <= samples < len(target_s):
        raise InputError(f"--samples is {samples}; pass at least 2 and at most {len(target_s) - 1}.")
    if not names:
        raise InputError(f"{data} has no setting but {target}; at least one source is needed. Add one.")
    source_s = table.rows(names)
    chosen = choose(standardised(source_s), samples, stream(seed, "chosen samples"))
    known = TransferTask(source_s, table.one_hot(), chosen, target_s[chosen], seed, table.ops.shape[1])
    errors = {name: mape(PREDICTORS[name](known), target_s, chosen) for name in {predictor, *PEERS}}
    result = {
        "schema": "headway.cost-transfer/1", "target": target, "sources": names, "mape": errors[predictor],
        "peers": {name: errors[name] for name in PEERS}, "predictor": predictor, "select": select,
        "chosen": chosen.tolist(),
    }  # fmt: skip
    return emit(result, lambda screen: _transfer_screen(result, len(target_s), screen), as_json=json)


def _transfer_screen(result: Mapping[str, Any], num_samples: int, screen: ScreenOptions) -> str:
    rows = headed("predictor", "mean error, %")
    add_row(rows, result["predictor"], f"{result['mape']:.2f}", style="bold")
    for name, error in result["peers"].items():
        if name != result["predictor"]:
            add_row(rows, name, f"{error:.2f}")
    measured = len(result["chosen"])
    text = (
        f"{result['target']} from {measured} measured samples (chosen by {result['select']}) and "
        f"{len(result['sources'])} other settings; errors on the {num_samples - measured:,} samples not chosen."
    )
    return draw([paragraph(text), "", uncut(rows)], **screen)


def calibrate(
    *, out: OutPath = TABLE, models: int = 48, threads: int = 1,
    dtypes: str = "float32", json: AsJson = False,
) -> int:  # fmt: skip
    """Measure this host's operators and steps on small made-up models, under a second each.

    A model is written when it is done: interrupt it whenever you like; the same command goes on with the next one.

    Example: `headway cost calibrate -o costs.jsonl`

    Args:
      out: The table, JSON Lines.
      models: Models in each precision; perceptrons, convolutional nets and transformers take turns.
      threads: Threads of one operator.
      dtypes: Precisions, separated by commas: float32, bfloat16, float64.
    """
    from headway.cost.torch_calibration import here, made_model, measure

    if models < 4:
        raise InputError(f"--models is {models}; pass at least 4.")
    precisions = [pick(DTYPES, name.strip(), "precision") for name in dtypes.split(",")]
    host = here(check_threads(threads))
    table = CostTable(host, [], [])
    if out.exists():
        table = read_table(out)
        check_host(table.host, host, out)
    with whole_file(out) as draft:  # also without the torn line of a calibration that was killed
        rows = (host, *table.models, *table.observed)
        draft.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in rows))
    done = {(model.model, model.dtype) for model in table.models}
    wanted = [key for number in range(models) for dtype in precisions if (key := (number, dtype)) not in done]
    for number, dtype in wanted:
        table.models.append(measure(number, *made_model(number, dtype=dtype), dtype=dtype))
        add_line(out, table.models[-1])
    known = table.models
    result = {
        "schema": "headway.cost-calibrate/1", "file": str(out), "models": len(known), "measured_now": len(wanted),
        "operators": sum(len(model.operators) for model in known), "dropped": sum(model.dropped for model in known),
    }  # fmt: skip
    text = (
        f"{result['operators']:,} operators of {len(known)} models in {out} ({len(wanted)} measured now), "
        f"{result['dropped']} dropped as too noisy."
    )
    return emit(result, lambda screen: draw([paragraph(text)], **screen), as_json=json)


def predict(
    target: str, /, *, batch: int, costs: Path = TABLE, device: str = "cpu", threads: int = 1, json: AsJson = False
) -> int:
    """Predict the seconds of a model's training step (forward, backward, SGD) without measuring it.

    Operators that the table lacks are timed in steps of the model, for at most 2 s, or estimated by their bytes.

    Example: `headway cost predict my_project.model:build --batch 32`

    Args:
      target:
        MODULE:BUILD; build(batch) returns the module and its inputs, a tensor or a tuple. The loss is the module's
        output, or its sum.
      batch: What build is called with.
      costs: The table that `headway cost calibrate` wrote on this host.
      device: The table's device; cpu is the only one that can be calibrated.
      threads: Threads of one operator, as calibrated.
    """
    pick({"cpu": None}, device, "device")
    result = msgspec.to_builtins(learned_step(target, batch, costs, threads))
    return emit(result, lambda screen: _predict_screen(result, screen), as_json=json)


def _predict_screen(result: Mapping[str, Any], screen: ScreenOptions) -> str:
    low, high = result["interval"]
    rows = headed("operator", "calls", "ms")
    for row in result["operators"][:8]:
        add_row(rows, row["name"], f"{row['calls']}", f"{1e3 * row['seconds']:.3f}")
    text = f"Step {1e3 * result['step_s']:.2f} ms ({1e3 * low:.2f} to {1e3 * high:.2f}); basis: {result['basis']}."
    return draw([paragraph(text), "", uncut(rows)], **screen)
