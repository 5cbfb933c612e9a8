"""Remedy 'parallel.schedule': another order of a pipeline's computations under the script's own stages.

torch's `ScheduleGPipe` and `Schedule1F1B` have their order in their code.
torch also has a runtime that executes any order which is given to it as text.
After the first pass of a schedule one is made on the same stage, and from then
on `step` goes to it: the stage, its module, the loss and the split into
microbatches stay the script's own.

Forwards of a stage keep the order of microbatches, so random draws and the
list of losses stay as they were. So do the sums of weight gradients where a
stage's last backwards keep that order too; else the plan needs the grant
'result-equivalent'. Where backwards run in two parts, each rank tries them
first, in a forked child (`differs`): the gradients have to be those of a whole
backward, bit for bit. All ranks of a pipeline decide together: what one of
them cannot do, none does.

A runner of headway's own (`headway.parallel.pipeline`) runs any order by
itself: it is switched before its first step, also to a schedule without a
flush, which trains on weights of one step before and needs the grant 'lossy'.

Whether a backward in two parts gives a stage the gradients of a whole one, tried in a forked child.

One microbatch of random numbers in the shapes that the stage gets, twice, on
copies of the stage: as a whole, and in the two parts. The child can change
nothing outside itself (`headway.core.machine.apart`), so that a stage which counts its
calls, prints or writes files does in the training process what it always did.
Tried on CPUs: a process that uses a device cannot be forked.
"""

from __future__ import annotations

import copy
import functools
import inspect
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, schedules
from torch.distributed.pipelining import _backward as parts
from torch.nn.parallel import DistributedDataParallel

from headway.core.errors import InputError
from headway.core.machine.child import said
from headway.parallel.advise import NAME, in_order
from headway.parallel.pipelining.torch_runner import PipelineRunner
from headway.parallel.remedies import ScheduleParameters
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy
from headway.runtime.recorder.probes import now
from headway.sim.pipeline.actions import F, I, PipelineProgram, StageGraph
from headway.sim.pipeline.lower import check, lower

RUNNER_STEP = "headway.parallel.pipelining.torch_runner:PipelineRunner.step"
STEP = "torch.distributed.pipelining.schedules:PipelineScheduleSingle.step"
RUNTIME = "_PipelineScheduleRuntime"
SPECS = ("args_chunk_spec", "kwargs_chunk_spec", "output_merge_spec")
"""Arguments of a schedule that say how batches are split; kept with a leading underscore."""

FLAGS = {
    "_stages_forward_initialized": "_stage_forward_initialized",
    "_stages_backward_initialized": "_stage_backward_initialized",
}
"""Flag of torch's runtime -> the same of a schedule with one stage per rank: whether the stage knows its shapes."""


def schedule(parameters: ScheduleParameters, context: Context) -> Applied | RefusedRemedy:
    """Install the remedy. Raises `InputError` where the order is incomplete or would wait for itself."""
    facts: dict[str, Any]
    if parameters.order is None:
        if context.allow != "lossy":
            return RefusedRemedy(NAME, "it trains on weights of one step before: grant --allow lossy")
        facts = {"schedules": 0, "splits_backward": False, "schedule": parameters.schedule}
        _switch_runners(context, facts, lambda runner: runner.switch(str(parameters.schedule)))
        return Applied(NAME, facts)
    rows = parameters.order
    program = PipelineProgram.from_torch_csv("\n".join(rows))
    orders = program.orders()
    graph = None if parameters.preds is None else StageGraph(tuple(map(tuple, parameters.preds)))
    lowered = lower(orders, graph)
    check(lowered)
    missing = _missing() if graph is None else ""
    if missing:
        return RefusedRemedy(NAME, f"this torch has no {missing}, which executes an order")
    if not all(in_order(actions, (F,)) for actions in orders):
        return RefusedRemedy(NAME, "forwards would leave the order of microbatches, by which torch lists losses")
    if not all(in_order(actions) for actions in orders) and context.allow != "result-equivalent":
        return RefusedRemedy(NAME, "a stage would add its gradients in another order: grant --allow result-equivalent")
    text, splits = "".join(f"{row}\n" for row in rows), any(action.op == I for actions in orders for action in actions)
    shape = (len(rows), program.num_microbatches)
    facts = {"schedules": 0, "splits_backward": splits}
    begun: WeakSet[Any] = WeakSet()
    made: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def make(own: Any, args: Any, kwargs: Any) -> Any:
        """Return torch's runtime on the stage of a schedule, None where a rank of its pipeline cannot have one."""
        start, runtime, reason = now(), None, ""
        try:
            reason = _unfit(own, shape, splits) or (differs(own, args, kwargs) if splits else "")
            runtime = None if reason else _runtime(own, text)
        except Exception as cause:
            reason = f"torch's runtime refuses the order: {type(cause).__name__}: {cause}"
        context.probes.worked(start)
        found: list[str] = [""] * own._stage.group_size
        dist.all_gather_object(found, reason, group=own._stage.group)
        reason = next((other for other in found if other), "")
        if reason:
            context.note(RefusedRemedy(NAME, reason))
            return None
        facts["schedules"] += 1
        context.note(Applied(NAME, facts))
        return runtime

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the step of a schedule with one stage per rank."""

        @functools.wraps(original)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            """Run the pass in the plan's order."""
            if self not in made and self not in begun:
                begun.add(self) if self._has_backward else None
                return original(self, *args, **kwargs)
            if self not in made:
                made[self] = make(self, args, kwargs)
            runtime = made[self]
            if runtime is None:
                return original(self, *args, **kwargs)
            runtime._has_backward = self._has_backward  # eval() calls step without one
            return runtime.step(*args, **kwargs)

        return step

    # A pass that fails half done cannot be done again: its error is the script's to see.
    if graph is None:
        context.patch(STEP, around, passing=(Exception,))
    _switch_runners(context, facts, lambda runner: runner.switch(lowered))
    return Applied(NAME, facts)


