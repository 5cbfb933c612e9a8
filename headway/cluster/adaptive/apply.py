"""'cluster.batch': another batch size, with the learning rate that goes with it. Needs `--allow lossy`.

The loaders that bring the script's own batch of each rank bring `batch_size`
examples instead; after `accumulation` updates that are left out, one takes
place with the mean of their gradients; and during that update the learning
rate is multiplied by

    SGD           gain(S)          AdaScale              gain(S) = S (phi + B0) / (phi + B)
    Adam's kind   sqrt(gain(S))    square root rule      S = B / B0, phi = noise scale at B0

with B over all ranks. At S = 1 nothing is touched. The script's own
learning rate is put back after each update. A script that makes a scheduler
is refused: it counts steps, and steps are worth more now.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler

from headway.cluster.remedies import BatchParameters
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy

NAME = "cluster.batch"

LOADER_ITER = "torch.utils.data.dataloader:DataLoader.__iter__"


def batch(parameters: BatchParameters, context: Context) -> Applied | RefusedRemedy:
    """Install the remedy."""
    change = _Change(context, parameters)
    if parameters.predicted_useful is not None:
        change.facts["predicted_useful"] = parameters.predicted_useful
    change.install()
    return Applied(NAME, change.facts)


class _Change:
    """The remedy in one rank."""

    def __init__(self, context: Context, parameters: BatchParameters) -> None:
        self.context, self.size, self.own = context, parameters.batch_size, parameters.own_batch_size
        self.accumulation, self.initial, self.phi = (
            parameters.accumulation, parameters.initial_batch, parameters.noise_scale
        )  # fmt: skip
        self.facts: dict[str, Any] = {
            "batch_size": self.size,
            "accumulation": self.accumulation,
            "num_loaders": 0,
            "updates": 0,
            "initial_batch": self.initial,
        }
        self._changed: list[tuple[Any, int]] = []
        self._rates: list[Any] = []
        self._over = False

    def install(self) -> None:
        """Patch loaders, optimizers and schedulers."""
        context = self.context
        context.patch("torch.optim.lr_scheduler:LRScheduler.__init__", self._scheduler)
        if self.size != self.own:
            context.patch(LOADER_ITER, self._iterate)
        if self.accumulation:
            context.patch("torch.optim.optimizer:Optimizer.__init__", self._accumulate)
        handles = [
            register_optimizer_step_pre_hook(context.hook(self._before)),
            register_optimizer_step_post_hook(context.hook(self._after)),
        ]
        context.undos += [handle.remove for handle in handles]
        context.undos.append(self._put_back)

    def factor(self, optimizer: Any) -> float:
        """What the learning rate is multiplied by; 1 exactly where the batch is the recorded one."""
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        size = self.size if self.facts["num_loaders"] else self.own
        total = world * size * (self.accumulation + 1)
        if total == self.initial:
            return 1.0
        scale = total / self.initial
        gain = scale * (self.phi + self.initial) / (self.phi + total)
        self.facts |= {"scale": scale, "gain": gain}
        adam = any("betas" in group for group in optimizer.param_groups)
        return math.sqrt(gain) if adam else gain

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Set the learning rate of this update; where no loader brings the batch by then, give the remedy up."""
        self._rates = []
        if self.size != self.own and not self.facts["num_loaders"]:
            reason = f"no loader of torch's brings batches of {self.own} of at least {self.size} examples"
            self.context.fail(NAME, f"{reason}: neither batch nor learning rate was changed")
        if self._over:
            return
        factor = self.factor(optimizer)
        if factor != 1.0:
            self._rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Put the script's learning rate back."""
        for group, rate in zip(optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._rates = []
        self.facts["updates"] += 1
        if self.facts["updates"] in (1, 8, 64, 512):
            self.context.note(Applied(NAME, self.facts))

    def _iterate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __iter__(loader: Any) -> Any:  # noqa: N807  # the name it has in torch
            """Iterate over batches of the new size, where the loader brings the script's own for training."""
            sampler = loader.batch_sampler
            fits = type(sampler) is BatchSampler and sampler.batch_size == self.own and torch.is_grad_enabled()
            if fits and len(sampler.sampler) >= self.size:
                self._changed.append((sampler, sampler.batch_size))
                sampler.batch_size = self.size
                self.facts["num_loaders"] += 1
                self.context.note(Applied(NAME, self.facts))
            return original(loader)

        return __iter__

    def _accumulate(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # the name it has in torch
            """Construct, and let only each last of several updates take place."""
            original(optimizer, *args, **kwargs)
            calls, step, zero_grad = [0], optimizer.step, optimizer.zero_grad

            def late_step(closure: Any = None) -> Any:
                if self._over or closure is not None:
                    return step() if closure is None else step(closure)
                calls[0] += 1
                if calls[0] % (self.accumulation + 1):
                    return None
                for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                    if parameter.grad is not None:
                        parameter.grad.div_(self.accumulation + 1)
                return step()

            def late_zero_grad(set_to_none: bool = True) -> None:
                if self._over or calls[0] % (self.accumulation + 1) == 0:
                    zero_grad(set_to_none)

            optimizer.step, optimizer.zero_grad = late_step, late_zero_grad

        return __init__

    def _scheduler(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(scheduler: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # the name it has in torch
            """Give the remedy up: the schedule is the script's own, and counts steps."""
            self.context.fail(
                NAME, f"the script steps a {type(scheduler).__name__}, which counts steps of its own batch"
            )
            original(scheduler, *args, **kwargs)

        return __init__

    def _put_back(self) -> None:
        """Give loaders their own batch back, and let every update take place again."""
        self._over = True
        while self._changed:
            sampler, size = self._changed.pop()
            sampler.batch_size = size
