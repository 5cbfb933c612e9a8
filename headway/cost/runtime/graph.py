"""The operators of a training step, traced without computing it.

The step is forward, backward and plain SGD. Torch traces it on tensors
without storage, below autograd, so the operators are those that eager mode
dispatches, backward ones included.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import flop_registry

from headway.core.errors import InputError
from headway.cost.learned.operators import Operator

RATE = 1e-3
"""Learning rate of the traced step; its value costs nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class StepGraph:
    """Operators of a step in the order of their calls, and who reads what."""

    calls: list[torch.fx.Node]
    """[n] Calls."""

    operators: list[Operator]
    """[n] The same as leaves."""

    src: list[int]
    """[e] Operator whose output is read ..."""

    dst: list[int]
    """[e] ... and the operator that reads it."""


def step_of(module: torch.nn.Module, inputs: tuple[Any, ...]) -> Callable[[], Any]:
    """Return a function that runs one step in eager mode: forward, backward, SGD."""
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)

    def step() -> None:
        optimizer.zero_grad()
        _loss(module(*inputs)).backward()  # type: ignore[no-untyped-call]  # torch has no type for it
        optimizer.step()

    return step


def graph_of(module: torch.nn.Module, inputs: tuple[Any, ...]) -> StepGraph:
    """Trace one step; raises `InputError` where torch cannot, or where it has no operator."""
    parameters = {name: value for name, value in module.named_parameters() if value.requires_grad}
    if not parameters:
        raise InputError("the graph is empty: the model has no parameter to train. Name a model that is trained.")

    def step(parameters: dict[str, torch.Tensor], inputs: tuple[Any, ...]) -> list[torch.Tensor]:
        loss = _loss(torch.func.functional_call(module, parameters, inputs))
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        pairs = zip(parameters.values(), gradients, strict=True)
        return [value.add(gradient, alpha=-RATE) for value, gradient in pairs if gradient is not None]

    try:
        traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(parameters, inputs)
    except Exception as error:  # whatever the model's own code raises
        raise InputError(
            f"the step cannot be traced: {str(error).splitlines()[0] if str(error) else error!r}. Make its operators "
            "independent of values."
        ) from error
    place: dict[torch.fx.Node, int] = {}
    graph = StepGraph([], [], [], [])
    for call in traced.graph.nodes:
        if call.op != "call_function":
            continue
        sources = {place[read] for read in call.all_input_nodes if read in place}
        if call.target is operator.getitem:  # one of several outputs: its operator's own
            place.update(dict.fromkeys([call], next(iter(sources))) if sources else {})
            continue
        place[call] = len(graph.calls)
        graph.calls.append(call)
        graph.operators.append(_leaf(call))
        graph.src.extend(sources)
        graph.dst.extend([place[call]] * len(sources))
    return graph


def materialised(call: torch.fx.Node) -> Callable[[], Any]:
    """Return a function that repeats the call on tensors of its shapes: normal numbers, indices 0."""

    def real(value: Any) -> Any:
        fake = value.meta.get("val")
        if not isinstance(fake, torch.Tensor):
            return fake
        # Strides of 0, of what is expanded, are kept: one number is filled in, and read many times.
        extent = 1 + sum((size - 1) * stride for size, stride in zip(fake.shape, fake.stride(), strict=True))
        storage = torch.zeros(max(extent, 1), dtype=fake.dtype)
        return (storage.normal_() if fake.is_floating_point() else storage).as_strided(fake.shape, fake.stride())

    arguments = torch.fx.node.map_arg(call.args, real)
    keywords = torch.fx.node.map_arg(call.kwargs, real)
    target: Any = call.target
    return lambda: target(*arguments, **keywords)


def _loss(output: Any) -> torch.Tensor:
    """Return a scalar to differentiate: the output itself, or its sum."""
    output = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(output, torch.Tensor):
        raise InputError(
            f"the model returns a {type(output).__name__}; it must return a tensor. Wrap it in one that does."
        )
    return output if output.ndim == 0 else output.sum()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _tensors(entry)


def _leaf(call: torch.fx.Node) -> Operator:
    target: Any = call.target
    read = [tensor for source in call.all_input_nodes for tensor in _tensors(source.meta.get("val"))]
    written = list(_tensors(call.meta.get("val")))
    counted = flop_registry.get(target.overloadpacket)
    flops = 0.0
    if counted is not None:

        def value_of(source: torch.fx.Node) -> Any:
            return source.meta.get("val")

        values, keywords = torch.fx.node.map_arg(call.args, value_of), torch.fx.node.map_arg(call.kwargs, value_of)
        flops = float(counted(*values, **keywords, out_val=call.meta.get("val")))
    kind = "pointwise" if torch.Tag.pointwise in target.tags else ""
    extents = [size for tensor in read[:3] for size in (*tensor.shape[:4], *[1] * (4 - min(tensor.ndim, 4)))]
    read_bytes, written_bytes = (
        float(sum(tensor.numel() * tensor.element_size() for tensor in tensors)) for tensors in (read, written)
    )
    precise = [tensor.dtype for tensor in (*written, *read) if tensor.is_floating_point()] or [torch.float32]
    dtype = str(precise[0]).removeprefix("torch.")
    return Operator(target.overloadpacket.__name__, kind, flops, read_bytes, written_bytes, tuple(extents), dtype)
