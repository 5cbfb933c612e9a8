"""'fault.guard': looks at the losses of all ranks before each update, and acts when one is NaN, infinite or a spike.

All ranks hand each other their losses in one small all-reduce before the first optimizer's update, so all of them see
the same numbers in the same step and do the same. What is done changes the results of the job: the plan must be
granted it (`allow = "lossy"`). Actions:

    skip       this update is left out, on all ranks; after `MOST_SKIPS` in a row it is a rollback
    rollback   the attempt ends; the next one goes on from the newest checkpoint, which was saved before
    stop       the job ends

The rank whose batch it was raises first, and so is the one that is named. On a device the numbers are waited for:
that is one synchronisation per step.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from headway.core.errors import HeadwayError
from headway.fault import remedies
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy
from headway.runtime.script.bad_loss import USUAL, Bad, judge

NAME = "fault.guard"

MOST_SKIPS = 3
"""Updates in a row that are left out before going back: parameters that are NaN already do not mend."""

YIELD_S = 1.0
"""How long the other ranks wait before they end: the one with the batch is to end first."""


class BadLossError(HeadwayError):
    """A loss that the guard does not let pass; the attempt ends."""


class BadLossStop(BadLossError):  # noqa: N818  # what is raised where the job is to end
    """The same, and there is to be no further attempt."""


class LossGuard:
    """The guard of one rank."""

    def __init__(self, action: str, rank: int, facts: dict[str, Any], write: Callable[[], None]) -> None:
        """`facts` go into RUN/applied, which `write` writes."""
        self._action, self._rank, self._facts, self._write = action, rank, facts, write
        self._total: Any = None  # sum of the losses since the last update: a job may accumulate without end
        self._count = 0
        self._usual: deque[float] = deque(maxlen=USUAL)
        self._optimizer: int | None = None
        self._steps = self._skipped = 0

    def saw(self, root: Any) -> None:
        """Take in the number that a backward begins from."""
        if getattr(root, "numel", int)() == 1:
            loss = root.detach().reshape(()).float()
            self._total = loss if self._total is None else self._total + loss
            self._count += 1

    def before_update(self, optimizer: Any, *_: Any) -> None:
        """Look at the losses of all ranks; raises `BadLossError`, or takes the gradients away, where one is bad."""
        if self._optimizer is None:
            self._optimizer = id(optimizer)
        if id(optimizer) != self._optimizer:
            return
        self._steps += 1
        losses = self._together()
        bad = judge(losses, self._usual)
        if bad is None:
            self._skipped = 0
            self._usual.append(statistics.fmean(losses) if losses else 0.0)
            return
        self._note(bad)
        if self._action == "skip" and self._skipped < MOST_SKIPS:
            self._skipped += 1
            optimizer.zero_grad(set_to_none=True)  # what has no gradient is not updated
            return
        if self._rank not in bad.ranks:
            time.sleep(YIELD_S)
        raise (BadLossStop if self._action == "stop" else BadLossError)(str(bad))

    def _together(self) -> list[float]:
        """Return the losses of all ranks that have one; the same list on all of them."""
        torch = sys.modules["torch"]
        own = self._total / self._count if self._count else None
        self._total, self._count = None, 0
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not together:
            return [] if own is None else [float(own)]
        world = torch.distributed.get_world_size()
        device = own.device if own is not None else _device(torch)
        table = torch.zeros(2, world, device=device)  # [loss, has one] of each rank
        if own is not None:
            table[0, self._rank], table[1, self._rank] = own, 1.0
        torch.distributed.all_reduce(table)
        return [loss for loss, has in table.T.tolist() if has]

    def _note(self, bad: Bad) -> None:
        rows = self._facts["bad"]
        if len(rows) < USUAL:
            rows.append({"step": self._steps, "ranks": list(bad.ranks), "what": bad.what})
            self._write()


def _device(torch: Any) -> Any:
    return torch.device("cuda") if torch.distributed.get_backend() == "nccl" else torch.device("cpu")


def guard(parameters: remedies.GuardParameters, context: Context) -> Applied | RefusedRemedy:
    """Install the remedy."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    facts: dict[str, Any] = {"action": parameters.action, "bad": []}
    guarding = LossGuard(parameters.action, context.rank, facts, context.write)

    def seeing(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            guarding.saw(args[0] if args else kwargs.get("tensors"))
            return original(*args, **kwargs)

        return backward

    context.patch("torch.autograd:backward", seeing)
    handle = register_optimizer_step_pre_hook(guarding.before_update)
    context.undos.append(handle.remove)
    return Applied(NAME, facts)
