"""`headway cost transfer|calibrate|predict`: what a new device, or a model's step, takes before it is measured.

`headway plan` writes a predicted step into the run folder that had no step times; `headway compare` reads it there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from headway.core.errors import HeadwayError, InputError
from headway.core.files.safe_files import read_json, whole_file
from headway.core.rng import stream
from headway.core.tables import pick
from headway.core.units import NS_PER_S, format_seconds
from headway.cost.cost_table import (
    CostTable,
    LatencyTable,
    ObservedStep,
    Operator,
    add_line,
    check_host,
    read_table,
    step_costs,
)
from headway.cost.predictors import PREDICTORS, SELECTIONS, TransferTask, mape, standardised
from headway.ledger.answers.compare import is_full
from headway.ledger.answers.ledger import Ledger
from headway.ledger.buckets import BUCKETS
from headway.report.paper import ScreenOptions, add_row, draw, headed, paragraph, uncut
from headway.sim.graph.dag import Dag, replay
from headway.trace.recording.runs import Run
from headway.verbs.shared.output import AsJson, emit, imported
from headway.verbs.shared.run_options import OutPath

TABLE = Path("headway-costs.jsonl")
"""Where a calibration is written by default."""

FILE = "learned-step.json"
"""A prediction, in the run folder that it was made for."""

GUESS = 3.0
"""An operator that is estimated by its bytes may take this many times as long, or as short."""

QUIET = 0.1
"""Share of the steps that the measured time is not below: calibrations measure operators so."""


class OperatorRow(msgspec.Struct, frozen=True):
    """All calls of one operator."""

    name: str
    """As torch names it."""

    calls: int
    """How often a step calls it."""

    seconds: float
    """Of all calls."""


class LearnedStep(msgspec.Struct, frozen=True):
    """A predicted step: forward, backward, SGD."""

    target: str
    """MODULE:BUILD of the model."""

    batch: int
    """Examples of a step."""

    costs: str
    """Path of the table."""

    step_s: Annotated[float, msgspec.Meta(gt=0)]
    """Seconds."""

    interval: tuple[float, float]
    """What 80 % of the table's models, and all observed steps, stay within."""

    operators: list[OperatorRow]
    """Longest first."""

    basis: str
    """What it rests on, in words."""

    schema: str = "headway.cost-predict/1"
    """Version of the format."""


def learned_step(target: str, batch: int, costs: Path, threads: int) -> LearnedStep:
    """Predict the step of the model that MODULE:BUILD makes; raises `InputError`."""
    if batch < 1:
        raise InputError(f"--batch is {batch}; pass at least 1.")
    if not costs.exists():
        raise InputError(f"there is no table {costs}. Write it: headway cost calibrate -o {costs}")
    from headway.cost.torch_calibration import graph_of, here, measured_now

    table = read_table(costs)
    check_host(table.host, here(check_threads(threads)), costs)
    module, inputs = _built(target, batch)
    graph = graph_of(module, inputs)
    learned = step_costs(table)
    lacking = learned.operators.unmeasured(graph.operators)
    # In a step operators take `factor` times as long as alone.
    in_step = measured_now(module, inputs, graph, lacking)
    now = {op: max(seconds / learned.factor, 1e-9) for op, seconds in in_step.items()}
    guessed = [op for op in lacking if op not in now]
    costs_of = learned.operators.with_more(list(now), np.array(list(now.values())))
    costs_of = costs_of.with_more(guessed, learned.operators.by_bytes(guessed) if guessed else np.zeros(0))
    seconds = costs_of.seconds(graph.operators)
    dag = Dag.from_edges(len(seconds), graph.src, graph.dst, lane=np.zeros(len(seconds), np.int32))
    operators_s = replay(dag, np.rint(NS_PER_S * seconds).astype(np.int64)).makespan_ns / NS_PER_S
    step_s, (low_s, high_s) = learned.step(float(operators_s), len(seconds))
    guessed_s = learned.factor * float(seconds[[op in guessed for op in graph.operators]].sum())
    interval = (low_s - guessed_s * (1 - 1 / GUESS), high_s + guessed_s * (GUESS - 1))
    rows: dict[str, list[float]] = {}
    for leaf, each in zip(graph.operators, seconds, strict=True):
        rows.setdefault(leaf.name, []).append(float(each))
    basis = (
        f"{len(table.models)} models measured on {table.host.host}, {table.host.threads} thread(s); the interval "
        "holds the steps of 80 % of them, each predicted from the others"
        + (f", and of {len(table.observed)} run(s) observed later" if table.observed else "")
        + (f"; measured now, since the table lacks them: {_names(now)}" if now else "")
        + (f"; estimated by their bytes, which widens the interval: {_names(guessed)}" if guessed else "")
    )
    operators = [OperatorRow(name, len(row), sum(row)) for name, row in sorted(rows.items(), key=lambda r: -sum(r[1]))]
    return LearnedStep(target, batch, str(costs.resolve()), step_s, interval, operators, basis)


def _names(operators: Iterable[Operator]) -> str:
    return ", ".join(sorted({op.name for op in operators}))


def check_threads(threads: int) -> int:
    """Return `threads`; raises `InputError` below 1."""
    if threads < 1:
        raise InputError(f"--threads is {threads}; pass at least 1.")
    return threads


