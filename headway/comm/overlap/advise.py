"""Whether matmuls that hide their collective would pay: forms are measured, the recorded step is replayed with them.

The run notes the shapes of its tensor-parallel matmuls and how long it waits for the collective of each. This host
measures the forms of those shapes once (a child process, RUN/overlap.json); a replay of chunks against transfers says
what the form makes of the recorded wait, and a replay of the run what that makes of a step. Times are seconds.

>>> overlapped_s(MatmulShape("ag", 512, 512, 512), "ring:W", 2, 0.010, 0.010)  # own half beside the transfer
0.015
>>> overlapped_s(MatmulShape("rs", 512, 512, 512), "ring:2W", 4, 0.008, 0.006)
0.008
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headway.comm.overlap.chooser import OVERLAP_FILE, OverlapTimes, measure
from headway.core.errors import BarMissedError, InputError
from headway.core.units import NS_PER_S, format_seconds
from headway.cost.overlaps import GATHER, OVERLAPS, PLAIN, MatmulShape, read_shape
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.graph.dag import Dag
from headway.sim.graph.replay import replay
from headway.sim.recorded.program import Program
from headway.trace.rings.rank_tables import MatmulsSeen, rank_tables

NAME, GRANT = "comm.overlap", "result-equivalent"

ITEM_BYTES = 4
"""Bytes of a number: forms are measured in float32."""

COMPUTE, LINK = 0, 1
"""Lanes of a rank."""


@dataclass(frozen=True, slots=True)
class RecordedWaits:
    """The collectives of one size in a recorded run, of the rank that waits least: others wait for it as well."""

    per_step: float
    """Calls per step."""
    wait_s: float
    """Mean seconds that the training thread waits for one."""


def matmuls_of(program: Program) -> MatmulsSeen | None:
    """Return the matmuls beside a collective that the run's first rank noted."""
    if program.run is None:
        return None
    return next((table.matmuls for table in rank_tables(program.run.path).values() if table.matmuls), None)


def propose_overlap(program: Program, setup: Setup, matmuls: MatmulsSeen) -> Proposal | Refusal:
    """Return the forms of the run's matmuls and what they win, or why none is proposed."""
    if GRANT not in setup.limits.allow:
        return Refusal(
            NAME, "comm", f"partial sums are added in another order: grant --allow {GRANT} to have it measured"
        )
    if setup.accelerated:
        reason = "measure on the job's devices first: headway comm overlap under its launcher, -o RUN/overlap.json"
        return Refusal(NAME, "comm", reason)
    assert program.run is not None
    shapes = _with_backwards(matmuls)
    try:
        waits, exposed_s = recorded_waits(program, shapes, matmuls.ranks)
        table = measure(waits, program.run.path / OVERLAP_FILE, ranks=matmuls.ranks)
        rows = {shape: row for shape in waits if (row := table.of(shape)) is not None and row.chosen != PLAIN}
        measured = ", ".join(f"{row.shape} {row.seconds(PLAIN) / row.seconds(row.chosen):.2f}x" for row in table.rows)
        if not rows:
            return Refusal(NAME, "comm", f"plain is the fastest form of all {len(waits)} shapes on this host's link")
        slow, mid, fast = (
            program.predict([_edit(1 - saved_s(rows, waits, matmuls.ranks, quantile) / exposed_s)])
            for quantile in (0.75, 0.5, 0.25)
        )
    except (InputError, BarMissedError) as cause:
        return Refusal(NAME, "comm", f"what overlapped matmuls would win is not known: {cause}")
    if mid.speedup < MIN_SPEEDUP:
        return Refusal(NAME, "comm", f"hiding collectives behind matmuls wins little: {mid.speedup:.3f}x ({measured})")
    waited_s = sum(row.per_step * row.wait_s for row in waits.values())
    return Proposal(
        name=NAME,
        room="comm",
        edits=(mid.edits[0],),
        predicted_speedup=mid.speedup,
        interval=(min(slow.interval[0], mid.interval[0]), max(fast.interval[1], mid.interval[1])),
        applies=True,
        parameters={"shapes": {str(shape): row.chosen for shape, row in rows.items()}},
        cost="none: the gathered rows are kept for backward as before",
        risk="partial sums are added in another order: losses differ in their last bits",
        allow=GRANT,
        reason=f"{format_seconds(waited_s)} of a step wait for the rows of {len(waits)} shapes of matmuls; measured "
        f"against plain on this host's link: {measured}. {mid.note}".strip(),
    )


