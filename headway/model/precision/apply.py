"""'model.precision': named operators of a rank compute in bf16 or int8. Needs `--allow lossy`.

At the first forward of a model in training its operators are looked up by
name, without DDP's own prefix, and their products replaced:
parameters, keys and values of the state dict, norms,
softmax and losses stay. Ranks agree first: where one of them cannot do what
the plan says, none does, because ranks that differ from what was planned wait
for each other in another way.

    rank 0   {"fc1": "float32"}                 computes as before
    rank 1   {"fc1": "int8", "fc2": "bf16"}     the slow device

One phase of `headway model precision`: a script with all operators in one precision, for a few steps.

    steps   | warm-up | in sync (float32 only) | without sync: each rank at its own pace | operators one by one | end

Without sync (DDP's gradients stay on their rank) a rank's step is its own
work, waits excluded; the plain steps in sync are what is to be improved.
Statistics of inputs, weights and gradients come from at most 10 batches of
the float32 phase. Then each operator's forward and backward are timed alone,
on numbers of the shapes it had, and two all-reduces say what the link takes.
The phase ends with SystemExit(0) out of its last optimizer step; what was
measured is in RUN/phase/r<rank>-<pid>.json. Times are seconds.

Operators in fewer bits: products of named modules in bf16 or int8, everything around them as it was.

A lowered operator takes and returns what the original does, in its dtype;
parameters stay the float32 masters, and their gradients float32. bf16: both
sides are cast, multiplied, cast back. int8: the forward multiplies whole
numbers, the backward is bf16 with the quantised input, as in QSync:

    x [n, in]  one scale per row, max|x| / 127         w [out, in]  one scale per output, max|w| / 127
    y = (q_x q_w^T) s_x s_w^T + b                      products of int8 are summed in int32: exact

    dx = dy w        dw = dy^T (q_x s_x)               operands in bf16

>>> sorted(LOWERED)
['bf16', 'int8']
"""

from __future__ import annotations

import functools
import os
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from time import perf_counter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from headway.core.tables import suggestion
from headway.model.remedies import PrecisionParameters, PrecisionPhase
from headway.runtime.calls.patches import Undo
from headway.runtime.host.device import synchronize
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy
from headway.runtime.recorder.probes import write_json

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x [..., in] and w [out, in] -> [..., out]."""

UNITS = 32
"""A device's int8 product takes sizes that are multiples of 8, and more than 16 rows: both hold for multiples of 32."""


def bf16_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x w^T, multiplied in bf16, in the dtype of x."""
    return F.linear(x.bfloat16(), weight.bfloat16()).to(x.dtype)


def int8_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x w^T, multiplied in int8, in the dtype of x; the backward is bf16 (module docstring)."""
    product: torch.Tensor = _Int8Product.apply(x, weight)  # type: ignore[no-untyped-call]  # torch's own has no types
    return product


LOWERED: dict[str, Product] = {"bf16": bf16_product, "int8": int8_product}
"""Precision -> its product."""


@cache
def int8_works(device: str = "cpu") -> str:
    """Return why the int8 product does not work on a device; '' where it does. Tried once, on small numbers."""
    try:
        lhs = torch.arange(-16 * UNITS, 16 * UNITS, device=device).remainder(200).sub(100).view(UNITS, UNITS)
        product = torch._int_mm(lhs.to(torch.int8), lhs.t().to(torch.int8))
    except (AttributeError, RuntimeError) as cause:
        return f"this torch has no int8 product on {device}: {str(cause).splitlines()[0]}"
    exact = lhs.double() @ lhs.t().double()
    return "" if torch.equal(product.double(), exact) else f"the int8 product on {device} is not exact"


