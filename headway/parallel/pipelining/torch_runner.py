"""Train a model as a pipeline over the ranks of a job, under any schedule of `headway.parallel.SCHEDULES`.

    runner = headway.parallel.pipeline(
        model, example, loss=loss, optimizer=lambda parameters: torch.optim.Adam(parameters), num_microbatches=8,
        schedule="two_buffer",
    )
    for x, y in loader:
        losses = runner.step(x, y)          # micro-batch -> loss, on the rank of the last stage
    runner.state_dict()                     # what this rank holds, under the names of the whole model

Each rank makes the runner from the same model, and calls it alike. A schedule
without a flush leaves backwards in flight when `step` returns; the next step
runs them, or `flush`, which `state_dict`, `load_state_dict` and `switch` call.

>>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
>>> runner = pipeline(
...     model, torch.zeros(1, 2), loss=torch.nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
...     num_microbatches=2,
... )
>>> sorted(runner.step(torch.ones(4, 2), torch.ones(4, 1))), sorted(runner.state_dict())
([0, 1], ['0.bias', '0.weight', '1.bias', '1.weight'])
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from headway.core.errors import BackgroundError, InputError
from headway.core.tables import pick
from headway.parallel.pipelining.torch_cut import CutModel, ModelLike, Tensors, cut
from headway.parallel.pipelining.torch_interpreter import GapObserver, Interpreter, LossFn, MicrobatchData
from headway.parallel.pipelining.torch_messages import StageMessages
from headway.parallel.pipelining.torch_replicas import PipelineReplicas, check_replicas
from headway.parallel.pipelining.torch_weights import OptimizerFn, StageWeights, load_optimizer_state, optimizer_state
from headway.runtime.in_rank import bootstrap
from headway.runtime.lane import LONGEST_S
from headway.sim.pipeline.actions import F, PipelineProgram, StageGraph
from headway.sim.pipeline.lower import check, lower
from headway.sim.pipeline.orders import PipelineShape
from headway.sim.pipeline.schedules import SCHEDULES
from headway.sim.pipeline.weight_versions import FLUSH_FREE, ProgramRows, StepLoop, flushed_loop, rows_of, step_loop

Schedule = str | PipelineProgram
"""A name of `SCHEDULES`, or a program of one step."""


def pipeline(
    model: ModelLike,
    example: torch.Tensor | Tensors,
    *,
    loss: LossFn,
    optimizer: OptimizerFn,
    num_microbatches: int,
    schedule: Schedule = "1f1b",
    interleave: int = 1,
    vertical_sync: bool = False,
    replicas: int = 1,
    elastic: bool = False,
    timeout_s: float = LONGEST_S,
) -> PipelineRunner:
    """Cut a model into stages, one or `interleave` per rank, and return what trains it; every rank calls this.

    model
        An `nn.Sequential`, any module that torch can trace, or a list of stages: modules, or (module, its
        predecessors), whose outputs it gets in that order. On all ranks with the same weights.
    example
        Input of one micro-batch, which the tracer runs.
    loss
        (output of the last stage, target) -> mean loss of a micro-batch.
    optimizer
        Parameters of a stage -> torch optimizer. A step's gradient is the mean over its micro-batches.
    num_microbatches
        Parts that each batch is cut into, along its first dimension.
    schedule
        A name of `SCHEDULES` ('graph' is 'graph_1f1b'), or the program of one step.
    interleave
        Stages per rank, for 'interleaved' and 'v'.
    vertical_sync
        Under 'async_1f1b': every stage reads the version that the first one read.
    replicas
        Pipelines side by side, with one stage per rank: of S stages rank d S + s has stage s of replica d. Each takes
        its share of the micro-batches of a batch, and every rank is given the whole batch. What a forward draws from
        torch's generator on the host follows from the micro-batch, not from the rank.
    elastic
        With replicas, under `headway run` on one host: a rank that is killed by a signal is done without as long as
        another one has its stage (SlipStream). Steps, batches and losses stay what they would have been.
    timeout_s
        How long a message may be waited for.

    Raises `InputError` where the model, the schedule or the optimizer cannot be.
    """
    rank, world_size = _rank_and_size()
    check_replicas(replicas, world_size, num_microbatches, interleave, elastic=elastic)
    stages = cut(model, example, world_size // replicas * interleave)
    device = next(
        (weights.device for stage in stages.stages for weights in stage.module.parameters()), torch.device("cpu")
    )
    side_by_side = None
    if replicas > 1:
        if stages.ties:
            raise InputError(f"{_tied(stages)} are one parameter, which replicas do not sum. Untie them.")
        side_by_side = PipelineReplicas(replicas, stages.graph, elastic=elastic, timeout_s=timeout_s)

    def connected() -> StageMessages:
        group = None if side_by_side is None else side_by_side.peers.everybody
        return StageMessages(len(stages.stages), device=device, timeout_s=timeout_s, group=group)

    return PipelineRunner(
        stages, connected, loss, optimizer, num_microbatches, schedule, interleave=interleave,
        vertical_sync=vertical_sync, rank=rank, world_size=world_size, replicas=side_by_side,
    )  # fmt: skip


class PipelineRunner:
    """Trains the stages of this rank; made by `pipeline`."""

    def __init__(
        self, stages: CutModel, connected: Callable[[], StageMessages], loss: LossFn, optimizer: OptimizerFn,
        num_microbatches: int, schedule: Schedule, *, interleave: int, vertical_sync: bool, rank: int, world_size: int,
        replicas: PipelineReplicas | None,
    ) -> None:  # fmt: skip
        self._cut, self._rank, self._replicas, self._connected = stages, rank, replicas, connected
        count = 1 if replicas is None else replicas.count
        self._world_size, self._share = world_size // count, num_microbatches // count  # of one replica
        self._num_microbatches, self._interleave, self._vertical_sync = num_microbatches, interleave, vertical_sync
        self._loop = self._looped(schedule)
        ranks = self._ranks_of()
        stashes = rows_of(self._loop.program, rank).reads_older
        weights = {
            stage: StageWeights(stages.stages[stage], optimizer, stashes=stage in stashes)
            for stage in range(len(stages.stages))
            if ranks[stage] == rank
        }
        groups: dict[int, dist.ProcessGroup | None] = {}
        for index, tie in enumerate(stages.ties):
            ranks = sorted({ranks[stage] for stage, _ in tie})
            group = dist.new_group(ranks) if len(ranks) > 1 else None  # by all ranks, in one order
            if rank in ranks:
                groups[index] = group
        self._interpreter = Interpreter(stages, weights, connected(), loss, groups, num_microbatches=num_microbatches)
        if replicas is not None:
            replicas.prepare(self._interpreter)
        self.optimizer = StageOptimizers(self)
        """State of the optimizers of this rank, by names of the whole model: to be saved beside the runner."""
        self._steps = self._first_microbatch = self._first_version = 0
        self._failed = ""
        self._note(schedule)

    # Training.

    def step(self, x: torch.Tensor | Tensors | None = None, y: Any = None) -> dict[int, torch.Tensor]:
        """Train on a batch; return micro-batch -> loss on the rank of the last stage, nothing on others.

        `x` is needed on ranks whose stages read the model's input, `y` on that of the last stage. Raises `InputError`
        where a batch cannot be cut evenly or a stage's output changes its shape, `BackgroundError` where a peer is
        gone or late.
        """
        m = self._num_microbatches
        first = self._first_microbatch + self._steps * m
        inputs, targets = _parts(x, m, "x"), _parts(y, m, "y")
        data = {
            first + index: MicrobatchData(
                None if chunk is None else tuple(chunk) if isinstance(chunk, tuple | list) else (chunk,), target
            )
            for index, (chunk, target) in enumerate(zip(inputs, targets, strict=True))
        }
        interpreter, number = self._interpreter, self._steps
        if not number:
            for weights in interpreter.weights.values():
                weights.renew()
        interpreter.data = data
        if self._replicas is None:
            self._run_step(number)
        else:
            self._replicas.run_step(interpreter, lambda: self._run_step(number), self._recovered)
        interpreter.data = {}
        self._steps += 1
        return {microbatch - first: value for microbatch, value in sorted(interpreter.losses.items())}

    def _run_step(self, number: int) -> None:
        interpreter = self._interpreter
        interpreter.losses = {}
        sent = interpreter.messages.num_unsettled
        self._run(self._loop.step(number), self._loop.step(number + 1))
        # A rank may end behind a flushed step. Without a flush its peers take some messages in the next step only.
        kept_back = 0 if self._loop.flushes else interpreter.messages.num_unsettled - sent
        with _failing(self):
            interpreter.messages.settle(kept_back)

    def _recovered(self) -> StageMessages:
        """Take the program of the ranks that are left; return their messages."""
        self._loop = flushed_loop(self._side_by_side(None), self._rank)
        self._failed = ""
        return self._connected()

    def flush(self) -> None:
        """Run what is in flight: every micro-batch is in the weights then. Every rank calls it."""
        if self._steps:
            rows = self._loop.drain(self._steps)
            versions, microbatches = self._steps * self._loop.updates, self._steps * self._num_microbatches
            self._run(rows, self._loop.step(0).shifted(microbatches, versions))
            self._first_microbatch += microbatches
            self._first_version += versions
            self._steps = 0
        with _failing(self):
            self._interpreter.messages.settle()

    def switch(self, schedule: Schedule, *, vertical_sync: bool = False) -> None:
        """Go on under another schedule, from the weights as they are; every rank calls it.

        Raises `InputError` where it cannot run on these stages, and keeps the one that it had.
        """
        before = self._loop, self._vertical_sync
        self.flush()
        self._vertical_sync = vertical_sync
        try:
            self._loop = self._looped(schedule)
            ranks = self._ranks_of()
            if any((ranks[stage] == self._rank) != (stage in self._interpreter.weights) for stage in range(len(ranks))):
                raise InputError("the schedule puts a stage on another rank. Make a new runner for it.")
        except InputError:
            self._loop, self._vertical_sync = before
            raise
        stashes = rows_of(self._loop.program, self._rank).reads_older
        for stage, weights in self._interpreter.weights.items():
            weights.restart(stashes=stage in stashes)
        self._first_version = 0

    def watch_gaps(self, observer: GapObserver | None) -> None:
        """Tell an observer of this rank's two large gaps from now on. For schedules with a flush; no results change."""
        self._interpreter.gaps = observer

    @property
    def program(self) -> PipelineProgram:
        """The program that runs: of one step, or of as many steps as fill a pipeline without a flush, and more."""
        return self._loop.program

    @property
    def live_versions(self) -> int:
        """The most versions of its weights that a stage of this rank has held at once."""
        return max((weights.most_versions for weights in self._interpreter.weights.values()), default=0)

    # State.

    @property
    def holders(self) -> tuple[int, ...]:
        """Ranks that have the tensors of `state_dict`: those of this stage (read by `headway.Checkpointer`)."""
        return (self._rank,) if self._replicas is None else self._replicas.peers.holders

    def wants(self, path: tuple[str | int, ...]) -> bool:
        """Say whether a saved value, by its keys below the runner, is of this rank (read by `headway.Checkpointer`)."""
        return any(str(path[0]) in weights.stage.state() for weights in self._interpreter.weights.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Flush, and return the parameters and buffers of this rank's stages, by their names in the whole model."""
        self.flush()
        state: dict[str, torch.Tensor] = {}
        for weights in self._interpreter.weights.values():
            state |= {name: value.detach() for name, value in weights.stage.state().items()}
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Flush, and take this rank's part of a state of the whole model, or of its own; other names are passed over.

        Raises `InputError` where a name is missing or has another shape, and changes nothing then.
        """
        current = self.state_dict()
        for name, value in current.items():
            if name not in state:
                near = difflib.get_close_matches(name, list(state), n=1)
                hint = f" (nearest: '{near[0]}')" if near else ""
                raise InputError(f"the state lacks '{name}'{hint}. Give that of the whole model, or of these stages.")
            if state[name].shape != value.shape:
                shapes = f"{list(state[name].shape)} and is {list(value.shape)} here"
                raise InputError(f"'{name}' is {shapes}. Build the model as it was saved.")
        with torch.no_grad():
            for name, value in current.items():
                value.copy_(state[name])
        for weights in self._interpreter.weights.values():
            weights.restart()
        self._first_version = 0

    # The schedule.

    def _looped(self, schedule: Schedule) -> StepLoop:
        """Return the loop of a schedule on this rank."""
        graph, ties = self._cut.graph, self._cut.ties
        if isinstance(schedule, PipelineProgram):
            if schedule.graph != graph or schedule.num_ranks != self._world_size:
                raise InputError(
                    f"the program is for {schedule.num_ranks} ranks and stages after {schedule.graph.preds}, the model "
                    f"has {self._world_size} ranks and stages after {graph.preds}. Lower its orders with this graph."
                )
            if schedule.num_microbatches != self._share:
                counts = f"{schedule.num_microbatches} micro-batches, the runner {self._share}"
                raise InputError(f"the program has {counts}. Make both alike.")
            check(schedule)
            return flushed_loop(self._side_by_side(schedule), self._rank)
        name = "graph_1f1b" if schedule == "graph" else schedule
        order = pick(SCHEDULES, name, "schedule")
        is_chain = graph == StageGraph.chain(len(graph.preds))
        shape = PipelineShape(
            self._world_size, self._share, self._interleave,
            graph=graph if self._interleave == 1 and not is_chain else None,
        )  # fmt: skip
        if schedule not in FLUSH_FREE:
            return flushed_loop(self._side_by_side(lower(order(shape), graph)), self._rank)
        if self._replicas is not None:
            raise InputError(f"replicas sum their gradients once a step, and {schedule} has no flush. Choose '1f1b'.")
        if ties:
            raise InputError(
                f"{_tied(self._cut)} are one parameter, and under {schedule} stages update at different times. Untie "
                "them, or take a schedule with a flush, such as 1f1b."
            )
        return step_loop(schedule, shape, self._rank, vertical_sync=self._vertical_sync)

    def _side_by_side(self, program: PipelineProgram | None) -> PipelineProgram:
        """Return the program of all replicas from that of one; None: the one before."""
        if self._replicas is not None:
            return self._replicas.program(program)
        assert program is not None, "only replicas have one before"
        return program

    def _ranks_of(self) -> list[int]:
        """Return [stages] the rank of each stage; raises `InputError` where a stage is on several."""
        program = self._loop.program
        if self._replicas is not None:
            this_stage = self._replicas.peers.stage_of(self._rank)
            return [self._rank if stage == this_stage else -1 for stage in range(program.num_stages)]
        ranks_of: list[int] = []
        for stage in range(program.num_stages):
            ranks = sorted(set(program.rank[(program.op == F) & (program.stage == stage)].tolist()))
            if len(ranks) != 1:
                raise InputError(f"stage {stage} is on ranks {ranks}; a runner has each stage once. Move it to one.")
            ranks_of.append(ranks[0])
        return ranks_of

    def _run(self, rows: ProgramRows, following: ProgramRows) -> None:
        """Run rows of the loop where the stream is now."""
        if self._failed:
            raise BackgroundError(f"an earlier step of this runner failed: {self._failed} Make it anew.")
        move = self._first_microbatch, self._first_version
        with _failing(self):
            self._interpreter.run(rows.shifted(*move), following.shifted(*move))

    def _note(self, schedule: Schedule) -> None:
        """Write down for a recording what the pipeline is."""
        session = bootstrap.active()
        if session is not None and session.windows is not None:
            # Receives of the next step are posted before this one ends; a profiler that is stopped meanwhile crashes.
            session.windows.abort("messages of a pipeline are under way between its steps")
        if session is not None and len(self._interpreter.weights) == 1:
            session.probes.tables["pipeline"] = {
                "schedule": type(self).__name__, "order": schedule if isinstance(schedule, str) else "program",
                "stage": min(self._interpreter.weights), "num_stages": len(self._cut.stages),
                "num_microbatches": self._num_microbatches, "schedules": 1,
                "preds": [list(stages) for stages in self._cut.graph.preds],
                "replicas": self._replicas.count if self._replicas is not None else 1,
                "elastic": self._replicas is not None and self._replicas.peers.is_elastic,
            }  # fmt: skip


class StageOptimizers:
    """The optimizers of a runner as one object with a state: parameters by their names in the whole model."""

    def __init__(self, runner: PipelineRunner) -> None:
        self._runner = runner

    @property
    def holders(self) -> tuple[int, ...]:
        """As `PipelineRunner.holders`."""
        return self._runner.holders

    def wants(self, path: tuple[str | int, ...]) -> bool:
        """As `PipelineRunner.wants`."""
        return self._runner.wants(path)

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Flush, and return parameter -> its state."""
        self._runner.flush()
        return optimizer_state(self._runner._interpreter.weights.values())

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Flush, and take the state of this rank's parameters."""
        self._runner.flush()
        load_optimizer_state(self._runner._interpreter.weights.values(), state)
        self._runner._first_version = 0


class _failing:  # noqa: N801  # a context manager, used as a function
    """Remembers that a step failed half done: its messages and versions are no basis for the next one."""

    def __init__(self, runner: PipelineRunner) -> None:
        self._runner = runner

    def __enter__(self) -> None: ...

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not self._runner._failed:
            self._runner._failed = str(error).splitlines()[0] if str(error) else type(error).__name__


def _tied(stages: CutModel) -> str:
    return " and ".join(f"{name} of stage {stage}" for stage, name in stages.ties[0][:2])


def _rank_and_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _parts(batch: Any, count: int, name: str) -> list[Any]:
    """Cut a batch, or each tensor of nested tuples, lists and dicts, into `count` micro-batches of one size."""
    if batch is None:
        return [None] * count
    if isinstance(batch, torch.Tensor):
        if not batch.ndim or not len(batch) or len(batch) % count:
            size = len(batch) if batch.ndim else 0
            raise InputError(
                f"{name} has {size} examples, no multiple of {count} micro-batches; all need one shape. Give "
                f"{max(1, round(size / count)) * count}, or drop the last, smaller batch."
            )
        return list(batch.chunk(count))
    if isinstance(batch, Mapping):
        cut_values = {key: _parts(value, count, f"{name}[{key!r}]") for key, value in batch.items()}
        return [{key: parts[index] for key, parts in cut_values.items()} for index in range(count)]
    if isinstance(batch, tuple | list):
        cut_parts = [_parts(value, count, f"{name}[{index}]") for index, value in enumerate(batch)]
        return list(zip(*cut_parts, strict=True))
    raise InputError(f"{name} is a {type(batch).__name__}; give tensors, or a tuple or dict of them.")
