"""`headway parallel schedule show|check|export`, `headway parallel simulate|replan`: orders of a pipeline step."""

from __future__ import annotations

import json as json_format
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter
from rich.text import Text

from headway.core.errors import InputError
from headway.core.files.safe_files import read_text, whole_file
from headway.core.tables import pick
from headway.core.units import format_fraction, format_seconds
from headway.parallel.elastic_plan import ElasticPlan, HostTrace, Replanned, SwitchCosts, TraceReport, replay_trace
from headway.parallel.elastic_plan import replan as replan_workers
from headway.parallel.rerouted import Worker, replicate, reroute
from headway.report.page.plots import picture_page, write_page
from headway.report.paper import ScreenOptions, add_row, draw, grid, headed, paragraph, uncut
from headway.sim.pipeline.actions import F, I, PipelineProgram, R, W
from headway.sim.pipeline.lower import check as check_program
from headway.sim.pipeline.lower import lower
from headway.sim.pipeline.orders import GraphFile, OrderFn, PipelineShape, one_stage_per_rank
from headway.sim.pipeline.schedules import SCHEDULES
from headway.sim.pipeline.simulate import (
    PipelineScore,
    ProgramTimes,
    bubble_sums,
    bubbles,
    costs_of,
    evaluate,
    score,
    steady_shapes,
)  # fmt: skip
from headway.sim.pipeline.simulate import simulate as replay_program
from headway.verbs.models.parallel_bubbles import pipeline_gantt
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import GivenPath, OutPath

OrderName = Annotated[str, Parameter(help="Name of the order.")]
Ranks = Annotated[int, Parameter(help="Ranks.")]
Microbatches = Annotated[int, Parameter(help="Microbatches of one step.")]
Interleave = Annotated[int, Parameter(help="Stages per rank.")]
ForwardNs = Annotated[int, Parameter(help="Forward of one microbatch on one rank.")]
InputNs = Annotated[int, Parameter(help="The part of its backward that makes the gradient of the input.")]
WeightNs = Annotated[int, Parameter(help="The part that makes the gradients of the weights.")]
MessageNs = Annotated[int, Parameter(help="One message.")]
BetweenNs = Annotated[int, Parameter(help="One message between stages.")]
Cap = Annotated[float | None, Parameter(help="Activations that a rank may hold.")]
"""Options that several of these verbs have."""

FORMATS: dict[str, Callable[[PipelineProgram], str]] = {
    "torch-csv": PipelineProgram.to_torch_csv,
    "json": lambda program: json_format.dumps(program.to_json()) + "\n",
}
"""Format of a file -> how a program is written in it."""

COLUMNS = 70
"""Characters of a timeline."""

WORDS = {
    "fill_drain": "idle while the pipeline fills and drains",
    "forward_backward": "idle before the first backward",
    "scattered": "idle elsewhere",
}
"""Kind of gap -> how it is printed."""

LEGEND = (
    "0-9: forward of the microbatch with that last digit; a-j: its backward; w: weight gradient; . : no work. "
    "Simulated from the given times."
)


def show(
    schedule: OrderName = "1f1b", *, stages: Ranks = 4, microbatches: Microbatches = 8, interleave: Interleave = 1,
    forward_ns: ForwardNs = 10, backward_ns: int = 20, comm_ns: MessageNs = 0, cap: Cap = None,
    out: OutPath | None = None, json: bool = False,
) -> int:  # fmt: skip
    """Show an order: what each rank computes, on a time axis.

    Example: `headway parallel schedule show --schedule 1f1b --stages 4 --microbatches 8`

    Args:
      backward_ns: Its backward.
      out: Also write a page with the picture of it: -o page.html.
      json: Print one JSON object: the program, its messages among the actions.
    """
    shape = PipelineShape(
        stages, microbatches, interleave, forward_ns, *parts_of(backward_ns, None, None), comm_ns, cap
    )
    program = lower(pick(SCHEDULES, schedule, "schedule")(shape))
    found, times = score(program, shape), replay_program(program, costs_of(shape))
    if out is not None:
        lanes = [f"rank {rank}" for rank in range(program.num_ranks)]
        title = f"{microbatches} microbatches by number, simulated: {format_fraction(found.bubble_fraction)} idle"
        rows = np.stack([program.rank, program.op, program.microbatch, times.start_ns, times.end_ns])
        chart = pipeline_gantt(title, lanes, rows[:, program.op <= R])
        write_page(out, picture_page(schedule, "a step", [chart]))
    lines = [Text(f"  rank {rank:<3}{_line(program, times, rank)}") for rank in range(program.num_ranks)]
    figures = _figures("", _gaps(program, shape), found)[2:]
    parts = [*lines, "", *figures, "", paragraph(LEGEND, style="dim")]
    return emit(program.to_json(), lambda screen: draw(parts, **screen), as_json=json)


