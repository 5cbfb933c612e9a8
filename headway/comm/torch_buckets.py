"""Remedies for DistributedDataParallel, without touching the script: other arguments where it is constructed.

'comm.bucket' changes the size of its buckets. A bucket is all-reduced as soon
as its gradients are there: small ones start early and pay latency often,
large ones the reverse. Every sum is over the same gradients; with more than
two ranks the backend may add them in another order, so only up to two ranks
are results promised to stay the same bit for bit (`bit_exact` in the facts). A communication hook of the script's own
may work bucket by bucket (quantise each by its largest entry): a model that gets one gets the script's buckets back.
'comm.gradient_view' lets gradients live inside the buckets: no copies, and one
copy of the gradients less in memory. 'comm.static_graph' tells DDP that every
step uses the same parameters, which saves it the search for unused ones.

Models in DistributedDataParallel that a remedy gives a communication hook, unless the script has one.

model's first forward   the script has registered its hook by now, if it has one: else `begin` registers ours
the script registers    DDP takes one hook and gives none back: ours stays, and hands the buckets to the script's
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from headway.comm import EXACT_RANKS
from headway.comm.remedies import BucketParameters
from headway.core.remedies import NoParameters
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy

NAME = "comm.bucket"
DDP = "torch.nn.parallel.distributed:DistributedDataParallel"
DDP_INIT = f"{DDP}.__init__"
HOOKS = ("register_comm_hook", "_register_builtin_comm_hook")
"""Methods of DDP that give a model a communication hook."""

REBUILDS = ("_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_ddp_init_helper")
"""Methods of DDP that give a model other buckets."""

DEFAULT_MB = 25
"""DDP's own bucket size in MiB."""
LIST = "bucket_cap_mb_list"
"""DDP's argument for a size per bucket, where torch has it (2.13 does, 2.6 does not)."""


