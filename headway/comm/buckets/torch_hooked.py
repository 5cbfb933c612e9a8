"""Models in DistributedDataParallel that a remedy gives a communication hook, unless the script has one.

model's first forward   the script has registered its hook by now, if it has one: else `begin` registers ours
the script registers    DDP takes one hook and gives none back: ours stays, and hands the buckets to the script's
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from headway.comm.buckets.apply import DDP, HOOKS
from headway.runtime.in_rank.remedy import Context, RefusedRemedy

BucketFn = Callable[[Any], Future[torch.Tensor]]
"""Reduces a bucket."""

Hook = TypeVar("Hook")


class HookedModels(Generic[Hook]):
    """The models of a script, each with a hook of a remedy's from its first forward on; a subclass makes the hook."""

    def __init__(self, name: str, context: Context) -> None:
        """Note for which remedy."""
        self.name, self.context = name, context
        self.known: weakref.WeakKeyDictionary[Any, Hook | None] = weakref.WeakKeyDictionary()
        """Model that was called -> its hook; None where it has none of ours."""
        self._is_registering = False

    @property
    def hooks(self) -> list[Hook]:
        """The hooks in force."""
        return [hook for hook in self.known.values() if hook is not None]

    def install(self) -> None:
        """Patch DDP's forward, and its methods that register a hook."""
        self.context.patch(f"{DDP}.forward", self.forward)
        for method in HOOKS:
            self.context.patch(f"{DDP}.{method}", self._registers)

    def begin(self, model: Any) -> None:
        """Register a hook within `registering`, or note why not."""
        raise NotImplementedError

    def hand_over(self, hook: Hook, successor: BucketFn) -> None:
        """Let `successor` reduce the buckets of a hook from now on."""
        raise NotImplementedError

    @contextmanager
    def registering(self) -> Iterator[None]:
        """Register a hook of our own in this block."""
        self._is_registering = True
        try:
            yield
        finally:
            self._is_registering = False

    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap DDP's forward."""

        @functools.wraps(original)
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            """Give the model its hook first, once."""
            if model not in self.known:
                self.known[model] = None
                self.begin(model)
            return original(model, *args, **kwargs)

        return forward

    def _registers(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the registration of a hook: the script's own one gets the buckets."""

        @functools.wraps(original)
        def register(model: Any, *args: Any, **kwargs: Any) -> Any:
            """Register, or hand over."""
            hook = self.known.get(model)
            if self._is_registering or hook is None:
                return original(model, *args, **kwargs)
            self.hand_over(hook, successor_of(model, original.__name__, *args, **kwargs))
            self.known[model] = None
            self.context.note(RefusedRemedy(self.name, "the script has registered a communication hook of its own"))
            return None

        return register


def successor_of(model: Any, method: str, *args: Any, **kwargs: Any) -> BucketFn:
    """Return what reduces a bucket as the hook would that a script registers by `method` of DDP."""
    if method == "register_comm_hook":
        given = dict(zip(("state", "hook"), args, strict=False)) | kwargs
        return lambda bucket: given["hook"](given["state"], bucket)
    kind = args[0] if args else kwargs["comm_hook_type"]
    halves = str(kind).endswith("FP16_COMPRESS")
    hook, group = default_hooks.fp16_compress_hook if halves else default_hooks.allreduce_hook, model.process_group
    return lambda bucket: hook(group, bucket)
