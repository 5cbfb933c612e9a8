"""'fault.guard': looks at the losses of all ranks before each update, and acts when one is NaN, infinite or a spike.

One decision is made per training cycle: from a backward to the last update behind it. Several ranks hand each other
their losses in one small all-reduce at the end of a backward in which DDP or FSDP2 has reduced gradients over all of
them: that backward exists on each rank, whatever optimizers it has. So all see the same numbers in the same cycle and
do the same. Under DDP's `Join`, and where no such backward is seen, nothing is guarded, which RUN/applied says. What is
done changes the results of the job: the plan must be granted it (`allow = "lossy"`). Actions:

    skip       the gradients of all optimizers are dropped until the next cycle, on all ranks; where a loss that is not
               finite outlasts `MOST_SKIPS` of that in a row it is a rollback
    rollback   the attempt ends; the next one goes on from a checkpoint behind which a good loss followed. A finite
               spike sends the job back once: where it comes again, it is the data's
    stop       the job ends

The rank whose batch it was raises first, and so is the one that is named. On a device the numbers are waited for:
that is one synchronisation per step.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from headway.core.errors import HeadwayError
from headway.fault import remedies
from headway.runtime.calls.patches import replace_attribute
from headway.runtime.host.device import capturing
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy
from headway.runtime.script.bad_loss import USUAL, judge

NAME = "fault.guard"

MOST_SKIPS = 3
"""Cycles in a row whose gradients are dropped before going back: parameters that are NaN already do not mend."""

YIELD_S = 1.0
"""How long the other ranks wait before they end: the one with the batch is to end first."""

DDP = "torch.nn.parallel.distributed:DistributedDataParallel"
SCALER = "torch.amp.grad_scaler:GradScaler"
SHARDED = (
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._root_post_backward_final_callback",
    "torch.distributed.fsdp._runtime_utils:_post_backward_final_callback",
)
"""What FSDP2 and FSDP call once at the end of each backward of theirs, on all ranks."""

UNSEEN = "no backward was seen yet in which DDP or FSDP2 reduces gradients over all ranks"
JOINED = "the script trains under Join, where ranks end at different steps"


class BadLossError(HeadwayError):
    """A loss that the guard does not let pass; the attempt ends."""


class BadLossStop(BadLossError):  # noqa: N818  # what is raised where the job is to end
    """The same, and there is to be no further attempt."""


class LossGuard:
    """The guard of one rank."""

    def __init__(self, action: str, context: Context) -> None:
        self._action, self._context, self._rank = action, context, context.rank
        self.facts: dict[str, Any] = {"action": action, "bad": []}
        """What goes into RUN/applied."""
        self._total: Any = None  # sum of the losses since the last look: a job may accumulate without end
        self._count = 0
        self._usual: deque[float] = deque(maxlen=USUAL)
        self._depth = 0  # of backward in backward: checkpoints that are computed anew
        self._cycle = self._skipped = self._looks = 0
        self._is_bad, self._is_updated = False, True
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepping: Callable[[], Any] = _nobody  # the optimizer that calls its closure now
        self._scaled: tuple[Callable[[], Any], Any] = (_nobody, None)
        self._reduced: list[tuple[Any, Any]] = []  # group and device of modules that this backward has reduced
        self._awaited: weakref.WeakSet[Any] = weakref.WeakSet()  # DDP models whose next backward reduces
        self._refused: str | None = None
        self._is_agreed = False
        self._follows = {target: context.guarded(self.reducing) for target in SHARDED}

    def backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `torch.autograd.backward`: take in the numbers that it begins from, and decide behind it."""

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if capturing():
                return original(*args, **kwargs)
            if not self._depth:
                self._begin(args[0] if args else kwargs.get("tensors"))
            self._depth += 1
            try:
                value = original(*args, **kwargs)
            finally:
                self._depth -= 1
            if not self._depth:
                self._end()
            return value

        return backward

    def scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `GradScaler.scale`: the loss is what it was before."""

        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if scaled is not outputs and getattr(scaled, "numel", int)() == 1:
                self._scaled = weakref.ref(scaled), outputs.detach()
            return scaled

        return scale

    def scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `GradScaler.step`, which leaves updates out by itself: the cycle is over all the same."""

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            self._look()
            value = original(*args, **kwargs)
            self._is_updated = True
            return value

        return step

    def wrapping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the construction of a DDP model: its parameters say when their gradients arrive."""

        @functools.wraps(original)
        def init(model: Any, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            known = weakref.ref(model)

            def arrives(parameter: Any) -> None:
                one = known()
                if one is not None and one in self._awaited and not self._reduced:
                    self._awaited.discard(one)
                    self._arrives(one.process_group, parameter.device, one._join_config.enable)

            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(arrives)

        return init

    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the forward of a DDP model: the backward behind it reduces gradients, and no other into its module."""

        @functools.wraps(original)
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            value = original(model, *args, **kwargs)
            if model.require_backward_grad_sync and sys.modules["torch"].is_grad_enabled():
                self._awaited.add(model)
            return value

        return forward

    def reducing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the end of a backward of FSDP2 or FSDP."""

        @functools.wraps(original)
        def reduce(state: Any, *args: Any) -> Any:
            value = original(state, *args)
            if hasattr(state, "_state_ctx"):
                inner = state._state_ctx.all_states
                parts = [part for one in inner for part in getattr(one, "_fsdp_param_groups", [one._fsdp_param_group])]
                if {part.mesh_info.mesh.size() for part in parts if part} == {_world_size()}:
                    self._arrives(None, state._device)
            else:
                self._arrives(state.process_group, state.compute_device)
            return value

        return reduce

    def _arrives(self, group: Any, device: Any, is_joined: bool = False) -> None:
        """Note that this backward reduces gradients, over all ranks."""
        distributed = sys.modules["torch"].distributed
        if is_joined:
            self._refuse(JOINED)
        elif _world_size() > 1 and (group is None or group.size() == distributed.get_world_size()):
            self._reduced.append((group, device))

    def _begin(self, roots: Any) -> None:
        if self._is_updated:
            self._cycle, self._is_updated = self._cycle + 1, False
            self._skipped, self._is_bad = self._skipped if self._is_bad else 0, False
            self._total, self._count = None, 0  # no rank has asked for these
            self._looks = 0
        for target in [one for one in self._follows if one.partition(":")[0] in sys.modules]:
            self._context.undos.append(replace_attribute(target, self._follows.pop(target)))
        for root in roots if isinstance(roots, (list, tuple)) else [roots]:
            if getattr(root, "numel", int)() == 1:
                scaled, loss = self._scaled
                loss = (loss if scaled() is root else root).detach().reshape(()).float()
                self._total, self._count = loss if self._total is None else self._total + loss, self._count + 1

    def _end(self) -> None:
        """Decide where all ranks are at this point; alone, where an optimizer waits for its closure."""
        optimizer = self._stepping()
        if self._reduced:
            self._decide(self._together(*self._reduced.pop()))
        elif optimizer is not None and _world_size() == 1:
            self._decide([self._own()])
        if self._is_bad and optimizer is not None:
            optimizer.zero_grad(set_to_none=True)

    def before_update(self, optimizer: Any, *_: Any) -> None:
        """Drop the gradients where the cycle is bad; raises `BadLossError` where it decides only now."""
        if capturing():
            return
        self._optimizers.add(optimizer)
        self._look()
        self._stepping = weakref.ref(optimizer)
        if self._is_bad:
            for one in list(self._optimizers):
                one.zero_grad(set_to_none=True)  # what has no gradient is not updated

    def _look(self) -> None:
        """Decide ahead of an update, on one rank; of several, all have, or there is nothing to decide by."""
        if _world_size() == 1:
            if self._count:
                self._decide([self._own()])
        elif self._refused is None and not self._is_agreed:
            self._refuse(UNSEEN)

    def after_update(self, *_: Any) -> None:
        """End the cycle with the next backward."""
        self._is_updated, self._stepping = True, _nobody

    def _own(self) -> Any:
        """Return the mean loss of this rank since the last look, None without one."""
        own = self._total / self._count if self._count else None
        self._total, self._count = None, 0
        return own

    def _together(self, group: Any, device: Any) -> list[Any]:
        """Return the loss of each rank, None where it has none; the same list on all of them."""
        torch, own = sys.modules["torch"], self._own()
        table = torch.zeros(2, torch.distributed.get_world_size(), device=device)  # [loss, has one] of each rank
        if own is not None:
            table[0, self._rank], table[1, self._rank] = own, 1.0
        torch.distributed.all_reduce(table, group=group)
        self._is_agreed = True
        if self._refused is not None:
            self._refused = None
            self._context.note(Applied(NAME, self.facts))
        return [loss if has else None for loss, has in table.T.tolist()]

    def _decide(self, losses: list[Any]) -> None:
        """Judge the losses of all ranks; raises `BadLossError` where the attempt has to end."""
        losses = [None if loss is None else float(loss) for loss in losses]
        there = [loss for loss in losses if loss is not None]
        is_again = self._looks > 0 and self._stepping() is not None  # a line search, on one batch
        bad = judge(losses, () if is_again else self._usual)
        is_finite = all(map(math.isfinite, there))
        self._looks += 1
        if there and is_finite and not is_again:
            self._usual.append(statistics.fmean(there) if bad is None else max(there))
        if bad is None:
            return
        rows = self.facts["bad"]
        if len(rows) < USUAL:
            rows.append({"step": self._cycle, "ranks": list(bad.ranks), "what": bad.what})
            self._context.write()
        if self._action == "rollback" and is_finite and self._context.probes.recorder.attempt:
            return
        if self._action == "skip" and (self._is_bad or self._skipped < MOST_SKIPS):
            self._skipped += not self._is_bad
            self._is_bad = True
            return
        if self._rank not in bad.ranks:
            time.sleep(YIELD_S)
        raise (BadLossStop if self._action == "stop" else BadLossError)(str(bad))

    def _refuse(self, reason: str) -> None:
        if self._refused != reason:
            self._refused = reason
            self._context.note(RefusedRemedy(NAME, reason, self.facts))


def _nobody(*_: Any) -> None:
    """Stand for a weak reference to nothing, and for a hook that has failed."""


def _world_size() -> int:
    distributed = sys.modules["torch"].distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def guard(parameters: remedies.GuardParameters, context: Context) -> Applied | RefusedRemedy:
    """Install the remedy."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    guarding, passing = LossGuard(parameters.action, context), (BadLossError,)
    context.patch("torch.autograd:backward", guarding.backward, passing=passing)
    context.patch(f"{DDP}.__init__", guarding.wrapping)
    context.patch(f"{DDP}.forward", guarding.forward)
    context.patch(f"{SCALER}.scale", guarding.scale)
    context.patch(f"{SCALER}.step", guarding.scaler_step, passing=passing)
    before = context.guarded(lambda _: guarding.before_update, passing=passing)(_nobody)
    context.undos.append(register_optimizer_step_pre_hook(before).remove)
    context.undos.append(register_optimizer_step_post_hook(guarding.after_update).remove)
    return Applied(NAME, guarding.facts)
