"""Floating-point operations of a model, counted from shapes: once, on copies that hold no numbers.

A multiply-add counts two; matrix products, convolutions, attention and recurrent layers count, elementwise work and
look-ups do not (PaLM, appendix B). The formulas are torch's own (`torch.utils.flop_counter`); recurrent layers, which
torch hides in one operator, are counted by their sizes:

    LSTM, GRU, RNN     2 x gates x hidden x (input + hidden)   for each token, direction and layer
    their backward     twice that: the gradients of inputs and of weights

Recomputed forwards (checkpointing) are no work of the model's and are left out: HFU counts them, MFU does not. They
are counted apart, as are the scores of attention that a script writes by hand: `CallCount`. Checkpointing that is not
reentrant stops behind the last tensor that the backward saved (`torch.utils.checkpoint.set_checkpoint_early_stop`).
"""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from headway.core.errors import InputError
from headway.runtime.script.stack_looks import lines_in_loops

GATES: dict[type[torch.nn.Module], int] = {torch.nn.LSTM: 4, torch.nn.GRU: 3, torch.nn.RNN: 1}
"""Recurrent layer -> products of a cell."""

Sizes = tuple[int, ...]
"""Sizes of a tensor."""

GENERATOR = "_checkpoint_without_reentrant_generator"
"""Torch's function around a checkpointed call that is not reentrant."""

EARLY_STOP = 5
"""Position of `early_stop` among the arguments of torch's generator of checkpoints; before torch 2.9 a flag alone."""

SHORTEST = 16
"""Softmaxes over fewer numbers are those of classes or small windows."""


@dataclass(slots=True)
class CallCount:
    """What one forward and backward of a model is made of, by shapes."""

    flops: int = 0
    """Floating-point operations."""

    recomputed_flops: int = 0
    """Those of forwards that the backward calls again: checkpointing. Not part of `flops`."""

    recomputed_bytes: int = 0
    """Bytes of all that these forwards make: what leaving checkpointing out takes at most, in the counted dtypes."""

    scores: int = 0
    """Elements of softmaxes over matrices of scores, which `scaled_dot_product_attention` would not write."""

    longest: int = 0
    """Longest row of them."""

    masked: int = 0
    """Those of `scores` of which some were masked."""

    repeats: int = 0
    """How often the forward calls the layer with parameters that it calls most often."""

    attentions: int = 0
    """Calls of `nn.MultiheadAttention`, which writes scores where it is asked for their means (`need_weights`)."""

    loops: dict[str, int] = field(default_factory=dict)
    """Line in a loop of the forward -> operators that it calls."""

    _filled: set[Sizes] = field(default_factory=set)

    _products: set[tuple[int, int]] = field(default_factory=set)
    """Elements and row lengths of products of two batches of matrices: what scores are; logits are one with weights."""

    def note_product(self, a: Sizes, b: Sizes, *_: object, **__: object) -> int:
        """Return the operations of a product of batches [n, i, k] and [n, k, j]; note its output."""
        n, i, k = a
        self._products.add((n * i * b[2], b[2]))
        return 2 * n * i * k * b[2]

    def note_masked_product(self, _: Sizes, a: Sizes, b: Sizes, *__: object, **___: object) -> int:
        """The same of a product that is added to a mask."""
        self._filled.add((*a[:-1], b[-1]))
        return self.note_product(a, b)

    def note_mask(self, x: Sizes, *_: object, out_shape: Sizes | None = None, **__: object) -> int:
        """Note that some of [..., queries, keys] were masked; it counts as no operation."""
        self._filled.add(tuple(out_shape or x))
        return 0

    def note_sum(self, x: Sizes, y: object, *_: object, out_shape: Sizes | None = None, **__: object) -> int:
        """Note a mask, or a bias of positions, that was added; a number that is added is none."""
        return self.note_mask(x, out_shape=out_shape) if isinstance(y, (tuple, list, torch.Size)) and len(y) > 1 else 0

    def note_softmax(self, x: Sizes, dim: int, *_: object, **__: object) -> int:
        """Note a softmax of scores [..., queries, keys]; it counts as no operation."""
        if (
            len(x) > 2
            and min(x[-2:]) >= SHORTEST
            and (math.prod(x), x[-1]) in self._products
            and dim in (-1, len(x) - 1)
        ):
            self.scores += math.prod(x)
            self.masked += math.prod(x) if tuple(x) in self._filled else 0
            self.longest = max(self.longest, x[-1])
        return 0

    def row(self) -> dict[str, object]:
        """Return the counts by name."""
        return {name: getattr(self, name) for name in self.__slots__ if not name.startswith("_")}


