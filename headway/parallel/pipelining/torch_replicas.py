"""Pipelines side by side: their gradients are summed once a step, and a rank that is killed is done without.

Rank d S + s has stage s of replica d, of S stages. A rank that has the stage of a killed one takes its micro-batches
(`headway.parallel.elastic`, SlipStream), under another program of the same interpreter. Every rank has the whole batch,
so that what it computes follows from the micro-batch alone: its examples, what its forward draws, its share 1 / M of
the gradient. How a step ends, and what becomes of one that a kill interrupts, is in `elastic.torch_peers`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headway.core.errors import InputError
from headway.parallel.elastic_plan import ElasticPlan, replan
from headway.parallel.pipelining.torch_interpreter import Interpreter
from headway.parallel.pipelining.torch_messages import StageMessages
from headway.parallel.torch_elastic_groups import LostPeerError, PeerGroups
from headway.runtime.in_rank import bootstrap
from headway.runtime.recorder.probes import now
from headway.runtime.torch_state import copy_into
from headway.sim.pipeline.actions import PipelineProgram, StageGraph
from headway.sim.pipeline.orders import PipelineShape
from headway.trace.events.vocabulary import SPANS

REROUTE = SPANS["step.reroute"].code


class PipelineReplicas:
    """The replicas of a pipeline, as one rank sees them."""

    def __init__(self, count: int, graph: StageGraph, *, elastic: bool, timeout_s: float) -> None:
        """Connect the ranks; raises as `PeerGroups` does."""
        self.count, self._graph = count, graph
        self.peers = PeerGroups(len(graph.preds), elastic=elastic, timeout_s=timeout_s)
        self._plan: ElasticPlan | None = None

    def program(self, of_one: PipelineProgram | None = None) -> PipelineProgram:
        """Return what all ranks that run do, from the program of one replica or from that of the last call.

        Raises `InputError` where a stage is on another rank than that of its number, or no rank of a stage is left.
        """
        if of_one is not None:
            if (of_one.rank != of_one.stage).any():
                raise InputError("replicas have stage s on rank s of each pipeline. Choose '1f1b' or 'zero_bubble'.")
            shape = PipelineShape(of_one.num_ranks, of_one.num_microbatches, graph=self._graph)
            failures = 1 if self.peers.is_elastic else 0
            self._plan = ElasticPlan.build(shape, self.count, most_failures=failures, order=of_one)
        assert self._plan is not None, "the first program comes from a schedule"
        return replan(self._plan, [divmod(rank, len(self._graph.preds)) for rank in self.peers.gone]).program

    def prepare(self, interpreter: Interpreter) -> None:
        """Let forwards draw by micro-batch, and steps end together."""
        interpreter.seed = self.peers.first_of(torch.initial_seed() % (1 << 62))
        interpreter.before_update = lambda stage: self._sum_and_commit(interpreter, stage)
        self.peers.announce()

    def run_step(
        self, interpreter: Interpreter, run: Callable[[], None], recovered: Callable[[], StageMessages]
    ) -> None:
        """Run a step by `run`, again where ranks were killed before all had committed it.

        `recovered` is called with the groups of the ranks that are left: it takes the new program, and returns the
        messages. Raises `LostPeerError` where ranks are gone that were not killed or that no other rank stands in for.
        """
        peers, weights = self.peers, interpreter.weights
        target = peers.steps + 1
        buffers = [
            (buffer, buffer.clone()) for of_stage in weights.values() for buffer in of_stage.stage.module.buffers()
        ]
        while peers.steps < target:
            start = now()
            try:
                run()
            except LostPeerError as cause:
                is_behind = peers.recover(cause)
                for of_stage in weights.values() if is_behind else ():
                    of_stage.update(of_stage.newest + 1, (), 0)
                for buffer, before in buffers if peers.steps < target else ():
                    copy_into(buffer, before)
                interpreter.drop_step(recovered())
                session = bootstrap.active()
                if session is not None:
                    session.probes.emit(REROUTE, start, now() - start, min(weights), peers.num_switches)

    def _sum_and_commit(self, interpreter: Interpreter, stage: int) -> None:
        """Sum the gradients over the replicas, give the ranks of the last stage all losses, and commit the step."""
        m, add_up = interpreter.num_microbatches, self.peers.sum_over_stage
        interpreter.weights[stage].sum_gradients(add_up, m)
        if not self._graph.takers(stage):
            first = min(interpreter.data)
            dtype = next((value.dtype for value in interpreter.losses.values()), torch.float32)
            table = torch.zeros(m, dtype=torch.float64)
            for microbatch, value in interpreter.losses.items():
                table[microbatch - first] = value
            add_up(table)
            interpreter.losses = {first + index: value for index, value in enumerate(table.to(dtype).unbind())}
        self.peers.commit()


def check_replicas(count: int, world_size: int, num_microbatches: int, interleave: int, *, elastic: bool) -> None:
    """Raise `InputError` for replicas that cannot be."""
    if count < 1 or world_size % count or num_microbatches % count:
        raise InputError(
            f"replicas is {count}, with {world_size} ranks and {num_microbatches} micro-batches; it is at least 1 "
            "and divides both. Pass 1, or change one of them."
        )
    if elastic and count == 1:
        raise InputError("elastic=True needs another rank with each stage. Pass replicas=2 or more.")
    if count > 1 and interleave > 1:
        raise InputError(f"replicas have one stage per rank, and interleave is {interleave}. Pass one of both.")
