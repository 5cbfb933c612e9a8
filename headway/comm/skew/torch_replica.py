"""Ranks that train apart and exchange less: `loose`; and normalisation that suits them: `swap_norm`.

    model = loose(swap_norm(model), "fedavg:20")     # in place of DistributedDataParallel
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ...
    optimizer.step()                                 # synchronises, as the rule says

Hooks of the optimizer that holds the parameters do it: the script calls nothing. With `control` models travel every
`travel_steps` steps, and `SkewController` chooses the rule's setting from what they lose:

    rank 0  --its model-->  rank 1  --its model-->  rank 2 ...    accuracy on own examples - on those of the next rank

The state is this rank's own: its weights, what it has not sent, the controller's memory. Save `model.state_dict()` of
every rank, at any step.

>>> model = swap_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))
>>> model[1].num_groups, model[1].num_channels
(2, 8)
"""

from __future__ import annotations

import json
import warnings
import weakref
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from headway.comm.remedies import AVERAGING, LADDERS, LooseRule, read_rule, rung_of
from headway.comm.skew.advise import SkewController
from headway.comm.skew.torch_rules import LOOSE, Replica, check_optimizer
from headway.core.errors import Closing, InputError

TRAVEL_STEPS = 500
"""Steps between two travels (SkewScout, section 7.2)."""

RUNNING = ("running_mean", "running_var")
"""Buffers of normalisation that follow the batches."""

Probe = tuple[Any, torch.Tensor]
"""Inputs (one tensor, or a tuple of arguments), and the class of each example [examples] int64."""


def loose(
    model: nn.Module, rule: str, *, group: dist.ProcessGroup | None = None, buffers: str | None = "average",
    control: bool = False, probe: Probe | None = None, travel_steps: int = TRAVEL_STEPS, update_scale: float = 1.0,
) -> LooseModule:  # fmt: skip
    """Return a module that computes as `model`, and synchronises behind each step of the optimizer of its parameters.

    Every rank calls it; all begin with the weights of the first.

    rule
        'gaia:0.1', 'fedavg:20', 'dgc:0.001' or 'diloco:50': see `headway.comm.remedies`.
    buffers
        'average': running statistics are averaged with the weights (gaia, dgc: every 100 steps); 'local': left alone.
    control
        Let `SkewController` choose the setting on the rule's ladder, with `probe`, every `travel_steps`.
    update_scale
        Factor on updates (gaia). Gaia adds up those of all ranks; 1 / ranks makes that the mean that DDP would give.

    One rank has nobody to synchronise with: nothing is done, with a warning. BatchNorm is a warning that names the
    layers. Raises `InputError` for an invalid rule, one that is no rung of its ladder under `control`, running
    statistics that are neither averaged nor left alone, a probe without examples, and where ranks differ.
    """
    if control and probe is None:
        raise InputError("control needs examples of this rank's own. Pass probe=(inputs, labels), or control=False.")
    synchronising = LooseSynchronisation(
        model, read_rule(rule), group=group, buffers=buffers, control=control, probe=probe, travel_steps=travel_steps,
        update_scale=update_scale,
    )  # fmt: skip
    return LooseModule(model, synchronising)


class LooseModule(nn.Module):
    """What `loose` returns: `module` is the model; the state of the rule is part of `state_dict`."""

    def __init__(self, module: nn.Module, synchronising: LooseSynchronisation) -> None:
        """Hold the model and what synchronises it."""
        super().__init__()
        self.module = module
        self.synchronising = synchronising
        """Counts, travels and `close`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute as the model does."""
        return self.module(*args, **kwargs)

    def get_extra_state(self) -> dict[str, object]:
        """Return what the rule keeps on this rank."""
        return self.synchronising.state_dict()

    def set_extra_state(self, state: dict[str, object]) -> None:
        """Take it. Raises `InputError` where it is of another rule or model."""
        self.synchronising.load_state_dict(state)


