"""Reads how a script computes, once per model and optimizer: nothing here is called again in later steps.

None of it starts a driver or waits for a device: flags and shapes only. The answers are rows of JSON with the keys of
`headway.trace.rings.rank_tables`, whose types are not imported here: every rank and loader worker would pay for them.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from headway.core.machine.interruptions import pass_on, suppress_own
from headway.runtime.host.device import device_type

Row = dict[str, object]
"""Facts by name."""

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

ENVIRONMENTS = frozenset({"gymnasium", "gym", "envpool", "pettingzoo", "ale_py", "procgen", "vizdoom", "dm_control"})
"""Modules of environments that policies act in."""

OF_POLICIES = ("env", "reward", "advantage", "episode", "rollout")
"""How names begin that scripts with a policy have, and those that only draw from a distribution have not."""

FRAMES = 16
"""Callers of a model that are looked at."""

MOST = 8
"""Models and optimizers that are noted: a script that makes more of them in a loop has seen to it itself."""


P = ParamSpec("P")
R = TypeVar("R")


def unseen(look: Callable[P, R]) -> Callable[P, R]:
    """Have modes of torch's, and `__torch_function__` of subclasses, not be asked while `look` reads tensors."""

    @functools.wraps(look)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with sys.modules["torch"]._C.DisableTorchFunction():
            return look(*args, **kwargs)

    return called


def parameters_of(module: Module) -> Iterator[Parameter]:
    """Return the parameters of a module as torch does: a script's own `parameters` may give groups for an optimizer."""
    import torch

    return torch.nn.Module.parameters(module)


@unseen
def model_facts(module: Module, arguments: Iterable[object]) -> Row:
    """Return `ModelFacts` of a model within, or right behind, a call of it with `arguments`."""
    import torch

    parameters = list(parameters_of(module))
    dtypes = Counter[str]()
    for parameter in parameters:
        dtypes[_name(parameter.dtype)] += parameter.numel()
    inputs = [given for given in arguments if isinstance(given, torch.Tensor)]
    kind = parameters[0].device.type if parameters else "cpu"
    weights = [parameter for parameter in parameters if parameter.dim() == 4]
    return {
        "name": type(getattr(module, "_orig_mod", module)).__name__,
        "num_elements": dtypes.total(),
        "parameter_dtypes": dict(dtypes),
        "input_dtypes": [_name(given.dtype) for given in inputs],
        "batch_size": next((given.shape[0] for given in inputs if given.dim()), None),
        "autocast": _autocast(kind),
        "is_compiled": hasattr(module, "_orig_mod") or module._compiled_call_impl is not None,
        "num_convolution_weights": len(weights),
        "num_channels_last": sum(_is_channels_last(weight) for weight in weights),
        "acts": _acts(sys._getframe(1)),
        **_embeddings(module),
        "num_lookups": sum(given.numel() for given in inputs if not given.is_floating_point()),
    }


def _embeddings(module: Module) -> Row:
    """Return the facts of embeddings with gradients of all their rows; one whose weight is tied has no other."""
    import torch

    uses = Counter(id(weight) for child in module.modules() for weight in child._parameters.values())
    tables = (child for child in module.modules() if type(child) in (torch.nn.Embedding, torch.nn.EmbeddingBag))
    weights = (table._parameters.get("weight") for table in tables if not table.sparse)
    alone = [weight for weight in weights if weight is not None and weight.requires_grad and uses[id(weight)] == 1]
    return {
        "num_dense_rows": sum(weight.shape[0] for weight in alone),
        "num_dense_elements": sum(weight.numel() for weight in alone),
    }


def _acts(frame: FrameType | None) -> bool:
    """Return whether the script trains a policy: it knows environments, or draws actions of which it takes log_prob."""
    if not ENVIRONMENTS.isdisjoint(sys.modules):
        return True
    for _ in range(FRAMES):
        if frame is None:
            return False
        # Names that the code of a caller uses: dist.sample() ... dist.log_prob(action), and what only policies have.
        names = {*frame.f_code.co_names, *frame.f_code.co_varnames}
        if {"sample", "log_prob"} <= names and any(name.lower().startswith(OF_POLICIES) for name in names):
            return True
        frame = frame.f_back
    return False


@unseen
def call_facts(module: Module) -> Row:
    """Return what `CallFlops` says of a call beside its operations, within or right behind it."""
    settings: Row = {}
    note_settings(settings)
    dtypes, devices = Counter[str](), set[str]()
    for parameter in parameters_of(module):
        dtypes[_name(parameter.dtype)] += parameter.numel()
        devices.add(parameter.device.type)
    has_convolutions = any(parameter.dim() == 4 for parameter in parameters_of(module))
    of_matmuls = (settings.get("matmul_precision") or "highest") != "highest"
    return {
        "name": type(getattr(module, "_orig_mod", module)).__name__,
        "dtype": next(filter(None, map(_autocast, devices)), None) or dtypes.most_common(1)[0][0],
        "has_convolutions": has_convolutions,
        "device": device_type(),
        "in_tf32": of_matmuls or (has_convolutions and bool(settings.get("cudnn_tf32"))),
    }


