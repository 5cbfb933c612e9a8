"""The step of a model that no recording holds, predicted from a table of costs; later judged by the run that took it.

`headway plan` writes a prediction into the run folder that had no step times; `headway compare` reads it there.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from headway.core.errors import HeadwayError, InputError
from headway.core.files.safe_files import read_json, whole_file
from headway.core.units import NS_PER_S, format_seconds
from headway.cost.cost_table import ObservedStep, Operator, add_line, check_host, read_table, step_costs
from headway.ledger.answers.compare import is_full
from headway.ledger.answers.ledger import Ledger
from headway.ledger.buckets import BUCKETS
from headway.sim.graph.dag import Dag, replay
from headway.trace.recording.runs import Run
from headway.verbs.shared.output import imported

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
        return (
            f"its table was not widened: other processes wanted {load.demand:.2f} cores of {load.cores} beside the run"
        )
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
