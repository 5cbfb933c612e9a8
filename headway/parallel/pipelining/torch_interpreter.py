"""The interpreter: a rank's rows of any pipeline program, one after the other.

It knows no schedule by name. A row says operation, stage, micro-batch, version
of the weights, and for a message the other rank and stage; what lies between
(placement, graph of stages, order, flushes) is in the program.

    RECV   post the receive                            SEND   post what the stage has made
    F      wait for the inputs, run the module on      B      wait for the gradients of the outputs, run the
           the row's version, keep what B needs               backward, keep the gradients of the inputs
    I, W   the two parts of B                          OPT    step with the mean gradient: a new version

Of a stage the micro-batches in flight are its contexts; a version is dropped
when none of them has read it and no later row will.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.pipelining import _backward

from headway.core.errors import InputError
from headway.parallel.pipelining.torch_cut import CutModel, Tensors
from headway.parallel.pipelining.torch_messages import ACTIVATION, GRADIENT, MessageName, StageMessages
from headway.parallel.pipelining.torch_weights import StageWeights
from headway.runtime.in_rank import bootstrap
from headway.runtime.recorder.probes import now
from headway.sim.pipeline.actions import OPT, RECV, SEND, B, F, I, W
from headway.sim.pipeline.weight_versions import ProgramRows
from headway.trace.events.vocabulary import SPANS

torch_backward: Any = _backward
"""torch's two parts of a backward: a private module, which `SPLITS` looks at."""

LossFn = Callable[[Any, Any], torch.Tensor]
"""Loss of a micro-batch, from the output of the last stage and the target."""

PART_NAMES = {
    op: SPANS[f"stage.{span}"].code for op, span in ((F, "forward"), (B, "backward"), (I, "input"), (W, "weight"))
}
"""Operation -> what it is recorded as."""


@dataclass(slots=True)
class StageContext:
    """What a stage keeps of a micro-batch between its forward and its backward."""

    version: int
    """Version that the forward read."""

    inputs: dict[int, list[torch.Tensor]]
    """Stage before -> the tensors from it, leaves of this stage's graph."""

    outputs: tuple[torch.Tensor, ...]
    """What the module returned."""

    loss: torch.Tensor | None = None
    """Of the last stage."""

    parts: list[dict[str, Any]] | None = None
    """Between the two parts of a backward: what torch keeps for the second; None: it is to be a whole one."""

    weight_gradients: tuple[torch.Tensor | None, ...] | None = None
    """Gradients of the weights where the second part has no more to do than add them."""


@dataclass(slots=True)
class MicrobatchData:
    """Input and target of one micro-batch."""

    inputs: Tensors | None
    """Arguments of the model; None on ranks that need none."""

    target: Any
    """What the loss compares with; None likewise."""


class GapObserver(Protocol):
    """What is told of the large gaps of a rank (PipeFill)."""

    def begin(self, gap_kind: str) -> None:
        """Nothing is left to compute: behind the last row of a step ('fill_drain'), or before the first backward."""
        ...

    def end(self) -> None:
        """What was waited for is there, or nothing was waited for; called before the next computation."""
        ...


