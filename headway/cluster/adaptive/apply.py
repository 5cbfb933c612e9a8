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

'cluster.noise': squared norms of the gradients of a DDP or plain loop, for `headway cluster batch RUN`.

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
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler

from headway.cluster.remedies import BatchParameters, NoiseParameters
from headway.core.errors import InputError
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy, on_scaled_loss

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


NOISE = "cluster.noise"

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
    return Applied(NOISE, watch.facts)


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
        self.context.fail(NOISE, "the loss is scaled (GradScaler): the norms of its gradients are not measured")

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
            self.context.note(Applied(NOISE, self.facts))

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
