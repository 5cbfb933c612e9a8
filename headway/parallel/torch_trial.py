"""Whether a backward in two parts gives a stage the gradients of a whole one, tried in a forked child.

One microbatch of random numbers in the shapes that the stage gets, twice, on
copies of the stage: as a whole, and in the two parts. The child can change
nothing outside itself (`headway.core.machine.apart`), so that a stage which counts its
calls, prints or writes files does in the training process what it always did.
Tried on CPUs: a process that uses a device cannot be forked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import _backward as parts

from headway.core.machine.child import said

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
