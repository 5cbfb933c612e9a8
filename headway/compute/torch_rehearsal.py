"""What a model's own step takes behind an edit, timed on a CPU in a forked child that ends behind it.

The child has a copy of the script's memory, so the model itself is called on the script's own batch, forward and
backward, with the edit and without, turn and turn about:

    as it is | bfloat16 | channels last | as it is | bfloat16 | ...      CPU time of one thread, a ratio for each round

A batch is cut to the examples that compute for `STEP_S`, so that all of it takes a few tenths of a second. Models of
which two examples take long are left out, as are those that meet other ranks in their backward.
"""

from __future__ import annotations

import gc
import signal
import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from time import thread_time
from types import SimpleNamespace
from typing import NamedTuple, cast

import torch
from torch.utils._pytree import tree_leaves, tree_map

from headway.compute.by_hand import REPEATS
from headway.compute.torch_flops import checkpoints_as
from headway.compute.torch_forward import computes_bfloat16

STEP_S = 0.04
"""CPU time of one rehearsed step, at most about."""

LONGEST_S, LIMIT_S = 0.1, 1.0
"""A model whose smallest step takes longer is not rehearsed, and nothing goes on behind so much CPU time in all."""

BUDGET_S, ROUNDS = 0.4, (3, 5)
"""CPU time of all rounds, about, and how many there are: fewest, most. One more before them does not count."""

WHOLE_S = 0.3
"""A step of the whole batch that seems to take longer is not timed."""

FEWEST, SMALL = 2, 8
"""Examples of the smallest step (norms over a batch refuse one), and those up to which a batch may be too small."""


class Spared(NamedTuple):
    """Parameters of a model whose gradients may be needless: those that no optimizer has, or else all."""

    parameters: tuple[torch.nn.Parameter, ...] = ()
    are_all: bool = False
    """Whether each has an optimizer, of several: the gradients of one model may come with those of another."""

    @classmethod
    def of(cls, model: torch.nn.Module) -> Spared:
        """Return them, by the optimizers that live in this process."""
        optimizers = [value for value in gc.get_objects() if issubclass(type(value), torch.optim.Optimizer)]
        updated = {id(value) for one in optimizers for group in one.param_groups for value in group["params"]}
        learning = tuple(value for value in model.parameters() if value.requires_grad)
        outside = tuple(value for value in learning if id(value) not in updated)
        if outside or len(optimizers) < 2:
            return cls(outside if optimizers else ())
        return cls(learning, are_all=True)

    def step_s(self, model: torch.nn.Module, call: TimedCall) -> float:
        """Return the CPU time of a forward and backward without their gradients."""
        for value in self.parameters:
            value.requires_grad_(False)
        try:
            return _step_s(model, call)
        finally:
            for value in self.parameters:
                value.requires_grad_()


class TimedCall(NamedTuple):
    """A call of a model, with all that its tensors of examples hold."""

    args: tuple[object, ...]
    kwargs: dict[str, object]
    num_examples: int

    def of(self, change: Callable[[torch.Tensor], torch.Tensor], times: float = 1) -> TimedCall:
        """Return the call with `change` made to what has an entry for each example, `times` as many behind it."""

        def changed(value: object) -> object:
            is_batch = isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == self.num_examples
            return change(value) if is_batch and isinstance(value, torch.Tensor) else value

        examples = round(times * self.num_examples)
        return TimedCall(tree_map(changed, self.args), tree_map(changed, self.kwargs), examples)


def rehearse(
    model: torch.nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], spared: Spared | None = None
) -> dict[str, object] | None:
    """Return the fields of `Rehearsed`; None for models that are compiled or elsewhere. Raises what they do."""

    def end(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        return _rehearsed(model, args, kwargs, spared or Spared())
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _rehearsed(
    model: torch.nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], spared: Spared
) -> dict[str, object] | None:
    parameters = list(model.parameters())
    tensors = [value for value in tree_leaves((args, dict(kwargs))) if isinstance(value, torch.Tensor) and value.dim()]
    elsewhere = any(value.device.type != "cpu" for value in (*parameters, *tensors))
    meets = torch.distributed.is_available() and torch.distributed.is_initialized()
    compiled = any(hasattr(child, "_orig_mod") or child._compiled_call_impl is not None for child in model.modules())
    if not tensors or elsewhere or meets or compiled:
        return None
    full = TimedCall(args, dict(kwargs), len(tensors[0]))
    call = _cut(full, FEWEST)
    step_s = min(_step_s(model, call) for _ in range(3))  # the first ones meet cold memory
    if step_s > LONGEST_S:
        return None
    for _ in range(3):
        if 2 * step_s > STEP_S or call.num_examples == full.num_examples:
            break
        call = _cut(full, int(call.num_examples * STEP_S / step_s))
        step_s = _step_s(model, call)
    forms, first_s = _forms(model, call, full.num_examples, spared), 0.0
    for name, form in list(forms.items()):
        try:
            first_s += form() + step_s
        except TimeoutError:
            raise
        except Exception:  # views or autograd functions of the model do not bear the edit
            del forms[name]
    ratios: dict[str, list[float]] = {name: [] for name in forms}
    taken_s = list[float]()
    for _ in range(min(max(int(BUDGET_S / max(first_s, 1e-9)), ROUNDS[0]), ROUNDS[1])):
        before_s = _step_s(model, call)
        for name, form in forms.items():
            edited_s, behind_s = form(), _step_s(model, call)
            ratios[name].append(2 * edited_s / (before_s + behind_s))
            before_s = behind_s
        taken_s.append(before_s)
    edits = {name: sorted(rows) for name, rows in ratios.items() if rows}
    spans = {name: (rows[0], statistics.median(rows), rows[-1]) for name, rows in edits.items()}
    whole_s = _whole_s(model, call, full, min(taken_s))
    return {"examples": call.num_examples, "batch": full.num_examples, "edits": spans, "step_s": whole_s}


