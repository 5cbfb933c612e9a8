"""Measures a host's operators in steps of small made-up models: perceptrons, convolutional nets, transformers.

The published predictor of a new device's latencies, trained on the other devices and on the device's own samples.

After *CDMPP* (arXiv 2311.09690): leaves pass a transformer encoder that all samples share, then a flattening layer of
their leaf count; a second branch reads the device; both are added and decoded. Labels are Box-Cox transformed, the loss
is 1000 * MSE + MAPE, and the embeddings of source and target samples are drawn together by the central moment
discrepancy. Differences: a device without a data sheet is one-hot, and the sizes are those of two CPU cores. It is a
peer of the predictors in numpy; nothing chooses it by default.
"""

from __future__ import annotations

import copy
import logging
import math
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
from headway.cost.cost_table import MeasuredHost, MeasuredModel, Operator
from headway.cost.predictors import Floats, TransferTask, box_cox, box_cox_inverse, box_cox_power

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


WIDTH, LAYERS, HEADS, BATCH, NETWORK_RATE = 32, 2, 4, 128, 2e-3
"""Sizes of the encoder, examples of a step, Adam's learning rate at the start of each phase."""

SOURCE_STEPS, TARGET_STEPS = 1500, 150
"""Steps on the sources alone, then with the target's samples."""

MOMENTS = 5
"""Highest order that the discrepancy compares (K)."""

PULL = 0.1
"""Weight of the discrepancy in the loss of the second phase."""


class LeafEncoder(nn.Module):
    """Encodes [b, leaves, kinds] leaves; those that are alike differ by their place in the order of the tree only."""

    place: torch.Tensor
    """[leaves, WIDTH] Sines and cosines of the place, added to a leaf."""

    def __init__(self, leaves: int, kinds: int) -> None:
        super().__init__()
        self.leaf = nn.Linear(kinds, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        angle = torch.arange(leaves)[:, None] * torch.exp(-math.log(1e4) * torch.arange(0, WIDTH, 2) / WIDTH)
        self.register_buffer("place", torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1))

    def forward(self, leaves: torch.Tensor) -> torch.Tensor:
        """Return [b, leaves, WIDTH]."""
        encoded: torch.Tensor = self.encoder(self.leaf(leaves) + self.place)
        return encoded


class _Network(nn.Module):
    """Predicts [b] labels of samples on [b] devices."""

    def __init__(self, leaves: int, kinds: int, devices: int) -> None:
        super().__init__()
        # One flattening layer per leaf count in the paper; all samples of a table have the same.
        self.embedding = nn.Sequential(LeafEncoder(leaves, kinds), nn.Flatten(), nn.Linear(leaves * WIDTH, 2 * WIDTH))
        self.device = nn.Sequential(nn.Linear(devices, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 2 * WIDTH))
        self.decoder = nn.Sequential(nn.ReLU(), nn.Linear(2 * WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 1))

    def forward(self, embedding: torch.Tensor, device: torch.Tensor) -> torch.Tensor:
        label: torch.Tensor = self.decoder(embedding + self.device(device))
        return label.squeeze(1)


class Trained:
    """A network that knows the sources; every new device starts from a copy of it."""

    def __init__(self, task: TransferTask) -> None:
        """Train on `task.source_s`; leaves at the end that no sample has (padding) are dropped."""
        leaves = torch.from_numpy(task.one_hot.reshape(len(task.one_hot), task.num_leaves, -1)).float()
        used = leaves.any(dim=2).any(dim=0).nonzero()
        self._leaves = leaves[:, : int(used.max()) + 1 if len(used) else 1]
        self._power = box_cox_power(task.source_s.ravel())
        labels = box_cox(task.source_s, self._power)
        self._low, self._span = float(labels.min()), max(float(np.ptp(labels)), 1e-12)
        self._source = self._label(task.source_s)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(task.seed)
            self._model = _Network(self._leaves.shape[1], self._leaves.shape[2], len(task.source_s) + 1)
        self._train(self._model, SOURCE_STEPS, stream(task.seed, "network", "sources"))

    def seconds(self, task: TransferTask) -> Floats:
        """Train a copy on with the samples of the new device; return [n] its seconds."""
        model = copy.deepcopy(self._model)
        mine = torch.from_numpy(task.chosen), self._label(task.measured_s)
        self._train(model, TARGET_STEPS, stream(task.seed, "network", "target"), mine)
        with torch.no_grad():
            device = torch.eye(len(self._source) + 1)[-1].expand(len(self._leaves), -1)
            found = model(model.embedding(self._leaves), device).double().numpy()
        return box_cox_inverse((found - 0.5) * self._span + self._low, self._power)

    def _label(self, seconds: Floats) -> torch.Tensor:
        """Return labels between 0.5 and 1.5 on the sources: a relative error needs labels above 0."""
        return torch.from_numpy((box_cox(seconds, self._power) - self._low) / self._span + 0.5).float()

    def _train(
        self,
        model: _Network,
        steps: int,
        rng: np.random.Generator,
        mine: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Take `steps` on the sources, and on the new device's samples (indices, labels) where they are given."""
        devices = torch.eye(len(self._source) + 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=NETWORK_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            which, rows = (torch.from_numpy(rng.integers(n, size=BATCH)) for n in self._source.shape)
            there = model.embedding(self._leaves[rows])
            loss = _network_loss(model(there, devices[which]), self._source[which, rows])
            if mine is not None:
                chosen, label = mine
                drawn = torch.from_numpy(rng.integers(len(chosen), size=min(BATCH, len(chosen))))
                here = model.embedding(self._leaves[chosen[drawn]])
                own = _network_loss(model(here, devices[-1].expand(len(drawn), -1)), label[drawn])
                loss = loss + own + PULL * _discrepancy(there, here)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no type for it
            optimizer.step()
            schedule.step()


def _network_loss(predicted: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    error = predicted - label
    return 1000 * error.square().mean() + (error / label).abs().mean()


def _discrepancy(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return |difference of the means| + sum over k = 2 .. `MOMENTS` of |difference of the k-th central moments|.

    Of [n, d] and [m, d] embeddings; norms are Euclidean (Zellinger et al., arXiv 1702.08811, without its ranges).
    """
    means = [each.mean(0) for each in (source, target)]
    centred = [each - mean for each, mean in zip((source, target), means, strict=True)]
    total: torch.Tensor = torch.linalg.vector_norm(means[0] - means[1])
    for order in range(2, MOMENTS + 1):
        first, second = (each.pow(order).mean(0) for each in centred)
        total = total + torch.linalg.vector_norm(first - second)
    return total
