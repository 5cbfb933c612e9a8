"""'model.precision': named operators of a rank compute in bf16 or int8. Needs `--allow lossy`.

At the first forward of a model in training its operators are looked up by
name, without DDP's own prefix, and their products replaced
(`torch_operators`): parameters, keys and values of the state dict, norms,
softmax and losses stay. Ranks agree first: where one of them cannot do what
the plan says, none does, because ranks that differ from what was planned wait
for each other in another way.

    rank 0   {"fc1": "float32"}                 computes as before
    rank 1   {"fc1": "int8", "fc2": "bf16"}     the slow device
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from headway.core.tables import suggestion
from headway.model.precision.torch_operators import cannot_lower, lower
from headway.model.remedies import PrecisionParameters
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy

NAME = "model.precision"

PREFIXES = ("module.", "_orig_mod.")
"""What wrappers (DDP, torch.compile) put in front of a model's names."""


def precision(parameters: PrecisionParameters, context: Context) -> Applied | RefusedRemedy:
    """Install the remedy: it takes effect at the first forward in training."""
    script = _LoweredOperators(parameters.operators, context)
    script.removed = register_module_forward_pre_hook(context.hook(script.before_forward)).remove
    context.undos += [script.take_back, script.removed]
    return Applied(NAME, script.facts)


class _LoweredOperators:
    """The remedy in one process."""

    def __init__(self, plan: Mapping[str, Mapping[str, str]], context: Context) -> None:
        self.plan, self.context = plan, context
        self.facts: dict[str, Any] = {"operators": {}, "model": None}
        self.removed: Any = None
        self._undos: list[Any] = []
        self._decided = False

    def before_forward(self, module: nn.Module, _: Any) -> None:
        """Lower the operators of the first module that is called to train: the outermost one is called first."""
        if self._decided or not module.training or not torch.is_grad_enabled():
            return
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return
        self._decided = True
        self.removed()
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        rank = dist.get_rank() if ranks > 1 else 0
        operators = self.plan.get(str(rank), {})
        reason = _objection(module, operators) or self._unknown_rank(ranks)
        if ranks > 1:
            reasons: list[str] = [""] * ranks
            dist.all_gather_object(reasons, reason)
            reason = next((f"rank {other_rank}: {why}" for other_rank, why in enumerate(reasons) if why), "")
        if reason:
            self.context.fail(NAME, reason)
            return
        names = _names(module)
        for name, bits in operators.items():
            if bits != "float32":
                self._undos.append(lower(names[name], bits))
        self.facts |= {"operators": dict(Counter(operators.values())), "model": type(module).__name__, "rank": rank}
        self.context.note(Applied(NAME, self.facts))

    def _unknown_rank(self, ranks: int) -> str:
        """Say whether the plan is for more ranks than there are."""
        beyond = [rank for rank in self.plan if int(rank) >= ranks]
        return f"the plan names rank {beyond[0]}, and the job has {ranks}. Make a plan of this job" if beyond else ""

    def take_back(self) -> None:
        """Give every operator its own products again."""
        while self._undos:
            self._undos.pop()()


def _names(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by name, without the prefixes of wrappers."""
    names = {}
    for name, child in module.named_modules():
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        names[name] = child
    return names


def _objection(module: nn.Module, operators: Mapping[str, str]) -> str:
    """Return why the operators cannot be lowered; '' where all can."""
    names = _names(module)
    for name, bits in operators.items():
        if name not in names:
            near = suggestion([key for key in names if key], name)[:300]
            return f"{type(module).__name__} has no operator {name!r}: the plan is for another model. {near}"
        why = cannot_lower(names[name], bits)
        if why:
            return f"{name} in {bits}: {why}"
    return ""
