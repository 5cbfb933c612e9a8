"""Applies remedies of compute inside a rank.

`compute.fused_optimizer`: the update of torch's optimizers is one function each, which is told the form: fused,
foreach, or neither, and then loops over the tensors on a CPU. Only this word changes: what the script's optimizer
holds, and what it saves, stays as it is.

Torch's fused updates on a CPU go through the memory of each tensor as it lies, so a gradient or a state that lies in
another order than its parameter (channels last beside channels first) would be added to the wrong numbers: such
updates are left to the loop.

`compute.tf32` and `compute.cudnn_benchmark` are flags of torch's, set before the script computes and put back as they
were; a script that sets them itself later has the last word. Reading or setting them starts no driver.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from headway.core.remedies import NoParameters
from headway.runtime.host.device import kinds_in_use
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy
from headway.runtime.recorder.probes import NEVER
from headway.runtime.script.compute_facts import can_be_fused

NAME = "compute.fused_optimizer"

UPDATES = ("torch.optim.adam:adam", "torch.optim.adamw:adamw", "torch.optim.sgd:sgd", "torch.optim.adagrad:adagrad")
"""Functions of updates with a fused form on a CPU; their first arguments are lists: parameters, gradients, states."""

LOOKED_AT = 4
"""Steps after which it is known whether the script has such an optimizer."""

Update = Callable[..., None]
Tensors = Sequence[torch.Tensor | None]


def fuse_optimizer(parameters: NoParameters, context: Context) -> Applied:
    """Install 'compute.fused_optimizer'."""
    del parameters
    form = _FusedForm(context)
    for target in UPDATES:
        context.patch(target, form.around)
    on_optimizer_steps(context, form.stepped)
    return Applied(NAME, form.facts)


class _FusedForm:
    """Says for the script which form its updates have."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.facts: dict[str, int] = {"updates": 0}
        """How many updates, of a group of parameters each, were fused."""
        self.num_steps = 0

    def around(self, original: Update) -> Update:
        """Wrap an update of torch's."""

        @functools.wraps(original)
        def update(*lists: Tensors, **options: object) -> None:
            """Update the parameters, fused where that can be."""
            is_chosen = options.get("fused") is not None or options.get("foreach") is not None
            if is_chosen or options.get("differentiable") or torch.compiler.is_compiling() or not _all_fused(lists):
                original(*lists, **options)
                return
            self.facts["updates"] += 1
            original(*lists, **{**options, "fused": True, "foreach": False})

        return update

    def stepped(self, _: int) -> int:
        """Say after some steps that there is nothing to fuse, where that is so."""
        self.num_steps += 1
        if self.num_steps < LOOKED_AT and not self.facts["updates"]:
            return 1
        if not self.facts["updates"]:
            reason = "no optimizer of the script leaves its form to torch and updates dense, real tensors of a CPU "
            self.context.note(RefusedRemedy(NAME, f"{reason}that lie in memory as their gradients and states do"))
        else:
            self.context.note(Applied(NAME, self.facts))
        return NEVER


def _all_fused(lists: Sequence[Tensors]) -> bool:
    """Say whether all parameters, the first list, can be fused on the CPU; a list of what is not used is empty."""
    for parameter, *others in zip(*filter(None, lists), strict=True):
        if parameter is None or parameter.device.type != "cpu" or not can_be_fused(parameter, others):
            return False
    return bool(lists) and len(lists[0]) > 0


def tf32(parameters: NoParameters, context: Context) -> Applied | RefusedRemedy:
    """Install 'compute.tf32': products of float32 numbers by the matrix units of a CUDA device. Lossy."""
    del parameters
    return _set_flag("compute.tf32", torch.backends.cuda.matmul, "allow_tf32", context)


def cudnn_benchmark(parameters: NoParameters, context: Context) -> Applied | RefusedRemedy:
    """Install 'compute.cudnn_benchmark': cuDNN times its kernels for each shape, and takes the fastest."""
    del parameters
    return _set_flag("compute.cudnn_benchmark", torch.backends.cudnn, "benchmark", context)


def _set_flag(name: str, owner: object, flag: str, context: Context) -> Applied | RefusedRemedy:
    """Set a flag of a CUDA device's libraries; refused where it is set, and later where no device computed."""
    try:
        before = getattr(owner, flag)
    except RuntimeError as cause:  # where the newer of torch's two interfaces has set it, the older one refuses
        return RefusedRemedy(name, f"the script sets its precisions itself ({str(cause).splitlines()[0]})")
    if before:
        return RefusedRemedy(name, "it is on already")
    setattr(owner, flag, True)
    context.undos.append(lambda: setattr(owner, flag, before))
    facts = {"before": before}

    def stepped(_: int) -> int:
        """Say behind the first step whether there is a device that the flag is for."""
        if "cuda" not in kinds_in_use():
            context.fail(name, "the script computes on no CUDA device")
        return NEVER

    on_optimizer_steps(context, stepped)
    return Applied(name, facts)


def on_optimizer_steps(context: Context, function: Callable[[int], int]) -> None:
    """Call `function(id)` behind a step of the optimizer with that `id`; it returns the steps until its next call.

    What else counts as a step is left out: before the first backward transforms that are modules do, for example.
    """
    latest = [0]

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        latest[0] = id(optimizer)

    def listener(_: int) -> int:
        """Act out of torch's loop over hooks, which bears no change of them."""
        optimizer, latest[0] = latest[0], 0
        return function(optimizer) if optimizer else 1

    context.undos.append(register_optimizer_step_post_hook(context.hook(note)).remove)
    context.listen(listener)
