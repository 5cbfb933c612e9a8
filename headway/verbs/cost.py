"""`headway cost transfer|calibrate|predict`: what a new device, or a model's step, takes before it is measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from cyclopts import Parameter

from headway.core.errors import InputError
from headway.core.rng import stream
from headway.core.tables import pick
from headway.core.whole_file import whole_file
from headway.cost.learned.cost_table import MeasuredModel, check_host, read_table, step_costs
from headway.cost.learned.latency_table import LatencyTable
from headway.cost.learned.predictors import PREDICTORS, Transfer, mape, standardised
from headway.cost.learned.selection import SELECTIONS
from headway.report.paper import ScreenOptions, add_row, draw, grid, paragraph, uncut
from headway.sim.dag import Dag
from headway.sim.replay import replay
from headway.verbs.named import imported
from headway.verbs.output import emit

TABLE = Path("headway-costs.jsonl")
"""Where a calibration is written by default."""

PEERS = ("ridge", "one_hot")
"""Predictors that the answer always compares with."""


def transfer(
    *, data: Path, target: str, sources: str = "", samples: int = 10, seed: int = 0, predictor: str = "kernel",
    select: str = "clusters", json: bool = False,
) -> int:  # fmt: skip
    """Predict a device's latencies from a few of its samples, and say how wrong the predictions of the others are.

    The file holds every sample's latency on the target too: those that were
    not chosen are what the error is measured on.

    Example: `headway cost transfer --data fbnet.npz --target raspi4 --samples 10`

    Parameters
    ----------
    data
        NPZ file of ops [n, layers], op_names, settings [s] and latency_ms [s, n].
    target
        The setting that stands for the new device.
    sources
        Settings that are known in full, separated by commas; all others by default.
    samples
        Samples that are measured on the new device, at least 2.
    seed
        Seed of the choice of samples and of the learned weights.
    predictor
        kernel, ridge or one_hot.
    select
        How the samples are chosen: clusters (of the sources' latencies) or random.
    json
        Print one JSON object instead of text.
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
    known = Transfer(source_s, table.one_hot(), chosen, target_s[chosen], seed)
    errors = {name: mape(PREDICTORS[name](known), target_s, chosen) for name in {predictor, *PEERS}}
    result = {
        "schema": "headway.cost-transfer/1", "target": target, "sources": names, "mape": errors[predictor],
        "peers": {name: errors[name] for name in PEERS}, "predictor": predictor, "select": select,
        "chosen": chosen.tolist(),
    }  # fmt: skip
    emit(result, lambda screen: _transfer_screen(result, len(target_s), screen), as_json=json)
    return 0


def _transfer_screen(result: Mapping[str, Any], num_samples: int, screen: ScreenOptions) -> str:
    rows = grid("left", "right")
    add_row(rows, "predictor", "mean error, %", style="dim")
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
    *, out: Annotated[Path, Parameter(alias="-o")] = TABLE, models: int = 48, threads: int = 1, json: bool = False
) -> int:
    """Measure this host's operators and steps on small made-up models, under a second each.

    A model is written when it is done: interrupt it whenever you like; the same command goes on with the next one.

    Example: `headway cost calibrate -o costs.jsonl`

    Parameters
    ----------
    out
        The table, JSON Lines.
    models
        Models in all; perceptrons, convolutional nets and transformers take turns.
    threads
        Threads of one operator.
    json
        Print one JSON object instead of text.
    """
    from headway.cost.runtime.calibration import here, made_model, measure

    if models < 4:
        raise InputError(f"--models is {models}; pass at least 4.")
    host = here(_check_threads(threads))
    known: list[MeasuredModel] = []
    if out.exists():
        table, known = read_table(out)
        check_host(table, host, out)
    with whole_file(out) as draft:  # also without the torn line of a calibration that was killed
        draft.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in (host, *known)))
    numbers = sorted(set(range(models)) - {model.model for model in known})
    for number in numbers:
        known.append(measure(number, *made_model(number)))
        with out.open("ab") as file:
            file.write(msgspec.json.encode(known[-1]) + b"\n")
    result = {
        "schema": "headway.cost-calibrate/1", "file": str(out), "models": len(known), "measured_now": len(numbers),
        "operators": sum(len(model.operators) for model in known), "dropped": sum(model.dropped for model in known),
    }  # fmt: skip
    text = (
        f"{result['operators']:,} operators of {len(known)} models in {out} ({len(numbers)} measured now), "
        f"{result['dropped']} dropped as too noisy."
    )
    emit(result, lambda screen: draw([paragraph(text)], **screen), as_json=json)
    return 0


