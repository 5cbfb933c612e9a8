"""Applies remedies of compute inside a rank.

`compute.fused_optimizer`: torch asks one function which form an update gets where the script does not say (fused,
foreach, or a loop over the tensors); on a CPU it answers with the loop. Another answer is all that changes: what the
script's optimizer holds, and what it saves, stays as it is.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence

import torch

from headway.core.remedies import NoParameters
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy
from headway.runtime.recorder.probes import NEVER

NAME = "compute.fused_optimizer"

CHOICE = "_default_to_fused_or_foreach"
"""torch's function that chooses the form, as each module of an optimizer has imported it."""

MODULES = ("torch.optim.adam", "torch.optim.adamw", "torch.optim.sgd", "torch.optim.adagrad")
"""Modules of optimizers with a fused form on a CPU."""

LOOKED_AT = 4
"""Updates after which it is known whether the script has such an optimizer."""

Choice = Callable[..., tuple[bool, bool]]


def fuse_optimizer(parameters: NoParameters, context: Context) -> Applied | RefusedRemedy:
    """Install 'compute.fused_optimizer'."""
    del parameters
    form = _FusedForm(context)
    targets = [f"{name}:{CHOICE}" for name in MODULES if hasattr(importlib.import_module(name), CHOICE)]
    if not targets:
        return RefusedRemedy(NAME, f"torch {torch.__version__} chooses the form of an update in another place")
    for target in targets:
        context.patch(target, form.around)
    context.listen(form.looked_at)
    return Applied(NAME, form.facts)


class _FusedForm:
    """Answers for torch which form an update gets."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.facts: dict[str, int] = {"updates": 0}
        """How many updates, of a group of parameters each, were fused."""

    def around(self, original: Choice) -> Choice:
        """Wrap torch's choice."""

        @functools.wraps(original)
        def choose(params: Sequence[torch.Tensor], differentiable: bool, use_fused: bool = False) -> tuple[bool, bool]:
            """Return (fused, foreach)."""
            if torch.compiler.is_compiling() or differentiable or not all(map(_is_plain, params)):
                return original(params, differentiable, use_fused)
            self.facts["updates"] += 1
            return True, False

        return choose

    def looked_at(self, _: int) -> int:
        """Say after some steps that there is nothing to fuse, where that is so."""
        if self.context.probes.steps[0] < LOOKED_AT:
            return LOOKED_AT
        if not self.facts["updates"]:
            reason = "no optimizer of the script leaves its form to torch, and updates dense real tensors of a CPU"
            self.context.note(RefusedRemedy(NAME, reason))
        else:
            self.context.note(Applied(NAME, self.facts))
        return NEVER


def _is_plain(tensor: torch.Tensor) -> bool:
    """Say whether the fused form on a CPU can update a tensor."""
    grad = tensor.grad
    return (
        tensor.device.type == "cpu"
        and tensor.is_floating_point()
        and type(tensor.data) is torch.Tensor
        and not (grad is not None and grad.is_sparse)
    )