class _InLoops(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch says no types
    """Counts operators for the lines of the script that call them from inside of loops.

    A loop may call 50,000 of them: those that count no operations pass by the other modes, which take 0.3 ms each.
    """

    def __init__(self, count: CallCount, counts: Collection[object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor here
        self._loops, self._counts = count.loops, counts
        self._is_plain = functools.cache(self._plain)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        for line in set(lines_in_loops(sys._getframe(1))):
            self._loops[line] = self._loops.get(line, 0) + 1
        tensors = (value for value in args if isinstance(value, torch.Tensor))
        if kwargs or not self._is_plain(func) or any(value.device.type not in ("meta", "cpu") for value in tensors):
            return func(*args, **(kwargs or {}))
        with torch._C._DisableTorchDispatch():
            return func(*args)

    def _plain(self, func: torch._ops.OpOverload) -> bool:
        """Whether an operator computes nothing that is counted, on the tensors that it is given."""
        if not any(isinstance(argument.type, torch.TensorType) for argument in func._schema.arguments):
            return False
        is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(func._name, "CompositeImplicitAutograd")
        return not is_composite and func._overloadpacket not in self._counts


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch says no types
    """Adds up the bytes of what operators make while it is on; views make nothing."""

    def __init__(self, count: CallCount) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor here
        self._count = count

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            self._count.recomputed_bytes += sum(
                value.nbytes for value in tree_leaves(made) if isinstance(value, torch.Tensor)
            )
        return made


def count_flops(model: torch.nn.Module, *inputs: object) -> int:
    """Return the floating-point operations of one forward and backward of `model` on `inputs`.

    Neither the model nor the inputs are changed or computed with: a copy on the meta device, or under torch's fake
    tensors where an operator does not know that device, goes through the shapes. What needs no gradient (frozen
    parameters, inputs) costs no backward. Raises `InputError` where the model cannot run by shapes alone.
    """
    try:
        return counted(*_on_meta(model, inputs), {}).flops
    except Exception as cause:
        first = f"{type(cause).__name__}: {cause}".splitlines()[0]
    try:
        return counted(copy.deepcopy(model).cpu(), tuple(tree_map(_on_cpu, value) for value in inputs), {}).flops
    except Exception as cause:
        raise InputError(
            f"the operations of {type(model).__name__} cannot be counted: {first}; on the CPU {type(cause).__name__}: "
            f"{cause}. Give the inputs that its forward takes, as tensors."
        ) from None


def counted(model: torch.nn.Module, inputs: tuple[object, ...], named: Mapping[str, object]) -> CallCount:
    """Count one forward and backward of a model that nobody else uses, on these arguments."""
    recurrent, count = list[int](), CallCount()
    aten = torch.ops.aten
    counter: Any = FlopCounterMode(
        display=False,
        custom_mapping={
            aten.convolution_backward: _convolution_backward,
            aten.bmm: count.note_product,
            aten._softmax: count.note_softmax,
            aten.baddbmm: count.note_masked_product,
            **dict.fromkeys((aten.masked_fill, aten.masked_fill_, aten.where), count.note_mask),
            **dict.fromkeys((aten.add, aten.add_), count.note_sum),
        },
    )
    times: dict[int, int] = {}

    def called(layer: torch.nn.Module, _: object) -> None:
        if any(value is not None for value in layer._parameters.values()):
            times[id(layer)] = times.get(id(layer), 0) + 1
        count.attentions += isinstance(layer, torch.nn.MultiheadAttention)

    def operations() -> int:
        return int(counter.get_total_flops()) + sum(recurrent)

    with (_watched(model, operations, recurrent, count), counter, _InLoops(count, counter.flop_registry),
          torch.enable_grad()):  # fmt: skip
        hook = register_module_forward_pre_hook(called)
        try:
            results = list(_leaves(model(*inputs, **named)))
        finally:
            hook.remove()
        count.repeats = max(times.values(), default=0)
        _differentiate([value for value in results if isinstance(value, torch.Tensor) and value.requires_grad])
    count.flops = operations()
    return count


def _differentiate(results: list[torch.Tensor]) -> None:
    """Call every function of the graph behind the results once, with gradients that have the right shapes.

    Torch's engine would compute values as well, and its threads belong to one process: in a child that was forked
    beside a device it refuses to work, or starts a thread for each device.

        y = f(a, b)     f's gradient needs y's;  a's and b's functions follow once all that use them have been called
    """
    given: dict[Node, set[int]] = {}  # function -> indices of its outputs that have a gradient
    uses: dict[Node, int] = {}  # function -> functions still to be called whose gradient it waits for
    for value in results:
        if value.grad_fn is not None:
            given.setdefault(value.grad_fn, set()).add(value.output_nr)
    pending = list(given)
    visited = set(pending)
    while pending:
        for follower, _ in pending.pop().next_functions:
            if follower is not None:
                uses[follower] = uses.get(follower, 0) + 1
                if follower not in visited:
                    visited.add(follower)
                    pending.append(follower)
    ready = [function for function in given if not uses.get(function)]
    with torch.no_grad():
        while ready:
            function = ready.pop()
            reached = _call(function, given.pop(function, set()))
            for (follower, output), is_reached in zip(function.next_functions, reached, strict=True):
                if follower is None:
                    continue
                if is_reached:
                    given.setdefault(follower, set()).add(output)
                uses[follower] -= 1
                if not uses[follower]:
                    ready.append(follower)


def _call(function: Node, outputs: set[int]) -> list[bool]:
    """Call a function of the graph; return which of the functions that follow get a gradient by it.

    `outputs` are those of its outputs that have one.
    """
    followers = function.next_functions
    if not outputs or not followers:  # nothing reaches it, or it is a parameter
        return [False] * len(followers)
    called: Any = function
    blanks = [torch.empty(row.shape, dtype=row.dtype, device=row.device) for row in called._input_metadata]
    if getattr(function, "_forward_cls", None) is None:
        gradients = called(*(blank if index in outputs else None for index, blank in enumerate(blanks)))
        return [gradient is not None for gradient in (gradients if isinstance(gradients, tuple) else (gradients,))]
    # A function of the script's own knows no missing gradients, and answers for inputs that are no tensors, too.
    gradients = called.apply(*blanks)
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    of_inputs = (value for value, needed in zip(gradients, called.needs_input_grad, strict=False) if needed)
    return [follower is not None and next(of_inputs, None) is not None for follower, _ in followers]


def _convolution_backward(
    out_gradient: Sizes, x: Sizes, weight: Sizes, _bias: Any, _stride: Any, _padding: Any, _dilation: Any,
    transposed: bool, _output_padding: Any, _groups: int, output_mask: list[bool], **_: Any,
) -> int:  # fmt: skip
    """Return what the gradients of input and weight cost: each as much as the forward; torch forgets the groups."""
    positions = math.prod(x if transposed else out_gradient)
    return 2 * positions * math.prod(weight[1:]) * sum(output_mask[:2])


def _leaves(result: object, depth: int = 4) -> Iterator[object]:
    """Yield what a model returned: what containers hold, and the fields of classes, each in the other."""
    if isinstance(result, torch.Tensor) or not depth:
        yield result
    elif isinstance(result, (list, tuple, dict)):
        for value in result.values() if isinstance(result, dict) else result:
            yield from _leaves(value, depth - 1)
    else:
        slots = [name for name in getattr(type(result), "__slots__", ()) if hasattr(result, name)]
        for value in [*getattr(result, "__dict__", {}).values(), *(getattr(result, name) for name in slots)]:
            yield from _leaves(value, depth - 1)


@contextmanager
def _watched(
    model: torch.nn.Module, operations: Callable[[], int], recurrent: list[int], count: CallCount
) -> Iterator[None]:
    """Count recurrent layers by their sizes while the model runs, and no recomputed forward twice."""
    for layer in model.modules():
        for layer_class, gates in GATES.items():
            if type(layer) is layer_class:  # the model is a copy: nobody else calls it
                object.__setattr__(layer, "forward", _stand_in(layer, gates, recurrent))

    @contextmanager
    def again() -> Iterator[None]:
        before = operations()
        with _Made(count):
            yield
        count.recomputed_flops += operations() - before

    @contextmanager
    def until_saved(asked: object) -> Iterator[None]:
        """Count what is computed again: it ends where the last tensor that the backward needs has been saved."""
        is_enabled = torch.utils.checkpoint._enable_checkpoint_early_stop
        stops = is_enabled if is_enabled is not None else asked
        before = done = operations()

        def saved(value: torch.Tensor) -> torch.Tensor:
            nonlocal done
            done = operations()  # an operator saves its inputs before it computes
            return value

        with _Made(count), saved_tensors_hooks(saved, lambda value: value):
            yield
        count.recomputed_flops += (operations() if stops is False else done) - before

    with checkpoints_as(again, until_saved):
        yield


@contextmanager
def checkpoints_as(
    reentrant: Callable[[], AbstractContextManager[object]],
    plain: Callable[[object], AbstractContextManager[object]],
) -> Iterator[None]:
    """Have torch's checkpointing, by whatever name a script calls it, compute once and remember all that it saves.

    A checkpointed function runs within `reentrant()`, or within `plain(early_stop)` where it is not reentrant.
    """

    class Straight:
        @staticmethod
        def apply(function: Callable[..., object], _preserve: bool, *arguments: object) -> object:
            with reentrant():
                return function(*arguments)

    def generator(*settings: object, early_stop: object = True, **_: object) -> Iterator[None]:
        with plain(settings[EARLY_STOP] if len(settings) > EARLY_STOP else early_stop):
            yield

    module = vars(torch.utils.checkpoint)
    names = dict.fromkeys((GENERATOR, f"{GENERATOR}_impl"), generator)  # from torch 2.14 on it is the second one
    before = {name: module[name] for name in ("CheckpointFunction", *names) if name in module}
    module.update({name: {"CheckpointFunction": Straight, **names}[name] for name in before})
    try:
        yield
    finally:
        module.update(before)


def _stand_in(layer: Any, gates: int, recurrent: list[int]) -> Callable[..., Any]:
    """Return a forward of a recurrent layer that multiplies nothing: shapes and gradients of the layer's own.

    torch computes it by one operator here and by many there; its operations are added to `recurrent` by their sizes.
    """

    def forward(given: Any, states: Any = None) -> Any:
        packed = isinstance(given, PackedSequence)
        x = given.data if packed else given
        hidden, ways = layer.hidden_size, 2 if layer.bidirectional else 1
        carried = getattr(layer, "proj_size", 0) or hidden  # what a cell hands to the next one
        widths = [layer.input_size, *[ways * carried] * (layer.num_layers - 1)]
        cell = sum(2 * gates * hidden * (width + carried) for width in widths)
        cell += layer.num_layers * (2 * hidden * carried if carried != hidden else 0)
        learns = any(weight.requires_grad for weight in layer.parameters())
        # The gradient of the first layer's input costs nothing where nobody asks for it.
        spared = 0 if x.requires_grad else 2 * gates * hidden * layer.input_size
        tokens = x.numel() // max(1, x.shape[-1])
        recurrent.append(tokens * ways * (cell + (2 * cell - spared if learns or x.requires_grad else 0)))
        bound = sum(weight.sum() for weight in layer.parameters()) * 0
        out = (x.sum(-1, keepdim=True) * 0 + bound).expand(*x.shape[:-1], ways * carried)
        batch = [] if x.dim() == 2 and not packed else [given.batch_sizes[0]] if packed else [_batch(layer, x)]
        state = (out.sum() * 0).expand(ways * layer.num_layers, *map(int, batch), carried)
        last = (state, state.sum().expand(*state.shape[:-1], hidden)) if gates == GATES[torch.nn.LSTM] else state
        return (given._replace(data=out) if packed else out), last

    return forward


def _batch(layer: Any, x: torch.Tensor) -> int:
    return int(x.shape[0 if layer.batch_first else 1])


def _on_meta(model: torch.nn.Module, inputs: tuple[object, ...]) -> tuple[torch.nn.Module, tuple[object, ...]]:
    """Return copies without numbers: parameters keep whether they learn, and stay tied."""
    names = {id(value): value for value in (*model.parameters(), *model.buffers())}
    blank: dict[int, torch.Tensor] = {}
    for key, value in names.items():
        empty = torch.empty_like(value, device="meta")
        blank[key] = (
            torch.nn.Parameter(empty, requires_grad=value.requires_grad)
            if isinstance(value, torch.nn.Parameter)
            else empty
        )
    twin = copy.deepcopy(model, dict(blank))
    return twin, tuple(tree_map(_to_meta, value) for value in inputs)


def _to_meta(value: object) -> object:
    return value.detach().to("meta").requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _on_cpu(value: object) -> object:
    return value.detach().cpu().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