def saved_s(
    rows: Mapping[MatmulShape, OverlapTimes], waits: Mapping[MatmulShape, RecordedWaits], ranks: int, quantile: float
) -> float:
    """Return the seconds of a step that the chosen forms save; `quantile` of their measured times, 0.5 = median.

    A form's replay knows neither that smaller matmuls are less efficient nor that a backend's transfers differ from its
    collective: what it measured as, over its replay with the measured parts, is that factor. It is taken to the replay
    with the wait of the run.
    """
    total = 0.0
    for shape, row in rows.items():
        recorded, form = waits[shape], row.chosen
        taken_s = float(np.quantile(row.forms[form], quantile))
        factor = taken_s / overlapped_s(shape, form, ranks, row.matmul_s, row.collective_s)
        after_s = factor * overlapped_s(shape, form, ranks, row.matmul_s, recorded.wait_s)
        total += recorded.per_step * max(row.matmul_s + recorded.wait_s - after_s, 0.0)
    return total


def overlapped_s(shape: MatmulShape, form: str, ranks: int, matmul_s: float, collective_s: float) -> float:
    """Return how long a ring takes by replay, of the seconds of its matmul and of its collective.

    ag   compute  |0 0|1 1|2 2|     chunk c of shard s is multiplied once it is here
         link     |1 1|2 2|         and passed on once it has come

    rs   compute  |0 0|1 1|2 2|     chunk c of step s leaves once it is multiplied
         link       |1 1|2 2|       and what was summed before has come
    """
    chunks, steps = max(OVERLAPS[form], 1), ranks
    compute = np.arange(steps * chunks).reshape(steps, chunks)
    travel = compute.size + np.arange((steps - 1) * chunks).reshape(steps - 1, chunks)
    passed_on = [(travel[:-1], travel[1:])]
    needs = [(travel, compute[1:])] if shape.way == GATHER else [(compute[:-1], travel)]
    src, dst = (np.concatenate([pair[end].ravel() for pair in passed_on + needs]) for end in (0, 1))
    lane = np.repeat([COMPUTE, LINK], [compute.size, travel.size])
    op_ns = [round(matmul_s * NS_PER_S / compute.size), round(collective_s * NS_PER_S / travel.size)]
    dag = Dag.from_edges(lane.size, src, dst, lane=lane)
    return float(replay(dag, np.take(op_ns, lane)).makespan_ns) / NS_PER_S


def recorded_waits(
    program: Program, shapes: Mapping[MatmulShape, int], ranks: int
) -> tuple[dict[MatmulShape, RecordedWaits], float]:
    """Return the waits for the collective of each shape, and the seconds per step of all collectives.

    A collective is known by its bytes; shapes of equal bytes share its calls by how many linears have them. Raises
    `InputError` where none is found.
    """
    assert program.run is not None
    by_rank = []
    for lane in program.recording.lanes:
        rows = program.run.parts.read({"rank": (lane.rank, lane.rank + 1)}, COLUMNS)
        called = rows.named("comm.collective") & (rows.events["start_ns"] >= lane.step_end_ns[0])
        by_rank.append((rows.events["bytes"][called], rows.events["duration_ns"][called]))
    steps = program.recording.recorded_steps
    of_bytes = Counter[int]()
    for shape, count in shapes.items():
        of_bytes[_result_bytes(shape, ranks)] += count
    waits = {}
    for shape, count in shapes.items():
        size = _result_bytes(shape, ranks)
        durations = [duration_ns[sizes == size] for sizes, duration_ns in by_rank]
        if all(duration.size for duration in durations):
            share = count / of_bytes[size]
            least_ns = min(float(duration.mean()) for duration in durations)
            waits[shape] = RecordedWaits(durations[0].size / steps * share, least_ns / NS_PER_S)
    if not waits:
        raise InputError("no float32 collective of the noted matmuls was recorded.")
    return waits, statistics.fmean(float(duration_ns.sum()) for _, duration_ns in by_rank) / NS_PER_S / steps


COLUMNS = ("rank", "name", "start_ns", "duration_ns", "bytes")


def _with_backwards(matmuls: MatmulsSeen) -> Counter[MatmulShape]:
    """Return the shapes of forward and backward -> linears that have them."""
    counts = Counter[MatmulShape]()
    for name, count in matmuls.shapes.items():
        shape = read_shape(name)
        counts.update({shape: count})
        counts.update({shape.backward: count})
    return counts


def _result_bytes(shape: MatmulShape, ranks: int) -> int:
    """Return the bytes of what a rank gets from the collective: all rows of a gather, its share of a scatter."""
    return shape.travels * ITEM_BYTES // (1 if shape.way == GATHER else ranks)


def _edit(factor: float) -> str:
    return f"comm={max(factor, 0.01):.4f}x"
