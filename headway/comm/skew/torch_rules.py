"""What each rule of loose synchronisation does before and after an optimizer's step: `LOOSE`.

A rule works on a `Replica`: this rank's parameters, and vectors over all of their numbers in one order [n], float32.

    before(replica, optimizer)     gradients are there, the update is not
    after(replica, optimizer)      the update is done; collectives here, on all ranks alike

>>> sorted(LOOSE)
['dgc', 'diloco', 'fedavg', 'gaia']
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from headway.comm.compression.torch_codecs import packet_of, parts, topk_places
from headway.comm.compression.torch_dense import as_bytes, as_values
from headway.comm.remedies import LooseRule
from headway.core.errors import InputError
from headway.core.tables import Named
from headway.cost.codecs import CodecName, place_bytes

OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
"""DiLoCo's outer Nesterov step (arXiv 2311.08105, section 3.2)."""

BUFFER_STEPS = 100
"""Steps between averages of running statistics, under rules that do not average models anyway."""


@dataclass(slots=True, eq=False)
class Replica:
    """This rank's copy of a model, and what its rule keeps of it."""

    parameters: dict[str, torch.nn.Parameter]
    """Name -> parameter; those that are trained."""

    buffers: list[torch.Tensor]
    """Running statistics that are averaged."""

    rule: LooseRule
    """The rule, with its present setting."""

    group: dist.ProcessGroup
    """The ranks that synchronise."""

    update_scale: float = 1.0
    """Factor on each of this rank's updates (gaia): 1 / ranks makes the sum of updates their mean."""

    steps: int = 0
    """Steps of the optimizer so far."""

    sent_bytes: int = 0
    """Bytes that this rank has handed to collectives: packets, or whole models."""

    vectors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name -> [n] float32 that the rule keeps from step to step."""

    first_rates: list[float] = field(default_factory=list)
    """Learning rate of each group of the optimizer at its first step (gaia)."""

    held_settings: list[dict[str, float]] = field(default_factory=list)
    """Settings of each group that are not the optimizer's business during a step (dgc)."""

    def drifted(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Return [n] this rank's own model: its weights; under dgc, whose weights are equal, as if it had sent all."""
        weights = self.weights()
        if self.rule.method == "dgc":
            weights.add_(self.vector("unsent"), alpha=-float(optimizer.param_groups[0]["lr"]) / self.num_ranks)
        return weights

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.group.size()

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(iter(self.parameters.values())).device

    def weights(self) -> torch.Tensor:
        """Return a copy of all parameters, [n] float32."""
        return torch.cat([p.detach().reshape(-1).to(torch.float32) for p in self.parameters.values()])

    def cut(self, vector: torch.Tensor) -> Iterable[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield each parameter with its section of a vector [n], in the parameter's shape."""
        parts_of = torch.split(vector, [p.numel() for p in self.parameters.values()])
        for parameter, section in zip(self.parameters.values(), parts_of, strict=True):
            yield parameter, section.view(parameter.shape)

    def vector(self, name: str) -> torch.Tensor:
        """Return a kept vector, zeros at first."""
        if name not in self.vectors:
            self.vectors[name] = torch.zeros(sum(p.numel() for p in self.parameters.values()), device=self.device)
        return self.vectors[name]

    def average(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace tensors by their mean over the ranks, in place: the same bits on every rank.

        torch's `average_parameters` would give parameters other memory, which optimizers and captured graphs refer to.
        """
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_type.setdefault(tensor.dtype, []).append(tensor)
        for alike in by_type.values():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in alike]).div_(self.num_ranks)
            dist.all_reduce(flat, group=self.group)
            self.sent_bytes += flat.nbytes
            for tensor, mean in zip(alike, torch.split(flat, [tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(mean.view(tensor.shape))

    def exchange(self, values: torch.Tensor, indices: torch.Tensor, n: int, *, alike: bool = False) -> torch.Tensor:
        """Return [n] the sum over ranks, in their order, of [k] `values` at rising `indices` below `n`.

        Ranks may have unlike k: then lengths are gathered first, and packets are as long as the longest. With `alike`
        all have the same k. Where places cost more than they save, a packet holds all n values.
        """
        k = len(indices)
        packet = values.new_empty(0, dtype=torch.uint8)
        if 0 < 4 * n <= 4 * k + sum(place_bytes(n, k)):
            packet = as_bytes(torch.zeros(n, device=values.device).index_copy_(0, indices, values))
        elif k:
            packet = packet_of(values, indices, n)
        counts = [(k, packet.numel())] * self.num_ranks
        if not alike:
            rows = [torch.empty(2, dtype=torch.int64, device=packet.device) for _ in counts]
            dist.all_gather(rows, torch.tensor(counts[0], device=packet.device), group=self.group)
            counts = [(int(count), int(length)) for count, length in torch.stack(rows).tolist()]
            self.sent_bytes += rows[0].nbytes
        longest = max(length for _, length in counts)
        self.sent_bytes += longest
        total = torch.zeros(n, device=packet.device)
        if not longest:
            return total
        padded = packet.new_zeros(longest)
        padded[: packet.numel()] = packet
        packets = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(packets, padded, group=self.group)
        for row, (count, length) in zip(packets, counts, strict=True):
            if length == 4 * n:
                total += as_values(row[:length], torch.float32)
            elif count:
                received, where = parts(row[:length], n, count, torch.float32)
                total.index_add_(0, where, received)
        return total


Phase = Callable[[Replica, torch.optim.Optimizer], None]


@dataclass(frozen=True, slots=True)
class LooseSteps:
    """What a rule does around each step."""

    before: Phase
    """Called when gradients are there."""

    after: Phase
    """Called when the update is done."""


def _nothing(replica: Replica, optimizer: torch.optim.Optimizer) -> None:
    """Of a rule that has nothing to do there."""


def remember_weights(replica: Replica, optimizer: torch.optim.Optimizer) -> None:
    """Gaia, before: the weights from which the update is told."""
    replica.vectors["before"] = replica.weights()


def send_significant(replica: Replica, optimizer: torch.optim.Optimizer) -> None:
    """Gaia, after: v += update; entries with |v / w| > T are sent and forgotten, those of others are added.

    T falls and rises with the learning rate: T = theta x rate / first rate. A weight of 0 makes any update significant.
    """
    before, unsent = replica.vectors.pop("before"), replica.vector("unsent")
    with torch.no_grad():
        update = replica.weights() - before
        if replica.update_scale != 1:
            update *= replica.update_scale
            for parameter, section in replica.cut(before + update):
                parameter.copy_(section)
        unsent += update
        significant = unsent.abs() > _thresholds(replica, optimizer) * replica.weights().abs()
        indices = significant.nonzero().view(-1)
        values = unsent[indices]
        unsent[indices] = 0
        others = replica.exchange(values, indices, len(unsent)).index_add_(0, indices, values, alpha=-1)
        for parameter, section in replica.cut(others):
            parameter.add_(section.to(parameter.dtype))
        if replica.steps % BUFFER_STEPS == 0:
            replica.average(replica.buffers)


def _thresholds(replica: Replica, optimizer: torch.optim.Optimizer) -> torch.Tensor | float:
    """Return Gaia's threshold, for each number [n] where the optimizer's groups have unlike rates."""
    groups = optimizer.param_groups
    rates = [float(group["lr"]) for group in groups]
    if len(replica.first_rates) != len(groups):
        first = [float(group.get("initial_lr", group["lr"])) for group in groups]
        replica.first_rates = replica.first_rates + first[len(replica.first_rates) :]
    factors = [now / first if first else 1.0 for now, first in zip(rates, replica.first_rates, strict=False)]
    if len(set(factors)) == 1:
        return replica.rule.theta * factors[0]
    of = {id(p): factor for group, factor in zip(groups, factors, strict=True) for p in group["params"]}
    rows = [torch.full((p.numel(),), of.get(id(p), 1.0), device=p.device) for p in replica.parameters.values()]
    return replica.rule.theta * torch.cat(rows)


def average_weights(replica: Replica, optimizer: torch.optim.Optimizer) -> None:
    """FedAvg, after: every theta steps all ranks get the mean of their weights and running statistics."""
    if replica.steps % int(replica.rule.theta) == 0:
        with torch.no_grad():
            replica.average([*replica.parameters.values(), *replica.buffers])


def remember_anchor(replica: Replica, optimizer: torch.optim.Optimizer) -> None:
    """DiLoCo, before: the weights of the last outer step, which all ranks share."""
    if "anchor" not in replica.vectors:
        replica.vectors["anchor"] = replica.weights()


def step_outwards(replica: Replica, optimizer: torch.optim.Optimizer) -> None:
    """DiLoCo, after: every theta steps d = anchor - mean weights; b = 0.9 b + d; anchor -= 0.7 (d + 0.9 b)."""
    if replica.steps % int(replica.rule.theta):
        return
    with torch.no_grad():
        mean, anchor, momentum = replica.weights(), replica.vectors["anchor"], replica.vector("outer_momentum")
        replica.average([mean, *replica.buffers])
        change = anchor - mean
        momentum.mul_(OUTER_MOMENTUM).add_(change)
        anchor -= OUTER_RATE * (change + OUTER_MOMENTUM * momentum)
        for parameter, section in replica.cut(anchor):
            parameter.copy_(section)


def send_largest(replica: Replica, optimizer: torch.optim.Optimizer) -> None:
    """DGC, before: u = m u + g; v += u; of each layer the largest of v are sent, v and u forgotten there.

    The mean of what all ranks sent is the gradient; the optimizer takes a plain step with it, as the momentum is in u
    and the weight decay in g. With nothing left out u is kept: no momentum is stale, and the rule is momentum SGD.
    """
    n = sum(p.numel() for p in replica.parameters.values())
    momentum, unsent = replica.vector("momentum"), replica.vector("unsent")
    of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    fraction = CodecName("topk", replica.rule.theta)
    indices, start = [], 0
    with torch.no_grad():
        for (parameter, u), (_, v) in zip(replica.cut(momentum), replica.cut(unsent), strict=True):
            group = of.get(id(parameter))
            if group is None:  # not the optimizer's: it has no update
                start += parameter.numel()
                continue
            u.mul_(group["momentum"])
            if parameter.grad is not None:
                u.add_(parameter.grad)
                u.add_(parameter, alpha=group["weight_decay"])
            v.add_(u)
            indices.append(start + topk_places(v.reshape(-1), fraction.kept(v.numel()), exact=fraction.amount == 1))
            start += parameter.numel()
        where = torch.cat(indices)
        values = unsent[where]
        unsent[where] = 0
        if replica.rule.theta < 1:
            momentum[where] = 0
        mean = replica.exchange(values, where, n, alike=True).div_(replica.num_ranks)
        for parameter, section in replica.cut(mean):
            if id(parameter) in of and parameter.grad is not None:
                parameter.grad.copy_(section)
            elif id(parameter) in of:
                parameter.grad = section.to(parameter.dtype).clone()
    replica.held_settings = []
    for group in optimizer.param_groups:
        replica.held_settings.append({key: group[key] for key in ("momentum", "weight_decay")})
        group.update(momentum=0.0, weight_decay=0.0)


def give_settings_back(replica: Replica, optimizer: torch.optim.Optimizer) -> None:
    """DGC, after: the optimizer has its momentum and weight decay again."""
    for group, settings in zip(optimizer.param_groups, replica.held_settings, strict=True):
        group.update(settings)
    if replica.steps % BUFFER_STEPS == 0:
        with torch.no_grad():
            replica.average(replica.buffers)


LOOSE: Mapping[str, LooseSteps] = Named("loose rule", {
    "gaia": LooseSteps(remember_weights, send_significant),
    "fedavg": LooseSteps(_nothing, average_weights),
    "dgc": LooseSteps(send_largest, give_settings_back),
    "diloco": LooseSteps(remember_anchor, step_outwards),
})  # fmt: skip
"""Rule -> what it does around each step. Adding one is adding a line here and in `LADDERS`."""


def check_optimizer(rule: LooseRule, optimizer: torch.optim.Optimizer, with_closure: bool) -> None:
    """Raise `InputError` where a rule cannot work with an optimizer: dgc takes the momentum of plain SGD over."""
    if rule.method != "dgc":
        return
    if with_closure:
        raise InputError(f"{rule}: step() was given a closure, which makes gradients inside. Call backward() before.")
    plain = isinstance(optimizer, torch.optim.SGD) and not any(
        group["nesterov"] or group["dampening"] or group["maximize"] for group in optimizer.param_groups
    )
    if not plain:
        raise InputError(
            f"{rule} takes the momentum of torch.optim.SGD over, without nesterov, dampening and maximize; the "
            f"optimizer is {type(optimizer).__name__}. Use such an SGD, or the rule fedavg, gaia or diloco."
        )