def _built(target: str, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """Return the module that BUILD makes, and its inputs."""
    build = imported(target, "my_project.model:build")
    try:
        made = build(batch)
    except Exception as cause:
        raise InputError(
            f"{target} raised {type(cause).__name__}: {cause}. It is called with the batch size, and returns a pair: "
            "the module, and its inputs."
        ) from cause
    if not (isinstance(made, tuple) and len(made) == 2 and hasattr(made[0], "named_parameters")):
        raise InputError(f"{target} returned a {type(made).__name__}; return a pair: the module, and its inputs.")
    module, inputs = made
    return module, inputs if isinstance(inputs, tuple) else (inputs,)


def save(step: LearnedStep, run: Path) -> None:
    """Write a prediction into the folder of the run that it was made for; raises `InputError` where it cannot."""
    try:
        with whole_file(run / FILE) as draft:
            draft.write_bytes(msgspec.json.encode(step))
    except OSError as cause:
        raise InputError(
            f"cannot write {run / FILE}: {cause.strerror}. Plan a run folder that can be written."
        ) from cause


def in_words(step: LearnedStep) -> str:
    """Say what a step is predicted to take, and from what."""
    low, high = map(format_seconds, step.interval)
    return (
        f"Learned instead, since no recording has step times: a step of {step.target} with batch {step.batch} computes "
        f"for {format_seconds(step.step_s)} ({low} to {high}), {step.batch / step.step_s:,.0f} examples per second at "
        f"most. Basis: {step.basis}."
    )


def judged(before: Run, after: Run, ledger: Ledger) -> dict[str, object] | None:
    """Return what was predicted for `before` beside what `after` took; None without a prediction, or without steps.

    Measured are forward, backward and update of the steps after the first, per device; `ledger` is that of `after`.
    What lies outside the printed interval widens the table's, once per run, unless the host had no core free.
    """
    if not (before.path / FILE).exists():
        return None
    found = read_json(before.path / FILE, LearnedStep, fix="Delete it, or run `headway plan` again.")
    useful = ledger.step_ns[BUCKETS.index("useful"), 1:] / (max(ledger.devices, 1) * NS_PER_S)
    useful = useful[useful > 0]
    if not len(useful):
        return None
    measured_s = float(np.quantile(useful, QUIET))
    low, high = found.interval
    outside = not low <= measured_s <= high
    return {
        "target": found.target, "batch": found.batch, "predicted_s": found.step_s, "interval": found.interval,
        "measured_s": measured_s, "median_s": float(np.median(useful)), "error": found.step_s / measured_s - 1,
        "inside": not outside, "widened": _widened(found, after, measured_s) if outside else "",
    }  # fmt: skip


def _widened(found: LearnedStep, after: Run, measured_s: float) -> str:
    """Add the run to the table; say what came of it."""
    path, run_id = Path(found.costs), after.facts.run_id or after.path.name
    try:
        table = read_table(path)
    except (OSError, HeadwayError) as error:
        return f"its table was not widened: {error}"
    ran_on = f"{after.facts.host}, {after.facts.device_type}"
    if ran_on != (measured_on := f"{table.host.host}, {table.host.device}"):
        return f"its table was not widened: it was measured on {measured_on}, the run on {ran_on}"
    threads = after.facts.env.get("OMP_NUM_THREADS", str(table.host.threads))
    if threads != str(table.host.threads):
        return f"its table was not widened: it was measured with {table.host.threads} thread(s), the run had {threads}"
    sizes = {loader.batch_size for loader in after.facts.loaders.values() if loader.batch_size}
    if sizes and found.batch not in sizes:
        said = ", ".join(map(str, sorted(sizes)))
        return f"its table was not widened: it was predicted for batch {found.batch}, the run's loaders have {said}"
    load = after.facts.host_load
    if load is not None and is_full(load):
        demand = f"{load.demand:.2f} cores of {load.cores}"
        return f"its table was not widened: other processes wanted {demand} beside the run"
    if any(row.run == run_id for row in table.observed):
        return f"the interval of {path} was widened by this run before"
    add_line(path, ObservedStep(run_id, found.step_s, measured_s))
    return f"the interval of {path} is widened by it"


def sentence(row: dict[str, Any]) -> str:
    """Say in words what `judged` returned."""
    low, high = map(format_seconds, row["interval"])
    text = (
        f"the step of {row['target']} was predicted to take {format_seconds(row['predicted_s'])} ({low} to {high}) and "
        f"took {format_seconds(row['measured_s'])} in a quiet moment, {format_seconds(row['median_s'])} in the middle"
    )
    return text + (f"; {row['widened']}" if row["widened"] else "")


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
    *, out: OutPath = TABLE, models: int = 48, threads: int = 1, dtypes: str = "float32", json: AsJson = False
) -> int:
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
    step = learned_step(target, batch, costs, threads)
    low, high = step.interval
    rows = headed("operator", "calls", "ms")
    for row in step.operators[:8]:
        add_row(rows, row.name, f"{row.calls}", f"{1e3 * row.seconds:.3f}")
    text = f"Step {1e3 * step.step_s:.2f} ms ({1e3 * low:.2f} to {1e3 * high:.2f}); basis: {step.basis}."
    answer = msgspec.to_builtins(step)
    return emit(answer, lambda screen: draw([paragraph(text), "", uncut(rows)], **screen), as_json=json)