def _switch_runners(context: Context, facts: dict[str, Any], switch: Callable[[PipelineRunner], None]) -> None:
    """Switch every runner before its first step; one that cannot keeps its schedule, on all ranks alike."""
    switched: WeakSet[PipelineRunner] = WeakSet()

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the step of a runner."""

        @functools.wraps(original)
        def step(self: PipelineRunner, *args: Any, **kwargs: Any) -> Any:
            """Switch once, then run the step."""
            if self not in switched:
                switched.add(self)
                try:
                    switch(self)
                    facts["schedules"] += 1
                    context.note(Applied(NAME, facts))
                except InputError as cause:
                    context.note(RefusedRemedy(NAME, str(cause)))
            return original(self, *args, **kwargs)

        return step

    context.patch(RUNNER_STEP, around, passing=(Exception,))


def _missing() -> str:
    """Return the private name of torch that an order needs and that is not there; '' where all are."""
    runtime = getattr(schedules, RUNTIME, None)
    if runtime is None:
        return RUNTIME
    if "format" not in inspect.signature(getattr(runtime, "_load_csv", len)).parameters:
        return f"{RUNTIME}._load_csv(path, format)"
    return ""


def _runtime(own: Any, text: str) -> Any:
    """Make torch's runtime on the stage of a schedule, with the order `text`."""
    named = {name: getattr(own, f"_{name}") for name in SPECS}
    runtime = getattr(schedules, RUNTIME)(
        [own._stage], own._n_microbatches, loss_fn=own._loss_fn, scale_grads=own.scale_grads, **named
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.csv"
        path.write_text(text)
        runtime._load_csv(str(path), format="compute_only")
    # The first pass has told the stage its shapes; finding them again would run its module once more.
    for flag, known in FLAGS.items():
        setattr(runtime, flag, getattr(own, known))
    return runtime


def _unfit(own: Any, shape: tuple[int, int], splits: bool) -> str:
    """Return why a schedule of the script cannot take an order of `shape` (stages, microbatches); '' where it can."""
    if type(own) not in (ScheduleGPipe, Schedule1F1B):
        return f"the schedule is a {type(own).__name__}, neither ScheduleGPipe nor Schedule1F1B"
    stage = own._stage
    found = (int(stage.num_stages), int(own._n_microbatches))
    if found != shape or stage.group_size != shape[0]:
        return f"the schedule has (stages, microbatches) {found}, the plan is for {shape}"
    if own._loss_fn is None:
        return "the schedule has no loss: it does not train"
    if not splits:
        return ""
    module = stage.submod
    if stage.dw_builder is not None:
        return f"stage {stage.stage_index} makes its weight gradients by a function of its own"
    if isinstance(module, DistributedDataParallel) or hasattr(module, "set_requires_gradient_sync"):
        return f"stage {stage.stage_index} is data parallel: a backward in two parts is not tried on it"
    if any("forward" in vars(part) for part in module.modules()):
        return f"stage {stage.stage_index} has a forward that was set on the module itself, which a copy would share"
    hooked = any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in module.parameters())
    if hooked or any(part._backward_hooks or part._backward_pre_hooks for part in module.modules()):
        return f"stage {stage.stage_index} has hooks on its backward, which a backward in two parts calls otherwise"
    return ""