def bucket(parameters: BucketParameters, context: Context) -> Applied | RefusedRemedy:
    """Install the remedy; `per_bucket` in the facts is true where torch takes the list of sizes.

    The order in which more than two ranks are added depends on where a gradient lies in its bucket. So models of more
    ranks keep their buckets, unless the plan was allowed 'result-equivalent' remedies.
    """
    size, sizes, respect = parameters.bucket_mb, parameters.bucket_mb_list, parameters.respect_explicit
    missing = [name for name in REBUILDS if not hasattr(DistributedDataParallel, name)]
    if missing:
        return RefusedRemedy(NAME, f"this torch has no {missing[0]}: a model with a hook would keep these buckets")
    facts: dict[str, Any] = {"bucket_mb": size, "models": 0, "kept_explicit": 0}
    if sizes is not None:
        facts |= {"bucket_mb_list": sizes, "per_bucket": False}

    own_sizes: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()
    given: list[tuple[Any, Any]] = []

    def change(bound: inspect.BoundArguments) -> None:
        """Put the plan's sizes in."""
        given.clear()
        if respect and any(bound.arguments.get(name) is not None for name in ("bucket_cap_mb", LIST)):
            facts["kept_explicit"] += 1
            return
        if context.allow != "result-equivalent" and _num_ranks(bound.arguments) > EXACT_RANKS:
            facts["kept_exact"] = facts.get("kept_exact", 0) + 1
            return
        per_bucket = sizes is not None and LIST in bound.signature.parameters
        given.append((bound.arguments.get("bucket_cap_mb"), bound.arguments.get(LIST)))
        if LIST in bound.signature.parameters:
            bound.arguments[LIST] = sizes
        bound.arguments["bucket_cap_mb"] = None if per_bucket else size
        facts["models"] += 1
        if sizes is not None:
            facts["per_bucket"] = per_bucket

    def note(model: Any) -> None:
        """Say what is known after a model was constructed."""
        facts["bit_exact"] = model.process_group.size() <= EXACT_RANKS
        if given:
            own_sizes[model] = given[0]
            _show(model, *given[0])
        context.note(_outcome(facts))

    def before_hook(original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the registration of a communication hook."""

        @functools.wraps(original)
        def register(model: Any, *args: Any, **kwargs: Any) -> Any:
            """Give the model its own buckets, then the hook."""
            if model in own_sizes:
                _rebuild(model, *own_sizes.pop(model))
                facts["models"] -= 1
                facts["hooked"] = facts.get("hooked", 0) + 1
                context.note(_outcome(facts))
            return original(model, *args, **kwargs)

        return register

    context.patch(DDP_INIT, _construct(change, note))
    for name in HOOKS:
        context.patch(f"{DDP}.{name}", before_hook)
    return Applied(NAME, facts)


def gradient_view(_: NoParameters, context: Context) -> Applied | RefusedRemedy:
    """Install 'comm.gradient_view': `gradient_as_bucket_view=True`.

    The values of gradients stay the same bit for bit, as long as the script reads them before the next backward: one
    that keeps the gradients of an earlier step finds those of the last one, and one that calls `detach_()` on them
    fails. Neither can be seen from here, so it needs a grant.
    """
    return _switch("comm.gradient_view", "gradient_as_bucket_view", context)


def static_graph(_: NoParameters, context: Context) -> Applied | RefusedRemedy:
    """Install 'comm.static_graph': `static_graph=True`.

    Nobody but the script knows that every step uses the same parameters, so it needs a grant.
    """
    return _switch("comm.static_graph", "static_graph", context)


def _switch(name: str, argument: str, context: Context) -> Applied:
    """Construct every model with a flag of DDP set."""
    facts: dict[str, Any] = {"models": 0, "had_it": 0}

    def change(bound: inspect.BoundArguments) -> None:
        facts["had_it" if bound.arguments.get(argument) else "models"] += 1
        bound.arguments[argument] = True

    context.patch(DDP_INIT, _construct(change, lambda model: context.note(Applied(name, facts))))
    return Applied(name, facts)


def _construct(
    change: Callable[[inspect.BoundArguments], None], note: Callable[[Any], None]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a wrapper of DDP's constructor that changes its arguments first, and notes the model afterwards."""

    def wrapper(original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N807  # the name it has in torch
            """Construct with the plan's arguments."""
            bound = signature.bind(*args, **kwargs)
            change(bound)
            original(*bound.args, **bound.kwargs)
            note(bound.arguments["self"])

        return __init__

    return wrapper


def _show(model: Any, size: float | None, sizes: list[float] | None) -> Any:
    """Have a DDP model show these bucket sizes in MiB (None = DDP's own); return its settings, None before torch 2.13.

    Its reducer keeps those that it has: a subclass, or a script, may read the attributes and go by them.
    """
    config = getattr(model, "_bucket_config", None)
    if config is not None:
        config = type(config).create(size, sizes, model._use_python_reducer)
        model.bucket_bytes_cap = config.bucket_bytes_cap
        model.bucket_bytes_cap_list = list(config.per_bucket_bytes_caps)
        model.bucket_bytes_cap_default = config.first_bucket_bytes_cap < config.bucket_bytes_cap
    else:  # before torch 2.13: one size
        model.bucket_bytes_cap_default = size is None
        model.bucket_bytes_cap = int((DEFAULT_MB if size is None else size) * 1024 * 1024)
    return config


def _rebuild(model: Any, size: float | None, sizes: list[float] | None) -> None:
    """Build a DDP model's reducer anew with these bucket sizes in MiB (None = DDP's own), as unpickling it does."""
    config = _show(model, size, sizes)
    if config is not None:
        model._bucket_config = config
    parameters, sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, sparse, names, model.static_graph)


def _outcome(facts: dict[str, Any]) -> Applied | RefusedRemedy:
    """Return what is known after a model was constructed, or got a communication hook."""
    if facts["models"]:
        return Applied(NAME, facts)
    if facts.get("hooked"):
        return RefusedRemedy(NAME, "the script's communication hook works on its own buckets")
    if facts.get("kept_exact"):
        return RefusedRemedy(
            NAME, "more than two ranks add gradients in another order: grant --allow result-equivalent"
        )
    return RefusedRemedy(NAME, "the script names its own bucket size, which the plan respects")


def _num_ranks(arguments: Mapping[str, Any]) -> int:
    """Return over how many ranks a model that is constructed with these arguments sums its gradients."""
    mesh, group = arguments.get("device_mesh"), arguments.get("process_group")
    return int(mesh.size()) if mesh is not None else dist.get_world_size(group)


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