def predict(
    target: str, /, *, batch: int, costs: Path = TABLE, device: str = "cpu", threads: int = 1, json: bool = False
) -> int:
    """Predict the seconds of a model's training step (forward, backward, SGD) without running it.

    Example: `headway cost predict my_project.model:build --batch 32`

    Parameters
    ----------
    target
        MODULE:BUILD; build(batch) returns the module and its inputs, a tensor or a tuple. The loss is the module's
        output, or its sum.
    batch
        What build is called with.
    costs
        The table that `headway cost calibrate` wrote on this host.
    device
        The table's device; cpu is the only one that can be calibrated.
    threads
        Threads of one operator, as calibrated.
    json
        Print one JSON object instead of text.
    """
    pick({"cpu": None}, device, "device")
    if batch < 1:
        raise InputError(f"--batch is {batch}; pass at least 1.")
    if not costs.exists():
        raise InputError(f"there is no table {costs}. Write it: headway cost calibrate -o {costs}")
    from headway.cost.runtime.calibration import here
    from headway.cost.runtime.graph import graph_of

    table, models = read_table(costs)
    check_host(table, here(_check_threads(threads)), costs)
    graph = graph_of(*_built(target, batch))
    learned = step_costs(models)
    seconds = learned.operators.seconds(graph.operators)
    dag = Dag.from_edges(len(seconds), graph.src, graph.dst, lane=np.zeros(len(seconds), np.int32))
    operators_s = replay(dag, np.rint(1e9 * seconds).astype(np.int64)).makespan_ns / 1e9
    step_s, interval = learned.scaled(float(operators_s))
    rows: dict[str, list[float]] = {}
    for leaf, each in zip(graph.operators, seconds, strict=True):
        rows.setdefault(leaf.name, []).append(float(each))
    result = {
        "schema": "headway.cost-predict/1", "step_s": step_s, "interval": interval,
        "operators": [
            {"name": name, "calls": len(each), "seconds": sum(each)}
            for name, each in sorted(rows.items(), key=lambda row: -sum(row[1]))
        ],
        "basis": f"{len(models)} models measured on {table.host}, {table.threads} thread(s); the interval holds the "
        "steps of 80 % of them, each predicted from the others",
    }  # fmt: skip
    emit(result, lambda screen: _predict_screen(result, screen), as_json=json)
    return 0


def _check_threads(threads: int) -> int:
    if threads < 1:
        raise InputError(f"--threads is {threads}; pass at least 1.")
    return threads


def _built(target: str, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """Return the module that BUILD makes, and its inputs."""
    made = imported(target, "my_project.model:build")(batch)
    if not (isinstance(made, tuple) and len(made) == 2 and hasattr(made[0], "named_parameters")):
        raise InputError(f"{target} returned a {type(made).__name__}; return a pair: the module, and its inputs.")
    module, inputs = made
    return module, inputs if isinstance(inputs, tuple) else (inputs,)


def _predict_screen(result: Mapping[str, Any], screen: ScreenOptions) -> str:
    low, high = result["interval"]
    rows = grid("left", "right", "right")
    add_row(rows, "operator", "calls", "ms", style="dim")
    for row in result["operators"][:8]:
        add_row(rows, row["name"], f"{row['calls']}", f"{1e3 * row['seconds']:.3f}")
    text = f"Step {1e3 * result['step_s']:.2f} ms ({1e3 * low:.2f} to {1e3 * high:.2f}); basis: {result['basis']}."
    return draw([paragraph(text), "", uncut(rows)], **screen)