Grads = Sequence[torch.Tensor | None]

LONGEST_S = 120.0
"""A child that has worked for so long without an answer hangs."""

ALIKE = b"alike"
"""What a child says where both ways agree."""


def differs(own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return why the stage of a schedule cannot split its backward, '' where both ways agree bit for bit.

    `args` and `kwargs` are those of the schedule's step.
    """
    stage = own._stage
    if stage.is_first:  # torch makes no gradient of its input: the second part is a whole backward
        return ""
    where = f"stage {stage.stage_index}"
    if torch.device(stage.device).type != "cpu":
        return f"{where} is on {stage.device}: whether its backward can run in two parts is tried on CPUs only"
    answer, _ = said(lambda: _verdict(own, args, kwargs), LONGEST_S, apart="lose writes")
    if answer == ALIKE:
        return ""
    return f"{where}, tried in a child: {answer.decode(errors='replace') or 'its backward in two parts gave no answer'}"


OF_STEP = ("target", "losses", "return_outputs", "loss_kwargs")
"""Arguments of a schedule's step that are not the module's."""


def _verdict(own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return `ALIKE`, or what is wrong; the child's."""
    torch.set_num_threads(1)  # the threads of the parent's kernels are not here
    try:
        _, named = own._split_inputs(args, {key: value for key, value in kwargs.items() if key not in OF_STEP})
        torch.manual_seed(0)
        inputs = [_random(meta) for meta in own._stage._stage_meta.inputs]
        (whole, calls), (split, again) = (_gradients(own, inputs, named[0], kwargs, way) for way in (_whole, _in_parts))
    except Exception as cause:
        return f"{type(cause.__cause__ or cause).__name__}: {cause.__cause__ or cause}".splitlines()[0].encode()
    if len(whole) != len(split) or not all(map(_equal, whole, split)):
        return b"it has other gradients when its backward runs in two parts"
    if calls != again:  # activation checkpoints run their forward again in each part
        return b"its modules run more often when its backward runs in two parts"
    return ALIKE


def _random(meta: Any) -> torch.Tensor:
    """Return a tensor of the recorded shape, random where it can be."""
    value = torch.empty(meta.shape, dtype=meta.dtype)
    if not (value.is_floating_point() or value.is_complex()):
        return value.zero_()
    return value.normal_().requires_grad_(meta.requires_grad)


def _gradients(
    own: Any, inputs: Sequence[torch.Tensor], named: dict[str, Any], of_step: dict[str, Any], way: Callable[..., Grads]
) -> tuple[Grads, int]:
    """Return the gradients of the inputs and of the parameters of a copy of the stage, and the calls of its modules."""
    torch.manual_seed(1)
    module, calls = copy.deepcopy(own._stage.submod), [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    for part in module.modules():
        part.register_forward_pre_hook(count)
    module.zero_grad(set_to_none=True)
    leaves = [value.detach().clone().requires_grad_(value.requires_grad) for value in inputs]
    found = module(*leaves, **named)
    torch.manual_seed(2)
    if own._stage.is_last:
        target = torch.tensor_split(of_step["target"], own._n_microbatches)[0]
        outputs: Any = (own._loss_fn(found, target, **(of_step.get("loss_kwargs") or {})),)
        grads = None
    else:
        outputs = tuple(found) if isinstance(found, (tuple, list)) else (found,)
        grads = tuple(torch.randn_like(value) if value.requires_grad else None for value in outputs)
    of_inputs = way(module, outputs, grads, leaves)
    return [*of_inputs, *(value.grad for value in module.parameters())], calls[0]


def _whole(module: Any, outputs: Any, grads: Any, inputs: list[torch.Tensor]) -> Grads:
    """Run a whole backward; return the gradients of the inputs."""
    return parts.stage_backward(outputs[0] if grads is None else outputs, grads, inputs)


def _in_parts(module: Any, outputs: Any, grads: Any, inputs: list[torch.Tensor]) -> Grads:
    """Run the two parts, as torch's stage does; return the gradients of the inputs."""
    found, groups = parts.stage_backward_input(outputs, grads, inputs, module.parameters())
    parts.stage_backward_weight(module.parameters(), groups)
    return found


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Say whether two gradients are the same bit for bit, or both not there."""
    if one is None or other is None:
        return one is other
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