def _whole_s(model: torch.nn.Module, call: TimedCall, full: TimedCall, step_s: float) -> float | None:
    """Return the CPU time of a step of the whole batch, of which a `call` takes `step_s`; None where that is long.

    It is timed, and not reckoned in proportion: gradients of weights cost as much for few examples. It never takes
    longer than in proportion, which says how many examples may be timed next.
    """
    while call.num_examples < full.num_examples:
        times = int(WHOLE_S / step_s)
        if times < 2:
            return None
        call = _cut(full, times * call.num_examples)
        step_s = min(_step_s(model, call) for _ in range(2))  # the first one meets cold memory
    return step_s


def _cut(call: TimedCall, limit: int) -> TimedCall:
    size = min(limit, call.num_examples)
    return call.of(lambda value: value[:size], size / call.num_examples)


def _step_s(model: torch.nn.Module, call: TimedCall) -> float:
    """Return the CPU time of one forward and backward."""
    begin = thread_time()
    results = [value for value in tree_leaves(model(*call.args, **call.kwargs)) if isinstance(value, torch.Tensor)]
    results = [value for value in results if value.requires_grad]
    if results:
        torch.autograd.backward(cast(torch.Tensor, _Loss.apply(*results)))  # type: ignore[no-untyped-call]  # torch says no types
    taken_s = thread_time() - begin
    model.zero_grad()
    return taken_s


class _Loss(torch.autograd.Function):
    """A loss whose gradients are ones.

    Gradients that are given to `backward` have torch import sympy, which takes a second: most of what there is.
    """

    @staticmethod
    def forward(ctx: SimpleNamespace, *results: torch.Tensor) -> torch.Tensor:
        """Return a number that stands for all results."""
        ctx.results = [(value.shape, value.dtype) for value in results]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: SimpleNamespace, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return ones for each result."""
        return tuple(torch.ones(shape, dtype=dtype) for shape, dtype in ctx.results)


def _forms(model: torch.nn.Module, call: TimedCall, batch_size: int, spared: Spared) -> dict[str, Callable[[], float]]:
    """Return name of an edit -> what times a step with it, of those that may be for this model."""
    forms, parameters = dict[str, Callable[[], float]](), list(model.parameters())
    weights, default = [value for value in parameters if value.dim() == 4], torch.get_default_dtype()

    def in_bfloat16() -> float:
        with torch.autocast("cpu", torch.bfloat16):
            return _step_s(model, call)

    def in_float32() -> float:
        model.float()
        torch.set_default_dtype(torch.float32)
        try:
            return _step_s(model, call.of(lambda value: value.float() if value.is_floating_point() else value))
        finally:
            model.double()
            torch.set_default_dtype(default)

    def last(value: torch.Tensor) -> torch.Tensor:
        return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value

    def with_channels_last() -> float:
        _lay(weights, torch.channels_last)
        try:
            return _step_s(model, call.of(last))
        finally:
            _lay(weights, torch.contiguous_format)

    def larger() -> float:
        many = call.of(lambda value: torch.cat([value] * REPEATS), REPEATS)
        return _step_s(model, many) / REPEATS

    def without_checkpoints() -> float:
        calls: list[object] = []

        def noted(*settings: object) -> AbstractContextManager[None]:
            calls.append(settings)
            return nullcontext()

        with checkpoints_as(noted, noted):
            taken_s = _step_s(model, call)
        if not calls:
            raise LookupError("the model checkpoints nothing")
        return taken_s

    def unchecked() -> float:
        with torch.autograd.set_detect_anomaly(False):
            return _step_s(model, call)

    def needing(value: torch.Tensor) -> torch.Tensor:
        return value.detach().requires_grad_() if value.is_floating_point() else value

    if spared.parameters:
        forms["frozen"] = lambda: spared.step_s(model, call)
    if spared.are_all:
        forms["given"] = lambda: spared.step_s(model, call.of(needing))
    if torch.is_anomaly_enabled():
        forms["unchecked"] = unchecked
    forms["straight"] = without_checkpoints
    dtypes = {value.dtype for value in parameters}
    if dtypes == {torch.float64}:
        forms["float32"] = in_float32
    if dtypes == {torch.float32} and not torch.is_autocast_enabled("cpu") and computes_bfloat16():
        forms["bfloat16"] = in_bfloat16
    if weights and all(value.is_contiguous() for value in weights):
        forms["channels_last"] = with_channels_last
    if call.num_examples == batch_size <= SMALL:
        forms["batch"] = larger
    return forms


def _lay(weights: list[torch.nn.Parameter], layout: torch.memory_format) -> None:
    for weight in weights:
        weight.data = weight.data.contiguous(memory_format=layout)
