"""Reads how a script computes, once per model and optimizer: nothing here is called again in later steps.

None of it starts a driver or waits for a device: flags and shapes only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from headway.core.machine.interruptions import suppress_own
from headway.trace.rings.compute_facts import ModelFacts, OptimizerFacts

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

MOST = 8
"""Models and optimizers that are noted: a script that makes more of them in a loop has seen to it itself."""


def model_facts(module: Module, arguments: Iterable[object]) -> ModelFacts:
    """Return the facts of a model within, or right behind, a call of it with `arguments`."""
    import torch

    parameters = list(module.parameters())
    dtypes = Counter[str]()
    for parameter in parameters:
        dtypes[_name(parameter.dtype)] += parameter.numel()
    inputs = [given for given in arguments if isinstance(given, torch.Tensor)]
    device_type = parameters[0].device.type if parameters else "cpu"
    casts = torch.is_autocast_enabled(device_type)
    weights = [parameter for parameter in parameters if parameter.dim() == 4]
    return ModelFacts(
        type(getattr(module, "_orig_mod", module)).__name__,
        dtypes.total(),
        dict(dtypes),
        tuple(_name(given.dtype) for given in inputs),
        next((given.shape[0] for given in inputs if given.dim()), None),
        _name(torch.get_autocast_dtype(device_type)) if casts else None,
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None,
        len(weights),
        sum(_is_channels_last(weight) for weight in weights),
    )


def optimizer_facts(optimizer: Optimizer) -> OptimizerFacts:
    """Return the facts of an optimizer at its first step, with the gradients that it has then."""
    groups = optimizer.param_groups
    tensors = [tensor for group in groups for tensor in group["params"] if tensor.grad is not None]
    devices = {tensor.device.type for tensor in tensors}
    optimizer_class = type(optimizer)
    is_torchs = optimizer_class.__module__.partition(".")[0] == "torch"
    return OptimizerFacts(
        optimizer_class.__name__ if is_torchs else f"{optimizer_class.__module__}.{optimizer_class.__name__}",
        len(tensors),
        sum(tensor.numel() for tensor in tensors),
        devices.pop() if len(devices) == 1 else "",
        _agreed(group.get("fused") for group in groups),
        _agreed(group.get("foreach") for group in groups),
        any(group.get("momentum") for group in groups),
        all(_is_plain(tensor) for tensor in tensors) and not any(group.get("differentiable") for group in groups),
    )


def note(compute: dict[str, object], name: str, facts: Callable[[], ModelFacts | OptimizerFacts]) -> None:
    """Add what `facts` returns to the rank's table `compute`; what cannot be read is a fact less."""
    with suppress_own():
        rows = compute.setdefault(name, [])
        if isinstance(rows, list) and len(rows) < MOST:
            rows.append(msgspec.to_builtins(facts()))


def note_settings(compute: dict[str, object]) -> None:
    """Add what is set for the whole process, by the names of `ComputeFacts`."""
    import torch

    with suppress_own():
        compute["cudnn_benchmark"] = bool(torch.backends.cudnn.benchmark)
        # Where the newer of torch's two interfaces has set it, the older one refuses to answer.
        compute["matmul_precision"] = torch.get_float32_matmul_precision()


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


def _is_plain(tensor: Tensor) -> bool:
    """Say whether a tensor is dense, real, no subclass of torch's, and lies in memory as its gradient does."""
    import torch

    grad = tensor.grad
    if grad is None or grad.is_sparse or not type(tensor.data) is type(grad) is torch.Tensor:
        return False
    dense = tensor.is_contiguous() or _is_channels_last(tensor)
    return dense and tensor.is_floating_point() and tensor.stride() == grad.stride() and tensor.dtype == grad.dtype


def _is_channels_last(weight: Tensor) -> bool:
    """Say whether a weight lies with its channels last and not, as with one channel, both ways."""
    import torch

    last = weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    return last and not weight.is_contiguous()