def check(file: Path, *, cap: float | None = None, json: AsJson = False) -> int:
    """Check an order from a file: complete, in order, free of deadlock, within memory.

    Example: `headway parallel schedule check orders.csv --cap 4`

    Args:
      file: Torch's compute-only CSV (a row per rank, cells like 1F0), or a program as JSON.
      cap: Activations of a stage and microbatch that a rank may hold.
    """
    text = read_text(file, "an order: torch's CSV, or JSON")
    if text.lstrip().startswith("{"):
        program = PipelineProgram.from_json(text)
    else:
        program = lower(PipelineProgram.from_torch_csv(text).orders())  # gets its messages
    report = check_program(program, cap)
    answer = {"schema": "headway.parallel.check/1", **asdict(report)}
    verdict = (
        f"  {program.num_ranks} ranks, {program.num_stages} stages, {program.num_microbatches} microbatches: complete, "
        f"no deadlock without buffers; {report.num_messages} messages; at most {max(report.peak_activations)} "
        "activations on a rank."
    )
    return emit(answer, lambda screen: draw([Text(verdict)], **screen), as_json=json)


def export(
    *, schedule: OrderName = "1f1b", stages: Ranks = 4, microbatches: Microbatches = 8, interleave: Interleave = 1,
    forward_ns: ForwardNs = 10, input_ns: InputNs = 10, weight_ns: WeightNs = 10, comm_ns: MessageNs = 0,
    cap: Cap = None, format: str = "torch-csv", output: GivenPath | None = None,
) -> int:  # fmt: skip
    """Write an order to a file that torch's pipeline runtime, torchtitan or NeMo reads.

    Example: `headway parallel schedule export --schedule interleaved --stages 4 --microbatches 8 --interleave 2`

    Args:
      format: torch-csv, or json with the messages.
      output: The file; stdout without it.
    """
    shape = PipelineShape(stages, microbatches, interleave, forward_ns, input_ns, weight_ns, comm_ns, cap)
    program = lower(pick(SCHEDULES, schedule, "schedule")(shape))
    check_program(program, None if cap is None else cap * interleave)
    text = pick(FORMATS, format, "format")(program)
    if output is None:
        print(text, end="")
    else:
        with whole_file(output) as draft:
            draft.write_text(text)
    return 0


def simulate(
    *, schedule: OrderName = "1f1b", stages: int | None = None, microbatches: Microbatches = 8,
    interleave: Interleave = 1, forward_ns: int | None = None, backward_ns: int | None = None,
    input_ns: int | None = None, weight_ns: int | None = None, comm_ns: BetweenNs = 0, cap: float | None = None,
    graph: GivenPath | None = None, replicas: int = 1, fail: str | None = None, json: AsJson = False,
) -> int:  # fmt: skip
    """Simulate one step of a pipeline: its length, its bubbles, the activations each rank holds.

    Times are those of one rank and one microbatch: a stage takes 1/interleave of them. With --graph each stage has its
    own, and stages that do not feed each other run at once. With --fail, data-parallel peers take the microbatches of
    failed workers: backwards stay whole in an order that has whole ones, and are split where that helps in the others.

    Example: `headway parallel simulate --stages 4 --microbatches 8 --forward-ns 10 --backward-ns 20`

    Args:
      stages: Ranks.
      forward_ns: Forward.
      backward_ns: Backward; without it, the sum of its two parts.
      input_ns: The part that makes the gradient of the input; without both parts, half of the backward.
      weight_ns: The part that makes the gradients of the weights.
      cap: Activations that a rank may hold, in shares of a whole rank.
      graph: A JSON file of stages, each with name, preds (names of those that feed it), forward_ns and backward_ns.
      replicas: Pipelines side by side; stage s of replica d is on rank d x stages + s.
      fail:
        Failed workers as replica:stage, from 0, separated by commas; they count as idle. --cap is then twice the
        number of stages if not given.
    """
    if graph is not None:
        if any(given is not None for given in (stages, forward_ns, backward_ns, input_ns, weight_ns)):
            raise InputError("--graph has the stages and their times. Leave --stages and the times out.")
        shape = GraphFile.read(graph).shape(microbatches, comm_ns=comm_ns, cap=cap)
    elif stages is None or forward_ns is None:
        raise InputError("the stages are not known. Give --stages and --forward-ns, or --graph.")
    else:
        parts = parts_of(backward_ns, input_ns, weight_ns)
        shape = PipelineShape(stages, microbatches, interleave, forward_ns, *parts, comm_ns, cap)
    order = pick(SCHEDULES, schedule, "schedule")
    if replicas != 1 or fail is not None:
        found, gaps = _replicas(order, shape, replicas, fail)
    else:
        found, gaps = evaluate(order, shape), _steady_gaps(order, shape)
    answer = {"schema": "headway.parallel.simulate/1", "simulated": True, "schedule": schedule, **asdict(found)}
    answer["bubbles_ns"] = gaps
    return emit(answer, lambda screen: draw(_figures(schedule, gaps, found), **screen), as_json=json)