@dataclass(slots=True)
class Interpreter:
    """Runs rows on the stages of one rank."""

    cut: CutModel
    """The model."""

    weights: dict[int, StageWeights]
    """Stage of this rank -> its weights."""

    messages: StageMessages
    """Ends of the messages."""

    loss: LossFn
    """Loss of the last stage."""

    tie_groups: dict[int, dist.ProcessGroup | None] = field(default_factory=dict)
    """Index of a tie of the model, for those with a copy here -> the ranks that have one; None: this one alone."""

    data: dict[int, MicrobatchData] = field(default_factory=dict)
    """Micro-batch -> its data, until its forwards and its loss are done here."""

    contexts: dict[tuple[int, int], StageContext] = field(default_factory=dict)
    """(stage, micro-batch) in flight."""

    gradients: dict[tuple[int, int, int], list[torch.Tensor]] = field(default_factory=dict)
    """(stage, stage before, micro-batch) -> gradients of what came from there, until they are passed on."""

    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    """Micro-batch -> loss."""

    num_microbatches: int = 1
    """Of a step: numbers in a recording are those inside a step."""

    gaps: GapObserver | None = None
    """Told when the two large gaps of this rank begin and end; None: nobody is."""

    whole_backwards: set[int] = field(default_factory=set)
    """Stages whose backward in two parts gave other gradients than a whole one, or failed."""

    seed: int | None = None
    """What a forward draws follows from this, its stage and its micro-batch, on whichever rank; None: from the rank."""

    before_update: Callable[[int], None] | None = None
    """Called with a stage before its update, once its gradients are complete."""

    _arrived: dict[MessageName, list[torch.Tensor]] = field(default_factory=dict)
    _tried: set[int] = field(default_factory=set)

    def run(self, rows: ProgramRows, following: ProgramRows) -> None:
        """Run rows; `following` are those behind them, which may read versions too."""
        reads = _next_reads(rows, following)
        session = bootstrap.active()
        columns = (rows.op, rows.stage, rows.microbatch, rows.version, rows.peer, rows.peer_stage)
        shared = False
        backward = np.flatnonzero(np.isin(rows.op, (B, I)))
        turns = int(backward[0]) if backward.size else -1
        for index, (op, stage, microbatch, version, peer, other_stage) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            if op in (SEND, RECV):
                self._message(op, stage, other_stage, microbatch, peer)
                continue
            if op == OPT:
                shared = shared or self._share_ties()
                if self.before_update is not None:
                    self.before_update(stage)
                self.weights[stage].update(version, self._versions_in_use(stage), reads[index])
                continue
            if index == turns and self.gaps is not None:
                self.gaps.begin("forward_backward")
            self._await(op, stage, microbatch)
            if self.gaps is not None:
                self.gaps.end()
            start = now()
            COMPUTATIONS[op](self, stage, microbatch, version)
            if session is not None:
                session.probes.emit(PART_NAMES[op], start, now() - start, stage, microbatch % self.num_microbatches)
        for stage, weights in self.weights.items():
            weights.drop(self._versions_in_use(stage), min(_first_read(following, stage), weights.newest))
        if self.gaps is not None:
            self.gaps.begin("fill_drain")

    def _versions_in_use(self, stage: int) -> list[int]:
        """Return the versions of its weights that a stage's micro-batches in flight were computed with."""
        return [context.version for (where, _), context in self.contexts.items() if where == stage]

    # Messages.

    def _message(self, op: int, stage: int, other_stage: int, microbatch: int, peer: int) -> None:
        """Post one end of a message."""
        is_after = stage in self.cut.graph.preds[other_stage]  # `other` follows `stage`
        if op == RECV:
            channel = GRADIENT if is_after else ACTIVATION
            self.messages.post(MessageName(channel, other_stage, stage, microbatch), peer)
        elif is_after:
            tensors = self._edge(stage, other_stage, self.contexts[stage, microbatch].outputs)
            self.messages.send(MessageName(ACTIVATION, stage, other_stage, microbatch), peer, tensors)
        else:
            name = MessageName(GRADIENT, stage, other_stage, microbatch)
            self.messages.send(name, peer, self.gradients.pop((stage, other_stage, microbatch)))

    def _await(self, op: int, stage: int, microbatch: int) -> None:
        """Wait for what a computation needs from other ranks: a wait is no part of it."""
        names = []
        if op == F:
            names = [MessageName(ACTIVATION, source, stage, microbatch) for source in self.cut.graph.preds[stage]]
        elif op in (B, I):
            names = [MessageName(GRADIENT, target, stage, microbatch) for target in self.cut.graph.takers(stage)]
        for name in names:
            if self.messages.has(name):
                self._arrived[name] = self.messages.take(name)

    def _indices(self, source: int, target: int, count: int) -> list[int]:
        """Return which outputs of a stage another one takes, each once."""
        indices = [source_of.index for source_of in self.cut.stages[target].sources if source_of.stage == source]
        return list(range(count)) if None in indices else sorted({int(index) for index in indices if index is not None})

    def _edge(self, source: int, target: int, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [outputs[index] for index in self._indices(source, target, len(outputs))]

    # Computations.

    def _forward(self, stage: int, microbatch: int, version: int) -> None:
        inputs = {before: self._inputs(stage, before, microbatch) for before in self.cut.graph.preds[stage]}
        arguments: list[torch.Tensor] = []
        for source in self.cut.stages[stage].sources:
            if source.stage < 0:
                given = self._data(stage, microbatch).inputs
                if given is None:
                    raise InputError(f"stage {stage} reads the input of the model. Pass x to step() on its rank.")
                arguments += given if source.index is None or len(given) == 1 else (given[source.index],)
            elif source.index is None:
                arguments += inputs[source.stage]
            else:
                indices = self._indices(source.stage, stage, len(inputs[source.stage]))
                arguments.append(inputs[source.stage][indices.index(source.index)])
        read = self.weights[stage].number(version)
        with self._drawing(stage, microbatch):
            made = self.weights[stage].run(read, arguments)
        outputs = tuple(made) if isinstance(made, tuple | list) else (made,)
        if not all(isinstance(source, torch.Tensor) for source in outputs):
            raise InputError(
                f"stage {stage} returns a {type(made).__name__}; stages pass tensors. Return one, or a tuple of them."
            )
        context = StageContext(read, inputs, outputs)
        self.contexts[stage, microbatch] = context
        if not self.cut.graph.takers(stage):
            target = self._data(stage, microbatch).target
            context.loss = self.loss(outputs[0] if len(outputs) == 1 else outputs, target)
            self.losses[microbatch] = context.loss.detach()

    @contextmanager
    def _drawing(self, stage: int, microbatch: int) -> Iterator[None]:
        """Let torch's generator on the host draw what belongs to the micro-batch, and go on behind as it would have."""
        if self.seed is None:
            yield
            return
        before = torch.get_rng_state()
        torch.default_generator.manual_seed((self.seed + microbatch * len(self.cut.stages) + stage) % (1 << 63))
        try:
            yield
        finally:
            torch.set_rng_state(before)

    def drop_step(self, messages: StageMessages) -> None:
        """Forget what was computed since the last update, and go on with other messages."""
        self.messages = messages
        self.contexts.clear()
        self.gradients.clear()
        self._arrived.clear()
        for weights in self.weights.values():
            weights.discard()

    def _inputs(self, stage: int, source: int, microbatch: int) -> list[torch.Tensor]:
        """Return what a stage gets from another one, as leaves."""
        name = MessageName(ACTIVATION, source, stage, microbatch)
        tensors = self._arrived.pop(name, None)
        if tensors is not None:
            forms = self.messages.forms[source, stage]
            return [
                tensor.requires_grad_() if form.wants_gradient else tensor
                for tensor, form in zip(tensors, forms, strict=True)
            ]
        made = self._edge(source, stage, self.contexts[source, microbatch].outputs)
        self.messages.check_form(name, made)
        return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in made]

    def _data(self, stage: int, microbatch: int) -> MicrobatchData:
        data = self.data.get(microbatch)
        assert data is not None, f"stage {stage} has no data of micro-batch {microbatch}"
        return data

    def _output_gradients(
        self, stage: int, microbatch: int, context: StageContext
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """Return the outputs that a backward starts from, and their gradients: the sum over the stages that follow."""
        if context.loss is not None:
            return ([context.loss] if context.loss.requires_grad else []), None
        sums: dict[int, torch.Tensor] = {}
        for target in self.cut.graph.takers(stage):
            name = MessageName(GRADIENT, target, stage, microbatch)
            local = self.gradients.pop((target, stage, microbatch), None)
            gradients = local if local is not None else self._arrived.pop(name)
            indices = self._indices(stage, target, len(context.outputs))
            requiring = [index for index in indices if context.outputs[index].requires_grad]
            for index, gradient in zip(requiring, gradients, strict=True):
                sums[index] = sums[index] + gradient if index in sums else gradient
        return [context.outputs[index] for index in sums], list(sums.values())

    def _backward(self, stage: int, microbatch: int, version: int) -> None:
        del version
        context = self.contexts.pop((stage, microbatch))
        outputs, grads = self._output_gradients(stage, microbatch, context)
        with self.weights[stage].collecting(context.version):
            if outputs:
                torch.autograd.backward(outputs, grads)
        self._pass_on(stage, microbatch, context)

    def _pass_on(self, stage: int, microbatch: int, context: StageContext) -> None:
        """Keep the gradients of the inputs until they are sent, or used on this rank."""
        for source, tensors in context.inputs.items():
            leaves = [tensor for tensor in tensors if tensor.requires_grad]
            self.gradients[stage, source, microbatch] = [
                torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in leaves
            ]

    def _backward_input(self, stage: int, microbatch: int, version: int) -> None:
        """Make the gradients of the inputs; a stage without any makes a whole backward of the second part."""
        del version
        context = self.contexts[stage, microbatch]
        outputs, grads = self._output_gradients(stage, microbatch, context)
        leaves = [tensor for tensors in context.inputs.values() for tensor in tensors if tensor.requires_grad]
        if not outputs or not leaves:
            context.parts, context.outputs = [{"outputs": outputs, "grads": grads}], ()
        elif stage in self.whole_backwards or not SPLITS:
            self._apart(stage, context, outputs, grads, leaves, keep=False)
        else:
            if stage not in self._tried:
                self._apart(stage, context, outputs, grads, leaves, keep=True)
                for leaf in leaves:
                    leaf.grad = None
            try:
                with self.weights[stage].collecting(context.version, counts=False) as parameters:
                    _, context.parts = torch_backward.stage_backward_input(outputs, grads, leaves, iter(parameters))
            except RuntimeError:
                for leaf in leaves:
                    leaf.grad = None
                self.whole_backwards.add(stage)
                self._apart(stage, context, outputs, grads, leaves, keep=False)
        self._pass_on(stage, microbatch, context)

    def _apart(
        self,
        stage: int,
        context: StageContext,
        outputs: list[torch.Tensor],
        grads: list[torch.Tensor] | None,
        leaves: list[torch.Tensor],
        *,
        keep: bool,
    ) -> None:
        """Make both gradients by one call that keeps those of the weights: right for every graph, and no faster."""
        with self.weights[stage].collecting(context.version, counts=False) as parameters:
            gradients = torch.autograd.grad(
                outputs, [*leaves, *parameters], grads, retain_graph=keep, allow_unused=True
            )
        for leaf, gradient in zip(leaves, gradients, strict=False):
            leaf.grad = gradient
        context.weight_gradients = gradients[len(leaves) :]

    def _backward_weight(self, stage: int, microbatch: int, version: int) -> None:
        del version
        context = self.contexts.pop((stage, microbatch))
        with self.weights[stage].collecting(context.version) as parameters:
            if context.parts and "outputs" in context.parts[0]:
                if context.parts[0]["outputs"]:
                    torch.autograd.backward(context.parts[0]["outputs"], context.parts[0]["grads"])
                return
            before, is_first = (
                [parameter.grad for parameter in parameters],
                context.weight_gradients is not None and stage not in self._tried,
            )
            if context.parts is not None and (is_first or context.weight_gradients is None):
                for parameter in parameters if is_first else ():
                    parameter.grad = None
                torch_backward.stage_backward_weight(iter(parameters), context.parts)
            if context.weight_gradients is None:
                return
            # The first micro-batch of a stage goes both ways: the parts must give what a whole backward gives.
            self._tried.add(stage)
            if is_first and not all(
                map(_equal, (parameter.grad for parameter in parameters), context.weight_gradients)
            ):
                self.whole_backwards.add(stage)
            for parameter, old, gradient in zip(parameters, before, context.weight_gradients, strict=True):
                parameter.grad = old if gradient is None else gradient if old is None else old + gradient

    def _share_ties(self) -> bool:
        """Add up the gradients of the copies of tied parameters, on all ranks that have one."""
        for index, group in self.tie_groups.items():
            copies = [(self.weights[stage], name) for stage, name in self.cut.ties[index] if stage in self.weights]
            copies = [(weights, name) for weights, name in copies if name in weights.parameters]
            total = copies[0][0].gradient(copies[0][1])
            for weights, name in copies[1:]:
                total = total + weights.gradient(name)
            if group is not None:
                total = total.clone()
                dist.all_reduce(total, group=group)
            for weights, name in copies:
                weights.set_gradient(name, total if weights is copies[0][0] else total.clone())
        return True


COMPUTATIONS: Mapping[int, Callable[[Interpreter, int, int, int], None]] = {
    F: Interpreter._forward, B: Interpreter._backward, I: Interpreter._backward_input, W: Interpreter._backward_weight,
}  # fmt: skip
"""Operation -> what runs it, called with (stage, micro-batch, version)."""


def _has_parts() -> bool:
    """Whether this torch has the two parts of a backward, as they are called here."""
    for name, count in (("stage_backward_input", 4), ("stage_backward_weight", 2)):
        function = getattr(torch_backward, name, None)
        if function is None or len(inspect.signature(function).parameters) < count:
            return False
    return True


SPLITS = _has_parts()
"""Whether a backward runs in two parts; else the first part makes both gradients."""


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _first_read(rows: ProgramRows, stage: int) -> int:
    """Return the version that the first forward of a stage reads; a large number where there is none."""
    reads = rows.version[(rows.op == F) & (rows.stage == stage)]
    return int(reads[0]) if reads.size else 1 << 60


def _next_reads(rows: ProgramRows, following: ProgramRows) -> list[int]:
    """Return [n] the version that the next forward of each row's stage reads."""
    upcoming = {stage: _first_read(following, stage) for stage in set(rows.stage.tolist())}
    reads = [0] * rows.op.size
    for index in range(rows.op.size - 1, -1, -1):
        stage = int(rows.stage[index])
        reads[index] = upcoming[stage]
        if rows.op[index] == F:
            upcoming[stage] = int(rows.version[index])
    return reads