@unseen
def optimizer_facts(optimizer: Optimizer) -> Row:
    """Return `OptimizerFacts` of an optimizer at its first step, with the gradients that it has then."""
    groups = optimizer.param_groups
    tensors = [tensor for group in groups for tensor in group["params"] if tensor.grad is not None]
    devices = {tensor.device.type for tensor in tensors}
    optimizer_class = type(optimizer)
    is_torchs = optimizer_class.__module__.partition(".")[0] == "torch"
    plain = all(can_be_fused(tensor, [tensor.grad]) for tensor in tensors)
    return {
        "name": optimizer_class.__name__ if is_torchs else f"{optimizer_class.__module__}.{optimizer_class.__name__}",
        "num_tensors": len(tensors),
        "num_elements": sum(tensor.numel() for tensor in tensors),
        "device_type": devices.pop() if len(devices) == 1 else "",
        "is_fused": _agreed(group.get("fused") for group in groups),
        "is_foreach": _agreed(group.get("foreach") for group in groups),
        "has_momentum": any(group.get("momentum") for group in groups),
        "is_plain": plain and not any(group.get("differentiable") for group in groups),
    }


def can_be_fused(parameter: Tensor, others: Iterable[Tensor | None]) -> bool:
    """Say whether a parameter, and the gradient and states that go with it, are what fused updates get right.

    All are dense, real and no subclass of torch's tensors, and lie in memory alike. What has another shape is a count
    of steps; None is what is not there yet.
    """
    dense = parameter.is_contiguous() or _is_channels_last(parameter)
    if not _is_plain(parameter) or not (dense and parameter.is_floating_point()):
        return False
    for other in others:
        if other is None:
            continue
        if other.is_sparse or not _is_plain(other):
            return False
        unlike = other.stride() != parameter.stride() or other.dtype != parameter.dtype
        if unlike and other.shape == parameter.shape and parameter.dim():
            return False
    return True


def _is_plain(tensor: Tensor) -> bool:
    """Say whether the numbers of a tensor are a plain one's; `tensor.data` would say so by an operator."""
    import torch

    base, plain = type(tensor), torch.Tensor
    return base is plain or (
        issubclass(base, torch.nn.Parameter) and base.__torch_dispatch__ is plain.__torch_dispatch__
    )


def note(compute: dict[str, object], name: str, facts: Callable[[], Row], row: Row | None = None) -> None:
    """Add what `facts` returns to the rank's table `compute`, or bring a `row` of it up to date.

    What cannot be read is left out.
    """
    row = {} if row is None else row
    with suppress_own():
        rows = compute.setdefault(name, [])
        if isinstance(rows, list) and (row or len(rows) < MOST):
            is_new = not row
            row.update(facts())
            rows += [row] if is_new else []


def note_settings(compute: dict[str, object]) -> None:
    """Add what is set for the whole process, by the names of `ComputeFacts`."""
    import torch

    with suppress_own():
        compute["cudnn_benchmark"] = bool(torch.backends.cudnn.benchmark)
        # Where the newer of torch's two interfaces has set it, the older one refuses to answer.
        compute["matmul_precision"] = torch.get_float32_matmul_precision()
        compute["cudnn_tf32"] = bool(torch.backends.cudnn.allow_tf32)
        compute["detects_anomalies"] = torch.is_anomaly_enabled()


def _autocast(device_type: str) -> str | None:
    """Return the dtype of the autocast that is on, None without it."""
    import torch

    return _name(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else None


def _name(dtype: object) -> str:
    """Return a dtype without torch's name before it.

    >>> _name("torch.float32")
    'float32'
    """
    return str(dtype).rpartition(".")[2]


def _agreed(values: Iterable[bool | None]) -> bool | None:
    """Return what all say; None where they differ."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def _is_channels_last(weight: Tensor) -> bool:
    """Say whether a weight lies with its channels last and not, as with one channel, both ways."""
    import torch

    last = weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    return last and not weight.is_contiguous()


@unseen
def first_parameter(optimizer: Any) -> object:
    """Return the first parameter that an optimizer updates; None where it does not say."""
    try:
        return next((parameter for group in optimizer.param_groups for parameter in group["params"]), None)
    except Exception as cause:  # an optimizer of the script's own may hold anything
        pass_on(cause)
        return None


@unseen
def num_parameters(optimizer: Any) -> int | None:
    """Return the numbers that an optimizer updates (of a DTensor those of all ranks); None where it does not say."""
    try:
        return sum(int(parameter.numel()) for group in optimizer.param_groups for parameter in group["params"])
    except Exception as cause:  # an optimizer of the script's own may hold anything: a fact less
        pass_on(cause)
        return None