def quantised_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole numbers [n, k] int8 and the scale [n, 1] of each row, rounded to nearest; rows of zeros have 1."""
    scale = x.abs().amax(1, keepdim=True).float() / 127
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.round(x / scale).clamp_(-127, 127).to(torch.int8), scale


class _Int8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply whole numbers; keep the quantised input, a quarter of its bytes."""
        rows, scales = quantised_rows(x.reshape(-1, x.shape[-1]))
        columns, factors = quantised_rows(weight)
        ctx.save_for_backward(rows, scales, weight)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        whole_numbers = _multiplied(rows, columns)
        return (whole_numbers * scales * factors.t()).to(x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of both, multiplied in bf16."""
        rows, scales, weight = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, weight.shape[0]).bfloat16()
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = (gradient @ weight.bfloat16()).to(ctx.dtype).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            of_weight = (gradient.t() @ (rows * scales).bfloat16()).to(weight.dtype)
        return of_x, of_weight


def _multiplied(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return rows [n, k] times columns [m, k] transposed, int32; on a device padded to what its product takes."""
    n, m = rows.shape[0], columns.shape[0]
    if rows.device.type != "cpu":
        rows, columns = (
            F.pad(part_of, (0, -part_of.shape[1] % UNITS, 0, -part_of.shape[0] % UNITS)) for part_of in (rows, columns)
        )
    return torch._int_mm(rows, columns.t())[:n, :m]


DENIED = (
    nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.Softmax, nn.LogSoftmax, nn.Softmax2d,
    nn.modules.loss._Loss, nn.Embedding,
)  # fmt: skip
"""Modules that are never lowered: norms, softmax, losses; and look-ups, which multiply nothing."""


def cannot_lower(module: nn.Module, precision: str) -> str:
    """Return why a module is not computed in a precision; '' where it can be."""
    kind_name = type(module).__name__
    if isinstance(module, DENIED):
        return f"{kind_name} is never lowered: norms, softmax, losses and embeddings keep float32"
    if precision == "float32":
        return ""
    if precision == "int8" and isinstance(module, nn.Conv2d):
        return "convolutions are computed in bf16 or float32, not in int8"
    weights = [parameter for parameter in module.parameters(recurse=False) if parameter.dtype != torch.float32]
    if weights:
        return f"its weights are {weights[0].dtype}, not float32"
    device = next((parameter.device.type for parameter in module.parameters()), "cpu")
    return int8_works(device) if precision == "int8" else ""


def lower(module: nn.Module, precision: str) -> Undo:
    """Compute a module's products in a precision from now on; returns what takes it back, without a trace.

    A Linear's and a Conv2d's product; of any other module the `torch.matmul` calls of its own forward.
    """
    before = vars(module).get("forward")
    original = module.forward
    product, owner = LOWERED[precision], cast(Any, module)  # typed as what a module may have

    def linear(x: torch.Tensor) -> torch.Tensor:
        """Stand in for `Linear.forward`."""
        y = product(x, owner.weight)
        return y if owner.bias is None else y + owner.bias

    def convolution(x: torch.Tensor) -> torch.Tensor:
        """Stand in for `Conv2d.forward`, with its padding."""
        y: torch.Tensor = owner._conv_forward(x.bfloat16(), owner.weight.bfloat16(), None).to(x.dtype)
        return y if owner.bias is None else y + owner.bias[:, None, None]

    def products(*args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward with other products."""
        with _Matmuls(product):
            return original(*args, **kwargs)

    if type(module) is nn.Linear:
        forward: Callable[..., Any] = linear
    else:
        forward = convolution if type(module) is nn.Conv2d else products
    module.forward = forward

    def undo() -> None:
        """Put back what was there."""
        if before is not None:
            module.forward = before
        elif vars(module).get("forward") is forward:
            del module.forward

    return undo


MATMULS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm)
"""Calls that a module's own forward multiplies with."""


class _Matmuls(TorchFunctionMode):
    """Two activations multiplied: batches of matrices go one by one through the product."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the products of float32 matrices; everything else is as it was."""
        if func not in MATMULS or kwargs or any(x.dtype != torch.float32 or x.ndim < 2 for x in args):
            return func(*args, **(kwargs or {}))
        lhs, rhs = args
        if self.product is bf16_product:
            return func(lhs.bfloat16(), rhs.bfloat16()).to(lhs.dtype)
        batch = (lhs[..., 0, 0] + rhs[..., 0, 0]).shape
        pairs = zip(
            lhs.expand(*batch, *lhs.shape[-2:]).reshape(-1, *lhs.shape[-2:]),
            rhs.expand(*batch, *rhs.shape[-2:]).reshape(-1, *rhs.shape[-2:]),
            strict=True,
        )
        products = torch.stack([self.product(one_lhs, one_rhs.t()) for one_lhs, one_rhs in pairs])
        return products.view(*batch, lhs.shape[-2], rhs.shape[-1])


NAME = "model.precision"

PREFIXES = ("module.", "_orig_mod.")
"""What wrappers (DDP, torch.compile) put in front of a model's names."""


def precision(parameters: PrecisionParameters, context: Context) -> Applied | RefusedRemedy:
    """Install the remedy: it takes effect at the first forward in training."""
    script = _LoweredOperators(parameters.operators, context)
    script.removed = register_module_forward_pre_hook(context.hook(script.before_forward)).remove
    context.undos += [script.take_back, script.removed]
    return Applied(NAME, script.facts)


class _LoweredOperators:
    """The remedy in one process."""

    def __init__(self, plan: Mapping[str, Mapping[str, str]], context: Context) -> None:
        self.plan, self.context = plan, context
        self.facts: dict[str, Any] = {"operators": {}, "model": None}
        self.removed: Callable[[], None] = lambda: None
        self._undos: list[Callable[[], None]] = []
        self._decided = False

    def before_forward(self, module: nn.Module, _: Any) -> None:
        """Lower the operators of the first module that is called to train: the outermost one is called first."""
        if self._decided or not module.training or not torch.is_grad_enabled():
            return
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return
        self._decided = True
        self.removed()
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        rank = dist.get_rank() if ranks > 1 else 0
        operators = self.plan.get(str(rank), {})
        reason = _objection(module, operators) or self._unknown_rank(ranks)
        if ranks > 1:
            reasons: list[str] = [""] * ranks
            dist.all_gather_object(reasons, reason)
            reason = next((f"rank {other_rank}: {why}" for other_rank, why in enumerate(reasons) if why), "")
        if reason:
            self.context.fail(NAME, reason)
            return
        names = names_of(module)
        for name, bits in operators.items():
            if bits != "float32":
                self._undos.append(lower(names[name], bits))
        self.facts |= {"operators": dict(Counter(operators.values())), "model": type(module).__name__, "rank": rank}
        self.context.note(Applied(NAME, self.facts))

    def _unknown_rank(self, ranks: int) -> str:
        """Say whether the plan is for more ranks than there are."""
        beyond = [rank for rank in self.plan if int(rank) >= ranks]
        return f"the plan names rank {beyond[0]}, and the job has {ranks}. Make a plan of this job" if beyond else ""

    def take_back(self) -> None:
        """Give every operator its own products again."""
        while self._undos:
            self._undos.pop()()


def names_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by name, without the prefixes of wrappers."""
    names = {}
    for name, child in module.named_modules():
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        names[name] = child
    return names


def _objection(module: nn.Module, operators: Mapping[str, str]) -> str:
    """Return why the operators cannot be lowered; '' where all can."""
    names = names_of(module)
    for name, bits in operators.items():
        if name not in names:
            near = suggestion([key for key in names if key], name)[:300]
            return f"{type(module).__name__} has no operator {name!r}: the plan is for another model. {near}"
        why = cannot_lower(names[name], bits)
        if why:
            return f"{name} in {bits}: {why}"
    return ""


# A phase of `headway model precision`.

FOLDER = "phase"
"""Folder of a run folder that receives the measurements."""

MOST_BATCHES, REPEATS = 10, 7
"""Batches for statistics; times each operator is timed."""

LINK_NUMBERS = (1 << 12, 1 << 20)
"""Numbers of the two all-reduces."""


def measure(parameters: PrecisionPhase, context: Context) -> Applied:
    """Measure with all operators that can be lowered in one precision."""
    phase = _Phase(parameters, context)
    phase.removed = register_module_forward_pre_hook(context.hook(phase.before_forward)).remove
    context.patch("torch._tensor:Tensor.backward", phase.around_backward)
    context.listen(phase.stepped)
    context.undos.append(phase.removed)
    return Applied("measure.precision", parameters.to_json())


class _Phase:
    """The phase in one process."""

    def __init__(self, parameters: PrecisionPhase, context: Context) -> None:
        self.parameters, self.context = parameters, context
        self.removed: Callable[[], None] = lambda: None
        self.root: nn.Module | None = None
        self.modules: dict[str, nn.Module] = {}
        self.lacks: dict[str, str] = {}
        self.shapes: dict[str, tuple[torch.Size, torch.Size]] = {}
        self.sums: dict[str, dict[str, list[tuple[int, float, float]]]] = {}
        self.steps: list[tuple[float, float, float]] = []
        self._marks = [perf_counter()] * 3

    def before_forward(self, module: nn.Module, _: Any) -> None:
        """Find the model: the outermost module of the first forward in training; lower its operators."""
        if self.root is not None or not module.training or not torch.is_grad_enabled():
            return
        self.root = module
        for name, child in names_of(module).items():
            if type(child) not in (nn.Linear, nn.Conv2d):
                continue
            child.register_forward_hook(functools.partial(self._ran, name))
            reason = cannot_lower(child, self.parameters.precision)
            if reason:
                self.lacks[name] = reason
            elif self.parameters.precision != "float32":
                lower(child, self.parameters.precision)
            self.modules[name] = child

    def _ran(self, name: str, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        """Note shapes, in the order of the forward; and in the float32 phase statistics."""
        self.shapes[name] = (inputs[0].shape, output.shape)
        rows = self.sums.setdefault(name, {"input": [], "weight": [], "gradient": []})
        if self.parameters.precision != "float32" or len(rows["input"]) >= MOST_BATCHES or not output.requires_grad:
            return
        rows["input"].append(_figures(inputs[0]))
        rows["weight"].append(_figures(next(module.parameters())))
        hooked: Any = output  # `register_hook` has no types
        hooked.register_hook(lambda gradient: rows["gradient"].append(_figures(gradient)))

    def around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Note when backward begins and ends."""

        @functools.wraps(original)
        def backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            synchronize()
            self._marks[1] = perf_counter()
            result = original(tensor, *args, **kwargs)
            synchronize()
            self._marks[2] = perf_counter()
            return result

        return backward

    def stepped(self, _: int) -> int:
        """Note a step; after the last one measure the operators, write, and end the script."""
        synchronize()
        begin, forward_end, backward_end = self._marks
        end = perf_counter()
        self.steps.append((forward_end - begin, backward_end - forward_end, end - backward_end))
        done, chosen = len(self.steps), self.parameters
        if done >= chosen.warmup + chosen.in_sync and hasattr(self.root, "require_backward_grad_sync"):
            self.root.require_backward_grad_sync = False  # type: ignore[union-attr]  # DDP's, as its no_sync sets it
        if done >= chosen.warmup + chosen.in_sync + chosen.steps:
            self._write()
            raise SystemExit(0)
        self._marks[0] = perf_counter()
        return 1

    def _write(self) -> None:
        """Write what was measured."""
        first = self.parameters.warmup + self.parameters.in_sync
        in_sync = [sum(step) for step in self.steps[self.parameters.warmup : first]]
        distributed = dist.is_available() and dist.is_initialized()
        names = [name for name in self.shapes if name in self.modules]
        first_name = next(iter(self.shapes), "")
        timed = {
            name: alone_s(self.modules[name], *self.shapes[name], needs_input=name != first_name)
            for name in names if name not in self.lacks
        }  # fmt: skip
        write_json(f"{self.context.run}/{FOLDER}/r{self.context.rank}-{os.getpid()}.json", {
            "rank": dist.get_rank() if distributed else 0,
            "precision": self.parameters.precision,
            "names": names,
            "lacks": self.lacks,
            "forward_s": {name: pair[0] for name, pair in timed.items()},
            "backward_s": {name: pair[1] for name, pair in timed.items()},
            "bytes": {name: sum(p.nbytes for p in self.modules[name].parameters()) for name in names},
            "statistics": self.sums if self.parameters.precision == "float32" else {},
            "step_s": [statistics.median(column) for column in zip(*self.steps[first:], strict=True)],
            "in_sync_s": statistics.median(in_sync) if in_sync else None,
            "link": self._link() if distributed and dist.get_world_size() > 1 else [],
        })  # fmt: skip

    def _link(self) -> list[tuple[int, float]]:
        """Return bytes and seconds of two all-reduces; all ranks take the same steps, so all come here."""
        modules = list(self.modules.values())
        device = next(modules[0].parameters()).device if modules else torch.device("cpu")
        pairs = []
        for numel in LINK_NUMBERS:
            numbers, times = torch.zeros(numel, device=device), []
            for _ in range(REPEATS):
                dist.barrier()
                begin = perf_counter()
                dist.all_reduce(numbers)
                synchronize()
                times.append(perf_counter() - begin)
            pairs.append((4 * numel, statistics.median(times)))
        return pairs


def alone_s(
    module: nn.Module, of_input: torch.Size, of_output: torch.Size, *, needs_input: bool = True
) -> tuple[float, float]:
    """Return forward and backward of one operator alone, on random numbers of the shapes that it had, s.

    `needs_input` says whether the backward makes the gradient of its input.
    """
    device = next(module.parameters()).device
    x = torch.randn(of_input, device=device).requires_grad_(needs_input)
    gradient = torch.randn(of_output, device=device)
    sources = [*([x] if needs_input else []), *module.parameters()]
    forward, backward = [], []
    for _ in range(REPEATS):
        synchronize()
        begin = perf_counter()
        y = module.forward(x)
        synchronize()
        middle = perf_counter()
        torch.autograd.grad(y, sources, gradient)
        synchronize()
        forward.append(middle - begin)
        backward.append(perf_counter() - middle)
    return statistics.median(forward), statistics.median(backward)


def _figures(tensor: torch.Tensor) -> tuple[int, float, float]:
    """Return numbers, sum of squares, largest absolute value."""
    numbers = tensor.detach().float()
    return numbers.numel(), float(numbers.square().sum()), float(numbers.abs().max())