def replan(
    *, replicas: int, stages: int, microbatches: int, fail: str | None = None, trace: GivenPath | None = None,
    forward_ns: int = 1, input_ns: InputNs = 1, weight_ns: WeightNs = 1, comm_ns: BetweenNs = 0, cap: int | None = None,
    regroup_s: float = 5.0, copy_s: float = 5.0, restart_s: float = 120.0, json: bool = False,
) -> int:  # fmt: skip
    """Plan the next steps of a job whose pipelines lost workers: data-parallel peers take their microbatches.

    The step is given with an optimizer that each stage runs when its own gradients are summed (span), beside the step
    without failures under 1F1B and the bound: the longer of that and an even share of the microbatches of the stage
    with the fewest workers. With --trace: the steps of a job whose hosts leave and join, beside those of whole replicas
    that are packed anew at no cost.

    Example: `headway parallel replan --replicas 3 --stages 4 --microbatches 6 --fail 1:2`

    Args:
      replicas: Pipelines side by side.
      stages: Stages of each, one per rank.
      microbatches: Microbatches of each in one step.
      fail: Failed workers as replica:stage, from 0, separated by commas.
      trace:
        A file of milliseconds,add|remove,host by time, one host per worker; the times of stages count in full then.
      forward_ns: Forward of one microbatch on one stage.
      cap: Activations that a worker may hold; twice the number of stages without it.
      regroup_s: Seconds of every switch, with --trace.
      copy_s: More of them where a worker gets the weights of a stage.
      restart_s: Seconds of a restart from a checkpoint, where a stage lost all its workers.
      json: Print one JSON object instead of text: with the program of the step, the messages among its actions.
    """
    shape = PipelineShape(stages, microbatches, 1, forward_ns, input_ns, weight_ns, comm_ns, cap)
    plan = ElasticPlan.build(shape, replicas, most_failures=0)
    if trace is not None and fail is None:
        return _traced(replay_trace(plan, HostTrace.read(trace), SwitchCosts(regroup_s, copy_s, restart_s)), json)
    if fail is None or trace is not None:
        raise InputError("the failures are not known, or twice. Give --fail or --trace.")
    step = replan_workers(plan, _workers(fail))
    times_ns = {name: getattr(step, name) for name in ("span_ns", "makespan_ns", "fault_free_span_ns", "bound_ns")}
    facts = {
        "schema": "headway.parallel.replan/1", "simulated": True, **times_ns, "roles": list(step.roles),
        "schedule": step.program.to_json(),
    }  # fmt: skip
    return emit(facts, lambda screen: _rerouted(step, stages, screen), as_json=json)


def parts_of(backward_ns: int | None, input_ns: int | None, weight_ns: int | None) -> tuple[int, int]:
    """Return both parts of a backward; raises `InputError` where they are not known, or contradict the whole."""
    if (input_ns is None) != (weight_ns is None) or (backward_ns is None and input_ns is None):
        raise InputError("the backward is not known. Give --backward-ns, or --input-ns and --weight-ns.")
    if input_ns is None or weight_ns is None:
        weight_ns = (backward_ns or 0) // 2
        return (backward_ns or 0) - weight_ns, weight_ns
    if backward_ns not in (None, input_ns + weight_ns):
        raise InputError(
            f"--backward-ns is {backward_ns}, its parts add up to {input_ns + weight_ns}. Give the parts only."
        )
    return input_ns, weight_ns


def _workers(text: str) -> list[Worker]:
    """Read workers as replica:stage, separated by commas; raises `InputError` on anything else."""
    try:
        pairs = [tuple(int(number) for number in worker.split(":")) for worker in text.split(",")]
        return [Worker(replica, stage) for replica, stage in pairs]
    except ValueError:
        raise InputError(f"--fail is {text!r}; give workers as replica:stage, separated by commas: 1:2,0:3.") from None


