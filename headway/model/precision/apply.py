"""'model.precision': named operators of a rank compute in bf16 or int8. Needs `--allow lossy`.

At the first forward of a model in training its operators are looked up by
name, without DDP's own prefix, and their products replaced
(`torch_operators`): parameters, keys and values of the state dict, norms,
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
"""

from __future__ import annotations

import functools
import os
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from headway.core.tables import suggestion
from headway.model.precision.torch_operators import cannot_lower, lower
from headway.model.remedies import PrecisionParameters, PrecisionPhase
from headway.runtime.host.device import synchronize
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy
from headway.runtime.recorder.probes import write_json

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
