"""LANS: AdamW with normalised gradients and a trust ratio per tensor, made for large batches.

Per block (a parameter tensor) with gradient G, weights x, decay w, step t:

    g = G / |G|;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    r = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps);  c = g / (sqrt(v / (1 - b2^t)) + eps)
    x <- x - lr |x| (b1 (r + w x) / |r + w x| + (1 - b1) (c + w x) / |c + w x|)

|.| is the 2-norm; a factor |x| / |.| with a zero in it is 1, a gradient of zeros stays one. What a codec does to the
scale of a gradient, as one bit per number does, is normalised away.

Source: Zheng et al., "Accelerated large batch optimization of BERT pretraining in 54 minutes", 2020.

>>> weight = torch.nn.Parameter(torch.ones(4))
>>> weight.grad = torch.full((4,), 1e-3)
>>> _ = Lans([weight], lr=0.1, weight_decay=0.0).step()
>>> [round(value, 4) for value in weight.tolist()]  # as long a step for a small gradient: lr * |x|
[0.9, 0.9, 0.9, 0.9]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from headway.core.errors import InputError


class Lans(torch.optim.Optimizer):
    """The optimizer; a block is a parameter tensor. Give biases and norms a group with weight_decay=0."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        """Raises `InputError` for numbers outside their range."""
        if lr < 0 or eps <= 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise InputError(
                f"lr {lr}, betas {betas}, eps {eps}, weight_decay {weight_decay}: lr and decay must be >= 0, betas in "
                "[0, 1), eps > 0."
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, x: torch.Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), state = group["betas"], self.state[x]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(x), exp_avg_sq=torch.zeros_like(x))
        state["step"] += 1
        norm = x.grad.norm()  # type: ignore[union-attr]  # only parameters with a gradient come here
        g = torch.where(norm > 0, x.grad / norm, torch.zeros_like(x))
        m, v = state["exp_avg"], state["exp_avg_sq"]
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        scale = (v / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        size = x.norm()
        momentum = self._scaled(m / (1 - beta1 ** state["step"]) / scale, x, size, group["weight_decay"])
        current = self._scaled(g / scale, x, size, group["weight_decay"])
        x.sub_(group["lr"] * (beta1 * momentum + (1 - beta1) * current))

    @staticmethod
    def _scaled(direction: torch.Tensor, x: torch.Tensor, size: torch.Tensor, decay: float) -> torch.Tensor:
        """Return direction and decay together, as long as the weights are."""
        direction = direction.add(x, alpha=decay)
        length = direction.norm()
        return direction * torch.where((size > 0) & (length > 0), size / length, torch.ones_like(size))