def _replicas(
    order: OrderFn, shape: PipelineShape, replicas: int, fail: str | None
) -> tuple[PipelineScore, dict[str, list[float]]]:
    """Return figures and gaps of pipelines side by side, without the workers that failed."""
    one_stage_per_rank(shape, "a job with replicas")
    program = replicate(lower(order(shape), shape.graph), replicas)
    if fail is not None:
        cap, split = None if shape.cap is None else int(shape.cap), bool((program.op == I).any())
        program = reroute(program, _workers(fail), costs=costs_of(shape), cap=cap, split=split)
    return score(program, shape), _gaps(program, shape)


def _gaps(program: PipelineProgram, shape: PipelineShape) -> dict[str, list[float]]:
    """Return kind of gap -> [ranks] nanoseconds."""
    sums = bubble_sums(bubbles(program, replay_program(program, costs_of(shape))), program.num_ranks)
    return {kind: [value / shape.interleave for value in values] for kind, values in sums.items()}


def _steady_gaps(order: OrderFn, shape: PipelineShape) -> dict[str, list[float]]:
    """Return `_gaps` of a step: without a flush, those that one more step adds to a stream."""
    shapes = steady_shapes(order, shape)
    shorter, longer = (_gaps(lower(order(streamed), streamed.graph), streamed) for streamed in shapes)
    if shapes[0] == shapes[1]:
        return longer
    return {gap: [b - a for a, b in zip(shorter[gap], longer[gap], strict=True)] for gap in longer}


def _figures(schedule: str, gaps: dict[str, list[float]], found: PipelineScore) -> list[Any]:
    rows = grid("left", "right")
    add_row(rows, "step", format_seconds(found.makespan_ns / 1e9))
    add_row(rows, "idle, of the step", format_fraction(found.bubble_fraction))
    add_row(rows, "idle, of the work", format_fraction(found.bubble_overhead))
    add_row(rows, "idle between a rank's first and last computation", format_seconds(found.span_idle_ns / 1e9))
    add_row(rows, "activations per rank", " ".join(f"{peak:g}" for peak in found.peak_activations))
    for kind, values in gaps.items():
        add_row(rows, f"{WORDS[kind]}, mean of ranks", format_seconds(sum(values) / len(values) / 1e9))
    return [Text(f"  {schedule}, simulated"), "", uncut(rows)]


def _traced(report: TraceReport, as_json: bool) -> int:
    facts = {"schema": "headway.parallel.replan-trace/1", "simulated": True, **asdict(report), "gain": report.gain}
    rows = grid("left", "right")
    add_row(rows, "steps", f"{report.steps:,.0f}")
    add_row(rows, "steps of whole replicas, packed anew at no cost", f"{report.repacked_steps:,.1f}")
    add_row(rows, "switches, restarts among them", f"{report.switches}, {report.restarts}")
    add_row(rows, "time in switches", format_seconds(report.paused_s))
    return emit(facts, lambda screen: draw([uncut(rows)], **screen), as_json=as_json)


def _rerouted(step: Replanned, stages: int, screen: ScreenOptions) -> str:
    rows = grid("left", "right")
    add_row(rows, "step, staggered optimizer", format_seconds(step.span_ns / 1e9))
    add_row(rows, "step, one optimizer step for all", format_seconds(step.makespan_ns / 1e9))
    add_row(rows, "step without failures, 1F1B", format_seconds(step.fault_free_span_ns / 1e9))
    add_row(rows, "bound", format_seconds(step.bound_ns / 1e9))
    table = headed("microbatches", *(f"stage {stage}" for stage in range(stages)))
    program = step.program
    for first in range(0, program.num_ranks, stages):
        forwards = [int(((program.op == F) & (program.rank == first + stage)).sum()) for stage in range(stages)]
        add_row(table, f"replica {first // stages}", *(str(number or "failed") for number in forwards))
    note = paragraph("Simulated from the given times.", style="dim")
    return draw([uncut(rows), "", uncut(table), "", note], **screen)


def _line(program: PipelineProgram, times: ProgramTimes, rank: int) -> str:
    """Return the characters of one rank, one per slice of time."""
    scale = COLUMNS / times.makespan_ns
    line = ["."] * COLUMNS
    for row in range(program.rank.size):
        if program.rank[row] != rank or program.op[row] > R:
            continue
        digit = int(program.microbatch[row]) % 10
        mark = str(digit) if program.op[row] in (F, R) else "w" if program.op[row] == W else "abcdefghij"[digit]
        for column in range(round(times.start_ns[row] * scale), round(times.end_ns[row] * scale)):
            line[column] = mark
    return "".join(line)
