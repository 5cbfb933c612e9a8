"""Recorded runs of a pipeline whose every time is known: a simulated order, written down as `headway run` would."""

from typing import Any

import numpy as np

from headway.sim.pipeline.actions import Action, B, F, I, Orders, PipelineProgram, StageGraph, W
from headway.sim.pipeline.lower import lower
from headway.sim.pipeline.simulate import ProgramTimes, StageCosts, simulate
from headway.trace.events.trace import Trace, concat
from headway.trace.events.vocabulary import STAGE_PARTS
from tests.runs_made import Rows

NAME = dict(zip((F, B, I, W), (f"stage.{part}" for part in STAGE_PARTS), strict=True))
START_NS = 1_000_000


def costs(forward: Any, inputs: Any, weights: Any, comm_ns: int = 0) -> StageCosts:
    """Return costs from lists of ns."""
    return StageCosts(*(np.array(times, np.int64) for times in (forward, inputs, weights)), comm_ns)


def repeated(orders: Orders, passes: int, graph: StageGraph | None = None) -> tuple[PipelineProgram, int]:
    """Return one program of several passes, and the microbatches of each: the ranks run on without a barrier."""
    count = 1 + max(action.microbatch for action in orders[0])
    shifted = tuple(
        tuple(Action(a.op, a.stage, a.microbatch + turn * count) for turn in range(passes) for a in actions)
        for actions in orders
    )
    return lower(shifted, graph), count


def step_ends(orders: Orders, each: StageCosts, passes: int, graph: StageGraph | None = None) -> np.ndarray:
    """Return [ranks, passes] when each rank ends each pass."""
    program, count = repeated(orders, passes, graph)
    times = simulate(program, each)
    ends = np.zeros((program.num_ranks, passes), np.int64)
    computes = program.op <= W
    np.maximum.at(ends, (program.rank[computes], program.microbatch[computes] // count), times.end_ns[computes])
    return ends


def played(
    orders: Orders, each: StageCosts, passes: int, *, late_ns: int = 0, graph: StageGraph | None = None
) -> tuple[Trace, dict[str, Any]]:
    """Return trace and facts of a run of `passes` steps, one stage per rank, messages of `each.comm_ns`.

    Step 0 is recorded from `late_ns` behind its first computation: a step opens with the first call of a module.
    """
    program, count = repeated(orders, passes, graph)
    times, ends = simulate(program, each), step_ends(orders, each, passes, graph)
    traces = [_rank(program, times, rank, count, ends[rank], late_ns) for rank in range(program.num_ranks)]
    facts = {
        "world_size": program.num_ranks, "nproc": program.num_ranks, "cores": 64, "device_type": "cpu",
        "compute_cpu_fraction": 0.0,
    }  # fmt: skip
    return concat(traces), facts


def _rank(
    program: PipelineProgram, times: ProgramTimes, rank: int, count: int, ends: np.ndarray, late_ns: int
) -> Trace:
    """Write one rank down. A receive is posted when the computation before it has ended, and waited for at once."""
    rows, mine = Rows(rank), np.flatnonzero((program.rank == rank) & (program.op <= W))
    graph, now = program.graph, int(times.start_ns[mine[0]])
    first_ns, turn = now, 0
    total = int(times.end_ns[program.op <= W].max())
    rows.add("process", START_NS, total + 1)
    for row in mine.tolist():
        op, microbatch = int(program.op[row]), int(program.microbatch[row])
        if microbatch // count != turn:
            turn = microbatch // count
        start, end = int(times.start_ns[row]) + START_NS, int(times.end_ns[row]) + START_NS
        came = now + START_NS
        before, after = (graph.preds[rank], graph.takers(rank))[:: 1 if op == F else -1]
        for source in before if op != W else ():
            rows.add("comm.post", came, 0, group=0, seq=microbatch, corr=1, peer=source)
            rows.add("comm.recv", came, start - came, group=0, seq=microbatch, peer=source)
        rows.add(NAME[op], start, end - start, corr=rank, seq=microbatch % count, step=turn)
        for target in after if op != W else ():
            rows.add("comm.post", end, 0, group=0, seq=microbatch, corr=0, peer=target)
            rows.add("comm.send", end, 0, group=0, seq=microbatch, peer=target)
        now = end - START_NS
    begins = [first_ns + late_ns, *ends[:-1].tolist()]
    for step, (begin, end) in enumerate(zip(begins, ends.tolist(), strict=True)):
        rows.add("step", begin + START_NS, end - begin, step=step)
    return rows.trace()