class LooseSynchronisation(Closing):
    """Synchronises a model behind the steps of its optimizer, until it is closed on every rank alike."""

    def __init__(
        self, model: nn.Module, rule: LooseRule, *, group: dist.ProcessGroup | None = None,
        buffers: str | None = "average", control: bool = False, probe: Probe | None = None,
        travel_steps: int = TRAVEL_STEPS, update_scale: float = 1.0,
        refuse: Callable[[str], None] | None = None, report: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Check, make the replicas equal, and hook optimizers.

        `refuse` gets why an optimizer does not suit, instead of an error; `report` is called when facts are news.
        """
        self.module, self._refuse, self._report = model, refuse, report
        self._optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self.travel_steps, self.travels = travel_steps, list[dict[str, float]]()
        self.controller = SkewController(LADDERS[rule.method]) if control else None
        self.probe: Callable[[], Probe | None] = lambda: probe
        self._interval_start, self._last_travel = 0, 0
        self._hooks: list[Any] = []
        self.replica: Replica | None = None
        if self.controller is not None:
            rung_of(self.controller.ladder, rule.theta)
        statistics = self._statistics()
        if buffers not in ("average", "local") and (statistics or buffers is not None):
            raise InputError(
                f"buffers is {buffers!r}: running statistics such as {next(iter(statistics), 'running_mean')} are "
                "neither averaged nor left alone. Pass buffers='average' or buffers='local'."
            )
        if travel_steps < 1:
            raise InputError(f"travel_steps is {travel_steps}; models travel every 1 or more steps.")
        self._warn_of_batch_norm()
        if not dist.is_initialized() or (group is None and dist.get_world_size() == 1) or (group and group.size() == 1):
            warnings.warn(f"{rule}: one rank has nobody to synchronise with, so nothing is done.", stacklevel=3)
            return
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise InputError("the model has no parameter that is trained. Call loose() before freezing it, or not.")
        sharded = next((name for name, p in trained.items() if not p.is_floating_point() or hasattr(p, "_spec")), None)
        if sharded is not None:
            raise InputError(f"{sharded} is sharded or not real: loose synchronisation needs whole replicas. Use DDP.")
        averaged = list(statistics.values()) if buffers == "average" else []
        self.replica = Replica(
            trained, averaged, rule, group or dist.distributed_c10d._get_default_group(), update_scale
        )
        self._agree(rule, control, buffers, probe)
        first = dist.get_global_rank(self.replica.group, 0)
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(dense := tensor.detach().contiguous(), first, group=self.replica.group)
                tensor.copy_(dense)
        before, after = weakref.WeakMethod(self._before), weakref.WeakMethod(self._after)
        self._hooks = [
            register_optimizer_step_pre_hook(
                lambda optimizer, args, kwargs: act(optimizer, args, kwargs) if (act := before()) else None
            ),
            register_optimizer_step_post_hook(lambda optimizer, *_: act(optimizer) if (act := after()) else None),
        ]
        weakref.finalize(self, _remove, self._hooks)

    @property
    def facts(self) -> dict[str, object]:
        """Return the rule as it is, steps, bytes sent by this rank, bytes of the model, and the travels."""
        replica = self.replica
        if replica is None:
            return {"rule": "", "steps": 0, "sent_bytes": 0, "model_bytes": 0, "travels": []}
        return {
            "rule": str(replica.rule), "steps": replica.steps, "sent_bytes": replica.sent_bytes,
            "model_bytes": self._model_bytes, "travels": list(self.travels),
        }  # fmt: skip

    @property
    def steps_to_travel(self) -> int:
        """Steps before the one in which models may travel; 0 = it is the next one."""
        steps = 0 if self.replica is None else self.replica.steps
        return max(0, self._last_travel + self.travel_steps - steps - 1)

    def close(self) -> None:
        """Synchronise no more; replicas stay as they are."""
        _remove(self._hooks)

    def state_dict(self) -> dict[str, Any]:
        """Return what the rule keeps on this rank: copies."""
        replica = self.replica
        if replica is None:
            return {}
        return {
            "rule": replica.rule.method, "theta": replica.rule.theta, "steps": replica.steps,
            "sent_bytes": replica.sent_bytes, "interval_start": self._interval_start, "last_travel": self._last_travel,
            "first_rates": list(replica.first_rates), "travels": [dict(row) for row in self.travels],
            "vectors": {name: vector.clone() for name, vector in replica.vectors.items()},
            "controller": None if self.controller is None else self.controller.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of this rank. Raises `InputError` where it is of another rule or another model."""
        replica = self.replica
        if replica is None or not state:
            return
        size = replica.weights().numel()
        unlike = {name: len(vector) for name, vector in state["vectors"].items() if len(vector) != size}
        if state["rule"] != replica.rule.method or unlike:
            raise InputError(
                f"the state is of {state['rule']} and {next(iter(unlike.values()), size)} numbers, the model's rule is "
                f"{replica.rule.method} and it has {size}. Load the state of the same rule and model."
            )
        replica.rule = LooseRule(replica.rule.method, state["theta"])
        replica.steps, replica.sent_bytes = state["steps"], state["sent_bytes"]
        replica.first_rates, self.travels = list(state["first_rates"]), [dict(row) for row in state["travels"]]
        replica.vectors = {name: vector.clone().to(replica.device) for name, vector in state["vectors"].items()}
        self._interval_start, self._last_travel = state["interval_start"], state["last_travel"]
        if self.controller is not None and state["controller"] is not None:
            self.controller.load_state_dict(state["controller"])

    @property
    def _model_bytes(self) -> int:
        assert self.replica is not None
        return sum(p.nbytes for p in self.replica.parameters.values())

    def _warn_of_batch_norm(self) -> None:
        layers = batch_norms(self.module)
        if layers:
            names = ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")
            warnings.warn(
                f"BatchNorm in {names}: statistics of a rank's own batches fit its own data, and even synchronous "
                "training fails where data differ. Call headway.comm.swap_norm(model) first.",
                stacklevel=4,
            )

    def _agree(self, rule: LooseRule, control: bool, buffers: str | None, probe: Probe | None) -> None:
        """Raise `InputError` on all ranks where they were given unlike models or rules, or one has no examples."""
        replica = self.replica
        assert replica is not None
        shapes = {name: list(p.shape) for name, p in replica.parameters.items()}
        text = json.dumps([str(rule), control, buffers, self.travel_steps, replica.update_scale, shapes])
        examples = 1 if probe is None else len(probe[1])
        row = torch.tensor([zlib.crc32(text.encode()), len(text), examples], device=replica.device)
        rows = row.new_empty(3 * replica.num_ranks)
        dist.all_gather(list(torch.split(rows, 3)), row, group=replica.group)
        table = rows.view(-1, 3).tolist()
        unlike = [rank for rank, row in enumerate(table) if row[:2] != table[0][:2]]
        if unlike:
            raise InputError(
                f"ranks {unlike} have another rule or model than rank 0; this one has {rule} and "
                f"{len(shapes)} parameters. Give all ranks the same."
            )
        empty = [rank for rank, row in enumerate(table) if not row[2]]
        if empty:
            raise InputError(f"the partitions of ranks {empty} have no example. Give each rank some, or fewer ranks.")

    def _holds(self, optimizer: torch.optim.Optimizer) -> bool:
        replica = self.replica
        if replica is None or self._optimizer() is optimizer:
            return replica is not None
        trained = {id(p) for p in replica.parameters.values()}
        return any(id(p) in trained for group in optimizer.param_groups for p in group["params"])

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._holds(optimizer):
            return
        assert self.replica is not None
        holder = self._optimizer()
        try:
            if holder not in (None, optimizer):
                raise InputError("two optimizers hold parameters of the model. Put them into groups of one optimizer.")
            closure = kwargs.get("closure") or next(iter(args[1:]), None)
            check_optimizer(self.replica.rule, optimizer, closure is not None)
        except InputError as cause:
            if self._refuse is None:
                raise
            self._refuse(str(cause))
            return
        self._optimizer = weakref.ref(optimizer)
        LOOSE[self.replica.rule.method].before(self.replica, optimizer)

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        replica = self.replica
        if replica is None or self._optimizer() is not optimizer:
            return
        replica.steps += 1
        averaging = replica.rule.method in AVERAGING
        overdue = replica.steps - self._last_travel >= self.travel_steps
        # An average makes models equal: they travel just before one, when they have drifted as far as they may.
        is_between = averaging and replica.steps % int(replica.rule.theta) != 0
        travels = self.controller is not None and overdue and not is_between
        if travels and averaging:
            self._travel(optimizer)
        LOOSE[replica.rule.method].after(replica, optimizer)
        if travels and not averaging:
            self._travel(optimizer)
        if travels or replica.steps & (replica.steps - 1) == 0:
            self._report()

    def _travel(self, optimizer: torch.optim.Optimizer) -> None:
        """Send this rank's model to another one, try the one that comes, and let the controller choose."""
        replica, controller, probe = self.replica, self.controller, self.probe()
        assert replica is not None
        assert controller is not None
        ready = torch.tensor([0 if probe is None else len(probe[1])], device=replica.device)
        dist.all_reduce(ready, dist.ReduceOp.MIN, group=replica.group)
        if not int(ready) or probe is None:
            self._last_travel, self._interval_start = replica.steps, replica.sent_bytes
            return
        statistics = [buffer.reshape(-1).float() for buffer in self._statistics().values()]
        model = torch.cat([replica.drifted(optimizer), *statistics])
        visitor, ranks, rank = torch.empty_like(model), replica.num_ranks, replica.group.rank()
        shift = 1 + len(self.travels) % (ranks - 1)
        to, of = (dist.get_global_rank(replica.group, (rank + way) % ranks) for way in (shift, -shift))
        sends = dist.P2POp(dist.isend, model, to, replica.group), dist.P2POp(dist.irecv, visitor, of, replica.group)
        for request in dist.batch_isend_irecv(list(sends)):
            request.wait()
        sent_bytes = replica.sent_bytes - self._interval_start
        lost = self._accuracy(model, probe) - self._accuracy(visitor, probe)
        means = torch.tensor([lost, float(sent_bytes)], dtype=torch.float64, device=replica.device)
        dist.all_reduce(means.div_(ranks), group=replica.group)
        accuracy_loss, sent = means.tolist()
        share = sent / (replica.steps - self._last_travel) / self._model_bytes
        row = {"step": replica.steps, "theta": replica.rule.theta, "accuracy_loss": accuracy_loss, "bytes_share": share}
        if self.travels:  # the first one measures how models begin, and says too much
            replica.rule = LooseRule(replica.rule.method, controller.next(replica.rule.theta, accuracy_loss, share))
        self.travels.append(row | {"next": replica.rule.theta})
        replica.sent_bytes += model.nbytes
        self._interval_start, self._last_travel = replica.sent_bytes, replica.steps

    def _statistics(self) -> dict[str, torch.Tensor]:
        """Return the running statistics; other buffers are equal on all ranks, or the script's own matter."""
        buffers = self.module.named_buffers()
        return {name: buffer for name, buffer in buffers if name.rpartition(".")[2] in RUNNING}

    @torch.no_grad()
    def _accuracy(self, model: torch.Tensor, probe: Probe) -> float:
        """Return the share of examples that a model [n], weights and statistics, classifies."""
        assert self.replica is not None
        named: dict[str, torch.Tensor] = {**self.replica.parameters, **self._statistics()}
        parts_of = torch.split(model, [tensor.numel() for tensor in named.values()])
        state = {
            name: section.view(tensor.shape).to(tensor.dtype)
            for (name, tensor), section in zip(named.items(), parts_of, strict=True)
        }  # fmt: skip
        inputs, labels = probe
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            outputs = functional_call(self.module, state, inputs if isinstance(inputs, tuple) else (inputs,))
        finally:
            for module, mode in modes:
                module.training = mode
        return float((outputs.argmax(1) == labels).double().mean())


def _remove(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()


# Normalisation that does not depend on the batch. BatchNorm learns the statistics of the batches that it sees. Where
# each rank has other data they diverge (by 6 to 61 %, SkewScout, section 5), and even synchronous training fails.

GROUPS = 2
"""Groups of a layer: what SkewScout's authors table best for a ResNet-20."""

LEAST_CHANNELS = 2
"""Channels of a group: one channel without places normalises to nothing."""


def batch_norms(model: nn.Module) -> list[str]:
    """Return the names of the layers that keep statistics of batches, in order."""
    return [name or "the model" for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]


def swap_norm(model: nn.Module, *, groups: int = GROUPS) -> nn.Module:
    """Replace each BatchNorm in `model` by a GroupNorm with its weight, bias and eps; returns the model.

    A layer of c channels gets the most groups, `groups` at most, that divide c into 2 channels or more each. Weight and
    bias stay the same parameters, so that an optimizer may hold them already; running statistics go. The network
    computes something else afterwards: swap before training. Raises `InputError` for `groups` below 1, a layer of one
    channel, which would be a group of one element, and one whose channels are not known yet.
    """
    if groups < 1:
        raise InputError(f"groups is {groups}; a layer has 1 group or more.")
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = {name: layer for name, layer in modules.items() if isinstance(layer, _BatchNorm)}
    for name, layer in layers.items():
        if layer.num_features < LEAST_CHANNELS:
            raise InputError(
                f"{name or 'the model'} has {layer.num_features} channels: a group of one element, or a lazy layer. "
                "Widen it, run a batch first, or leave the layer out of the model."
            )
    made: dict[int, nn.GroupNorm] = {}
    for name, layer in layers.items():
        swapped = made.setdefault(id(layer), _group_norm(layer, groups))
        if not name:
            return swapped
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, swapped)
    return model


def _group_norm(layer: _BatchNorm, groups: int) -> nn.GroupNorm:
    channels = layer.num_features
    count = max(g for g in range(1, min(groups, channels // LEAST_CHANNELS) + 1) if channels % g == 0)
    made = nn.GroupNorm(count, channels, eps=layer.eps, affine=layer.affine)
    if layer.affine:
        made.weight, made.bias = layer.weight, layer.bias
    return made.train(layer.training)
