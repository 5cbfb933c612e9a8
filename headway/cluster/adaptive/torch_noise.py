"""'cluster.noise': squared norms of the gradients of a DDP or plain loop, for `headway cluster batch RUN`.

A hook on each parameter sees the gradient of one backward before DDP reduces
it; a hook before each optimizer step sees the mean over ranks. Nothing is sent:
each rank writes its own norms, and the command puts them together by step.

    backward of rank r   ||g_r||^2   ---.
    all-reduce                           >  sample [step, local, total, count]
    optimizer.step       ||mean g||^2 --'

With Adam's kind the gradients are divided by the root of the second moment
first, after WARM steps: what counts is the step, not the gradient. It changes
no result and asks for no grant. Known limits: the first optimizer with
gradients is the one that is measured; with accumulated micro-batches the loss
is taken to be divided by their number; a scaled loss (GradScaler) is refused.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from headway.cluster.remedies import NoiseParameters
from headway.core.errors import InputError
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy, on_scaled_loss

NAME = "cluster.noise"

WARM = 5
"""Steps before Adam's second moment is used."""

MOST = 4096
"""Samples that are kept; then every second one is dropped and half as many are taken."""

EVERY_NOTES = 64
"""Samples after which they are written."""


def noise(parameters: NoiseParameters, context: Context) -> Applied | RefusedRemedy:
    """Install the measurement."""
    watch = NoiseSampler(context, parameters.every_steps)
    watch.install()
    return Applied(NAME, watch.facts)


class NoiseSampler:
    """Takes samples of one optimizer's gradients."""

    def __init__(self, context: Context, every_steps: int) -> None:
        self.context, self.every = context, every_steps
        self.facts: dict[str, Any] = {"samples": [], "preconditioned": False, "world_size": 1}
        self._optimizer: torch.optim.Optimizer | None = None
        self._step = 0
        self._local: list[torch.Tensor] = []
        self._fires: dict[int, int] = {}
        self._pending: list[tuple[int, int, bool, torch.Tensor]] = []
        self._before: list[torch.Tensor] | None = None
        self._handles: list[Any] = []
        self._backward_hook = context.hook(self._at_backward)

    def install(self) -> None:
        """Put the hooks in; they go with the remedy."""
        self._handles.append(register_optimizer_step_pre_hook(self.context.hook(self._at_step)))
        on_scaled_loss(self.context, self._refuse_scaling)
        self.context.undos.append(self.remove)

    def remove(self) -> None:
        """Take the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _refuse_scaling(self) -> None:
        self.context.fail(NAME, "the loss is scaled (GradScaler): the norms of its gradients are not measured")

    def _at_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Take a sample, if this is the optimizer that is measured and the step is due. Changes nothing."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not parameters or (self._optimizer is not None and optimizer is not self._optimizer):
            return
        if self._optimizer is None:
            self._optimizer = optimizer
            for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
                self._handles.append(parameter.register_hook(functools.partial(self._backward_hook, parameter)))
            return
        count, local = max(self._fires.values(), default=0), self._local
        self._fires, self._local = {}, []
        self._step += 1
        if count and self._step % self.every == 0:
            mean = [self._scaled(p, p.grad.detach()) for p in parameters]
            total = _square(mean)
            world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
            self.facts["world_size"] = world
            # `local` holds gradients of loss / count: times count^2 / count, their mean square is what one gives.
            own = torch.stack(local).sum() * count
            biased = world * count == 1
            if biased:
                if self._before is not None and len(self._before) == len(mean):
                    both = _square([(new + old) / 2 for new, old in zip(mean, self._before, strict=True)])
                    self._take(2, (total + _square(self._before)) / 2, both, biased=True)
                self._before = [each.clone() for each in mean]
            else:
                self._take(count, own, total, biased=False)

    def _take(self, count: int, local: torch.Tensor, total: torch.Tensor, *, biased: bool) -> None:
        """Keep a sample; values are read from the device in blocks only."""
        self._pending.append((self._step, count, biased, torch.stack([local, total])))
        if len(self._pending) >= EVERY_NOTES or (self._step <= EVERY_NOTES and self._step % 8 == 0):
            values = torch.stack([each[3] for each in self._pending]).double().tolist()
            rows = [
                [step, *(value if math.isfinite(value) else None for value in pair), count, int(biased)]
                for (step, count, biased, _), pair in zip(self._pending, values, strict=True)
            ]
            self.facts["samples"] += rows
            self._pending.clear()
            if len(self.facts["samples"]) > MOST:
                self.every *= 2
                self.facts["samples"] = [row for row in self.facts["samples"] if row[0] % self.every == 0]
            self.context.note(Applied(NAME, self.facts))

    def _at_backward(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add a parameter's gradient of one backward, before it is reduced. Raises `InputError` for a sparse one."""
        if gradient.layout != torch.strided:
            raise InputError("a gradient is sparse, and the norms of such ones are not measured.")
        if (self._step + 1) % self.every == 0:
            self._local.append(_square([self._scaled(parameter, gradient.detach())]))
        self._fires[id(parameter)] = self._fires.get(id(parameter), 0) + 1

    def _scaled(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Divide by the root of Adam's second moment, where there is one."""
        state = self._optimizer.state.get(parameter, {}) if self._optimizer is not None else {}
        if self._step < WARM or "exp_avg_sq" not in state:
            return gradient
        self.facts["preconditioned"] = True
        group = self._optimizer.param_groups[0] if self._optimizer is not None else {}
        steps, beta = float(state.get("step", self._step)), group.get("betas", (0.9, 0.999))[1]
        root: torch.Tensor = (state["exp_avg_sq"] / (1 - beta**steps)).sqrt() + group.get("eps", 1e-8)
        return gradient / root


def _square(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Squared norm of several tensors together."""
    found: torch.Tensor = torch.stack([torch.linalg.vector_norm(each) for each in tensors]).square().sum()
    return found
