"""'comm.loose': a model in DistributedDataParallel is loosely synchronised, in an unmodified script.

Begun at a model's first forward, where the script has no communication hook. A hook gives every bucket back as it is,
so that gradients stay on their rank, and `LooseSynchronisation` works behind the optimizer's step. Travelling models
are tried on the batches that the script last gave to cross-entropy. Where an optimizer does not suit, a loss is
scaled, or the script registers a hook of its own, replicas are averaged once and DDP reduces again.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from headway.comm.remedies import LooseParameters, read_rule
from headway.comm.skew.torch_replica import LooseSynchronisation, Probe
from headway.comm.torch_buckets import BucketFn, HookedModels
from headway.core.errors import InputError
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy, on_scaled_loss

NAME = "comm.loose"

PROBE_EXAMPLES = 512
"""Examples on which a travelling model is tried."""


def loosening(parameters: LooseParameters, context: Context) -> Applied | RefusedRemedy:
    """Install the remedy: models in DistributedDataParallel are not all-reduced, but loosely synchronised."""
    models = _LooseModels(parameters, context)
    models.install()
    if parameters.control:
        context.patch("torch.nn.functional:cross_entropy", models.classifying)
    on_scaled_loss(context, lambda: models.refuse("the loss is scaled (GradScaler): ranks would skip unlike steps"))
    context.undos.append(models.end)
    return Applied(NAME, models.facts)


class _LooseDdp:
    """A model in DistributedDataParallel whose gradients stay on their rank."""

    def __init__(self, model: Any, parameters: LooseParameters, owner: _LooseModels) -> None:
        self._model, ranks = weakref.ref(model), model.process_group.size()
        self.successor: BucketFn | None = None
        """Who reduces buckets from now on."""
        self._group, self._broadcasts = model.process_group, model.broadcast_buffers
        self.examples: deque[tuple[tuple[torch.Tensor, ...], torch.Tensor]] = deque()
        """Inputs and labels of the last batches, PROBE_EXAMPLES or somewhat more."""
        self.last: tuple[tuple[Any, ...], Callable[[], Any]] = ((), lambda: None)
        """Arguments of the last forward, and its result if that is alive."""
        self.synchronising = LooseSynchronisation(
            model.module, read_rule(parameters.rule), group=model.process_group, control=parameters.control,
            travel_steps=parameters.travel_steps, update_scale=1 / ranks, refuse=owner.refuse, report=owner.report,
        )  # fmt: skip
        self.synchronising.probe = self._probe
        # torch looks at the annotations of a hook, which it wants unquoted: this one has none.
        model.register_comm_hook(None, lambda state, bucket: self._reduce(bucket))
        model.broadcast_buffers = False

    def _reduce(self, bucket: Any) -> Future[torch.Tensor]:
        if self.successor is not None:
            return self.successor(bucket)
        local: Future[torch.Tensor] = Future()
        local.set_result(bucket.buffer())
        return local

    def note(self, logits: Any, labels: Any) -> None:
        """Keep a batch that the model has just classified, shortly before models travel."""
        replica, (inputs, result) = self.synchronising.replica, self.last
        if replica is None or result() is not logits or not isinstance(labels, torch.Tensor):
            return
        is_far = self.synchronising.steps_to_travel * len(labels) > PROBE_EXAMPLES
        if is_far or labels.is_floating_point() or labels.dim() != logits.dim() - 1:
            return
        self.examples.append((tuple(tensor.detach().clone() for tensor in inputs), labels.clone()))
        while sum(len(labels) for _, labels in self.examples) - len(self.examples[0][1]) >= PROBE_EXAMPLES:
            self.examples.popleft()

    def _probe(self) -> Probe | None:
        if not self.examples:
            return None
        columns = zip(*(inputs for inputs, _ in self.examples), strict=True)
        return tuple(torch.cat(column) for column in columns), torch.cat([labels for _, labels in self.examples])

    def end(self, successor: BucketFn | None = None) -> None:
        """Make the replicas equal and reduce gradients from now on, those that are there too; on all ranks alike."""
        model, replica = self._model(), self.synchronising.replica
        if self.successor is not None:
            return
        group = self._group
        self.successor = successor or (lambda bucket: default_hooks.allreduce_hook(group, bucket))
        self.synchronising.close()
        if model is None or replica is None or not dist.is_initialized():
            return
        model.broadcast_buffers = self._broadcasts
        with torch.no_grad():
            if replica.steps:
                replica.average([*replica.parameters.values(), *replica.buffers])
            have = torch.tensor([p.grad is not None for p in replica.parameters.values()], dtype=torch.int32)
            dist.all_reduce(have := have.to(replica.device), group=group)
            gradients = []
            for parameter, ranks in zip(replica.parameters.values(), have.tolist(), strict=True):
                if ranks and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if ranks and parameter.grad is not None:
                    gradients.append(parameter.grad)
            replica.average(gradients)


class _LooseModels(HookedModels[_LooseDdp]):
    """The models of a script: each is loosely synchronised from its first forward on."""

    def __init__(self, parameters: LooseParameters, context: Context) -> None:
        super().__init__(NAME, context)
        self.parameters = parameters
        self.facts: dict[str, Any] = {**parameters.to_json(), "models": 0}

    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap DDP's forward: what the model was given and returned is known until the loss."""
        hooked = super().forward(original)

        @functools.wraps(original)
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            """Synchronise the model loosely, from its first forward on."""
            result = hooked(model, *args, **kwargs)
            replica = self.known[model]
            if replica is not None and self.parameters.control:
                plain = not kwargs and model.training and all(isinstance(value, torch.Tensor) for value in args)
                alive = plain and isinstance(result, torch.Tensor)
                replica.last = (args, weakref.ref(result)) if alive else ((), lambda: None)
            return result

        return forward

    def hand_over(self, hook: _LooseDdp, successor: BucketFn) -> None:
        """Make the replicas equal; the script's hook reduces from now on."""
        hook.end(successor)

    def classifying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap cross-entropy: its labels are those of the examples that a model has just seen."""

        @functools.wraps(original)
        def cross_entropy(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            """Note the labels, then compute."""
            for replica in self.hooks:
                replica.note(input, target)
            return original(input, target, *args, **kwargs)

        return cross_entropy

    def begin(self, model: Any) -> None:
        """Synchronise the model loosely from now on, or note why not."""
        reason = ""
        if getattr(model, "_comm_hooks", None):
            reason = "the script has a communication hook of its own"
        elif model.process_group.size() < 2:
            reason = "one rank has nobody to synchronise with"
        try:
            if not reason:
                with self.registering(), warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    self.known[model] = _LooseDdp(model, self.parameters, self)
                self.facts |= {"warning": str(caught[0].message)} if caught else {}
        except InputError as cause:
            reason = str(cause)
        if reason:
            self.context.note(RefusedRemedy(NAME, reason))
            return
        self.facts["models"] += 1
        self.facts["state"] = "in memory only: a restart begins with the saved weights of one rank"
        self.report()

    def report(self) -> None:
        """Write what is known: rule, bytes, and the accuracy lost at each travel."""
        models = [replica.synchronising.facts for replica in self.hooks]
        if models:
            self.context.note(Applied(NAME, self.facts | max(models, key=lambda facts: int(str(facts["model_bytes"])))))

    def refuse(self, reason: str) -> None:
        """Give up on all ranks alike, and say why."""
        if self.hooks:
            self.end()
            self.context.fail(NAME, reason)

    def end(self) -> None:
        """Reduce gradients from now on."""
        for replica in self.hooks:
            replica.end()
        for model in list(self.known):
            self.known[model] = None
