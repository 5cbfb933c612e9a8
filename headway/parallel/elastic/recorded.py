"""What lost ranks would cost a recorded job of replicas of a pipeline: `replan` under the times of its run.

The order and the times of the stages are those of the first replica. Each set of up to two lost workers that has other
workers of its stages is one case; where another one ends the job is counted. A step with a staggered optimizer takes
the span, one of headway's runner, whose optimizers wait for all stages, the makespan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headway.core.errors import InputError
from headway.parallel.elastic.replan import ElasticPlan, Replanned, replan
from headway.parallel.elastic.reroute import Worker
from headway.sim.pipeline.actions import StageGraph
from headway.sim.pipeline.lower import lower
from headway.sim.pipeline.orders import PipelineShape
from headway.sim.recorded.program import Program
from headway.sim.recorded.stage_orders import RecordedPipeline

MOST_LOST = 2
"""Lost workers at once that are looked at."""

MOST_SCHEDULED = 300_000
"""Computations of all cases together, from which on only one lost worker is looked at: some seconds of scheduling."""

EDIT = "elastic=True in headway.parallel.pipeline(...)"
"""What a script says so that its job goes on without a rank that is killed."""


@dataclass(frozen=True, slots=True)
class LossCosts:
    """The cases of a job, the fewest lost workers first."""

    fault_free: Replanned
    """Without lost workers, under the recorded order."""

    cases: tuple[tuple[tuple[Worker, ...], Replanned], ...]
    """The lost workers, one set for each number by stage, and what the others do."""

    num_replicas: int
    """Replicas of the job."""

    is_elastic: bool
    """Whether the job goes on without a rank that is killed; else it ends."""

    @classmethod
    def of(cls, program: Program) -> LossCosts | None:
        """Return them; None for another job than replicas on headway's runner, and one whose order is not known."""
        facts = program.run.parts.ranks.values() if program.run is not None else ()
        rows = (row["pipeline"] for row in facts if isinstance(row.get("pipeline"), dict))
        row: dict[str, object] = next(rows, {})
        recording, count, num_stages = program.recording, row.get("replicas"), row.get("num_stages")
        if not (isinstance(count, int) and isinstance(num_stages, int) and count > 1):
            return None
        pairs = zip(recording.lanes, recording.stages, strict=True)
        first = tuple(work if lane.rank < num_stages else None for lane, work in pairs)
        try:
            plan = _planned(RecordedPipeline.of(replace(recording, stages=first)), count)
        except InputError:
            return None
        lost = [
            tuple(Worker(count - 1 - k, stage) for stage, failed in enumerate(counts) for k in range(failed))
            for counts in plan.schedules
        ]
        cases = [(workers, replan(plan, workers)) for workers in lost]
        return cls(cases[0][1], tuple(cases[1:]), count, bool(row.get("elastic")))

    def to_json(self) -> dict[str, object]:
        """Return the object `failures` of `headway plan --json`."""
        return {
            "replicas": self.num_replicas, "elastic": self.is_elastic,
            "fault_free_span_ns": self.fault_free.span_ns, "fault_free_makespan_ns": self.fault_free.makespan_ns,
            "cases": [
                {
                    "lost": list(map(str, workers)), "span_ns": case.span_ns, "makespan_ns": case.makespan_ns,
                    "bound_ns": case.bound_ns,
                }
                for workers, case in self.cases
            ],
            "note": self.in_words(),
        }  # fmt: skip

    def in_words(self) -> str:
        """Say what one and two lost ranks cost at most, and what the script has to say for it."""
        clauses = []
        for number, subject in ((1, "one lost rank makes"), (2, "two make")):
            rows = [row for row in self.cases if len(row[0]) == number]
            if rows:
                workers, worst = max(rows, key=lambda row: row[1].makespan_ns)
                stages = " and ".join(str(stage) for stage in sorted({worker.stage for worker in workers}))
                slower = worst.makespan_ns / self.fault_free.makespan_ns
                span = worst.span_ns / self.fault_free.span_ns
                clauses.append(f"{subject} a step {slower:.2f}x as long at most (of stage {stages}; span {span:.2f}x)")
        ends = f"all {self.num_replicas} ranks of one stage end the job"
        text = f"By replay, {'; '.join([*clauses, ends])}."
        return text if self.is_elastic else f"{text} Now one ends it: {EDIT} lets the other ranks go on."


def loss_costs(program: Program | None) -> dict[str, object] | None:
    """Return `LossCosts.to_json` of a recorded run; None where `LossCosts.of` has none."""
    costs = LossCosts.of(program) if program is not None else None
    return None if costs is None else costs.to_json()


def _planned(pipeline: RecordedPipeline, num_replicas: int) -> ElasticPlan:
    """Return the schedules for as many lost workers as can be looked at; raises as `ElasticPlan.build` does."""
    costs, graph = pipeline.costs, pipeline.graph or StageGraph.chain(len(pipeline.rank_index))
    times: Sequence[Sequence[int]] = (costs.forward_ns.tolist(), costs.input_ns.tolist(), costs.weight_ns.tolist())
    shape = PipelineShape.of_graph(graph, pipeline.num_microbatches, *times, comm_ns=costs.comm_ns)
    stages = len(graph.preds)
    computations = 3 * stages * pipeline.num_microbatches * num_replicas
    failures = MOST_LOST if stages * (stages + 3) // 2 * computations <= MOST_SCHEDULED else 1
    return ElasticPlan.build(shape, num_replicas, most_failures=failures, order=lower(pipeline.orders, graph))
