"""Measures a host's operators in steps of small made-up models: perceptrons, convolutional nets, transformers."""

from __future__ import annotations

import logging
import operator
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from headway.core.errors import InputError
from headway.core.rng import stream
from headway.cost.learned.cost_table import MeasuredHost, MeasuredModel
from headway.cost.learned.operators import Operator

logger = logging.getLogger(__name__)

# The operators of a training step, traced without computing it.
#
# The step is forward, backward and plain SGD. Torch traces it on tensors
# without storage, below autograd, so the operators are those that eager mode
# dispatches, backward ones included.

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


OPERATOR_S, STEP_S = 0.01, 0.15
"""Seconds for which an operator, and a step, is repeated."""

SPREAD = 0.5
"""Median less quiet time, over the latter, above which an operator is repeated, three times as long, then dropped."""


class _Language(nn.Module):
    """A transformer that predicts tokens."""

    def __init__(self, tokens: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        blocks = [nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True) for _ in range(layers)]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width, tokens)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def here(threads: int) -> MeasuredHost:
    """Give operators of this process so many threads; return what a table measured by it says of itself."""
    torch.set_num_threads(threads)
    facts = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    names = [line.partition(":")[2].strip() for line in facts.splitlines() if line.startswith("model name")]
    cpu = f"{names[0] if names else platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"
    return MeasuredHost(platform.node(), str(torch.__version__), torch.get_num_threads(), cpu)


def made_model(number: int, seed: int = 0, *, dtype: str = "float32") -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return model `number` and inputs, both in `dtype`: kinds take turns, sizes are log-uniform."""
    module, inputs = _made(number, seed)
    precision: torch.dtype = getattr(torch, dtype)
    return module.to(precision), tuple(x.to(precision) if x.is_floating_point() else x for x in inputs)


def _made(number: int, seed: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    rng = stream(seed, "calibration", number)

    def drawn(low: int, high: int) -> int:
        return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))

    batch = drawn(4, 32)
    if number % 3 == 0:
        width = drawn(64, 768)
        hidden = [
            layer for _ in range(drawn(1, 3)) for layer in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        ]
        return nn.Sequential(*hidden, nn.Linear(width, 10)), (torch.randn(8 * batch, width),)
    if number % 3 == 1:
        size, layers, before = drawn(16, 48), [], 3
        for depth in range(drawn(2, 4)):
            channels, kernel = drawn(8, 48), (1, 3, 3)[int(rng.integers(3))]
            convolution = nn.Conv2d(before, channels, kernel, padding=kernel // 2, bias=False)
            layers += [convolution, nn.BatchNorm2d(channels), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if depth == 0 else []
            before = channels
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)]
        return nn.Sequential(*layers, *head), (torch.randn(batch, 3, size, size),)
    heads, tokens = drawn(2, 6), drawn(256, 4000)
    model = _Language(tokens, heads * 2 * drawn(8, 24), heads, drawn(1, 2))
    return model, (torch.randint(0, tokens, (batch // 2 + 1, drawn(16, 96))),)


def measure(number: int, module: nn.Module, inputs: tuple[Any, ...], *, dtype: str = "float32") -> MeasuredModel:
    """Time each different operator of a step alone, and the step, of a model in `dtype`."""
    graph = graph_of(module, inputs)
    calls = Counter(graph.operators)
    kept: dict[Operator, float] = {}
    samples = dict(zip(graph.operators, graph.calls, strict=True))
    step = step_of(module, inputs)
    rounds = [quiet_s(step, STEP_S, limit=float("inf"))]  # and one behind the operators: the quieter one counts
    with torch.no_grad():
        for leaf, sample in samples.items():
            seconds = quiet_s(materialised(sample), OPERATOR_S)
            if seconds is not None:
                kept[leaf] = seconds
    rounds.append(quiet_s(step, STEP_S, limit=float("inf")))
    step_s = min(seconds for seconds in rounds if seconds is not None)
    return MeasuredModel(
        number,
        step_s,
        list(kept),
        list(kept.values()),
        [calls[leaf] for leaf in kept],
        len(samples) - len(kept),
        dtype,
    )


NOW_S = 2.0
"""Seconds that a prediction may take to measure what its table lacks."""


class _CallTimes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no type for it
    """Seconds of each call of some operators, in the order of their calls; ends the step where time is up."""

    def __init__(self, names: set[str], end: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no type for it
        self.names, self.end, self.seconds = names, end, dict[str, list[float]]()

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:  # fmt: skip
        cpu, begin = time.thread_time(), time.perf_counter()
        result = func(*args, **(kwargs or {}))
        wall_s, cpu_s = time.perf_counter() - begin, time.thread_time() - cpu
        if (name := func.overloadpacket.__name__) in self.names:
            self.seconds.setdefault(name, []).append(min(wall_s, cpu_s) if torch.get_num_threads() == 1 else wall_s)
        if begin + wall_s > self.end:
            raise TimeoutError
        return result


def measured_now(
    module: nn.Module, inputs: tuple[object, ...], graph: StepGraph, lacking: list[Operator], budget_s: float = NOW_S
) -> dict[Operator, float]:
    """Return seconds of the operators that a table lacks, timed in steps of the model itself; those that time allows.

    Not repeated alone, as calibrations do it: some read buffers that only their forward operator can fill. The first
    step warms up; of the others each call counts with its shortest time. Nothing is returned where a step fails.
    """
    names, steps, end = {op.name for op in lacking}, list[dict[str, list[float]]](), time.perf_counter() + budget_s
    step = step_of(module, inputs)
    try:
        while lacking and (len(steps) < 2 or time.perf_counter() < end) and len(steps) < 10:
            with _CallTimes(names, end) as times:
                step()
            steps.append(times.seconds)
    except Exception as error:  # the script's own code, or TimeoutError
        logger.debug("the step ended early: %r", error)
    measured: dict[Operator, list[float]] = {}
    for name in names & set(steps[-1] if steps else ()):
        traced = [op for op in graph.operators if op.name == name]
        rounds = [calls[name] for calls in steps[1:] or steps if len(calls.get(name, ())) == len(traced)]
        for op, *seconds in zip(traced, *rounds, strict=True) if rounds else ():
            measured.setdefault(op, []).append(min(seconds))
    return {op: statistics.median(measured[op]) for op in lacking if op in measured}


def quiet_s(call: Callable[[], Any], budget_s: float, *, limit: float = SPREAD) -> float | None:
    """Return the seconds of a call, after two others, that a tenth of the calls keep below; None where noisy twice.

    A tenth, not half: on shared cores the others measure what else runs. A single thread is not charged for the time
    in which another process had its core: a long step would hold some of it in every call.
    """
    alone = torch.get_num_threads() == 1
    for budget in (budget_s, 3 * budget_s):
        call()
        call()
        taken: list[float] = []
        end = time.perf_counter() + budget
        while len(taken) < 10 or (time.perf_counter() < end and len(taken) < 100):
            cpu, begin = time.thread_time(), time.perf_counter()
            call()
            wall_s, cpu_s = time.perf_counter() - begin, time.thread_time() - cpu
            taken.append(min(wall_s, cpu_s) if alone else wall_s)  # reading the clock of a thread takes half a us
        quiet, middle = statistics.quantiles(taken, n=10)[0], statistics.median(taken)
        if middle - quiet <= limit * quiet:
            return quiet
    return None
