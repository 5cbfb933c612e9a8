"""The operations of a call that a recorded script has made: counted from its shapes, in a forked child of its process.

The child has a copy of the script's memory and ends behind the count, so the model itself is emptied: its parameters,
buffers and other tensors become tensors of the meta device, which have shapes and no numbers. What the forward makes
or moves then follows them, and nothing can reach a device, whose driver a forked process may not touch:

    model(x)  ->  FollowsMeta   devices and dtypes that the script names become meta and float32
              ->  torch         shapes, dtypes, what needs a gradient
              ->  OffDevices    an operator that asks for a device all the same ends the count

Precision is left out, because operations are counted alike in all: casts and autocast do nothing.

What a model's own step takes behind an edit, timed on a CPU in a forked child that ends behind it.

The child has a copy of the script's memory, so the model itself is called on the script's own batch, forward and
backward, with the edit and without, turn and turn about:

    as it is | bfloat16 | channels last | as it is | bfloat16 | ...      CPU time of one thread, a ratio for each round

A batch is cut to the examples that compute for `STEP_S`, so that all of it takes a few tenths of a second. Models of
which two examples take long are left out, as are those that meet other ranks in their backward.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import thread_time
from typing import Any, NamedTuple, cast

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from headway.compute.by_hand import REPEATS
from headway.compute.torch_flops import checkpoints_as, counted
from headway.compute.torch_forward import computes_bfloat16

STEP_S = 0.04
"""CPU time of one rehearsed step, at most about."""

LONGEST_S, LIMIT_S = 0.1, 1.0
"""A model whose smallest step takes longer is not rehearsed, and nothing goes on behind so much CPU time in all."""

BUDGET_S, ROUNDS = 0.4, (3, 5)
"""CPU time of all rounds, about, and how many there are: fewest, most. One more before them does not count."""

WHOLE_S = 0.3
"""A step of the whole batch that seems to take longer is not timed."""

SHORTEST_ROW, ALIKE = 8, 0.9
"""Positions of the shortest rows that may be padded, and how many of those that seem to be end alike."""

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
        torch.autograd.backward(results, [torch.ones(value.shape, dtype=value.dtype) for value in results])
    taken_s = thread_time() - begin
    model.zero_grad()
    return taken_s


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


META = torch.device("meta")

MOVES = frozenset({"cuda", "cpu", "xpu", "hpu", "npu", "mtia", "pin_memory"})
"""Methods that move a tensor: it stays on meta."""

CASTS = frozenset({"half", "bfloat16", "double"})

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

LONGEST_REASON = 200
"""Letters."""

Function = Callable[..., object]
Args = tuple[object, ...]
Kwargs = dict[str, object] | None


def count_call(module: torch.nn.Module, args: Args, kwargs: Mapping[str, object]) -> dict[str, object]:
    """Return fields of `CallFlops` of one forward and backward; for a process that ends behind it.

    `flops` is None where they cannot be counted, and `reason` says why. `autocast` is the dtype that the forward
    itself casts to, None without. Before that a step is timed as it is and behind edits (`rehearse`).
    """
    casts: list[str] = []
    count = rehearsed = without = None
    spared = Spared()
    padded = 0.0
    with contextlib.suppress(Exception):
        padded = padding_share(
            [value for value in tree_leaves((args, dict(kwargs))) if isinstance(value, torch.Tensor)]
        )
    with contextlib.suppress(Exception):
        spared = Spared.of(module)
    if not os.environ.get("HEADWAY_PLAN"):  # under a plan the script computes with what was found before
        with contextlib.suppress(Exception):
            rehearsed = rehearse(module, args, kwargs, spared)
    try:
        model = _unwrapped(module)
        reason = _objection(model)
        if not reason:
            blanks = Blanks()
            blanks.empty(model)
            args, kwargs = tree_map(blanks.of, (args, dict(kwargs)))
            _call_plainly(casts)
            with META, FollowsMeta(blanks), OffDevices():  # type: ignore[no-untyped-call]  # torch says no types
                count = counted(model, args, kwargs)
                for value in spared.parameters:
                    cast(torch.Tensor, blanks.of(value)).requires_grad_(False)
                with contextlib.suppress(Exception):
                    without = counted(model, args, kwargs).flops if spared.parameters else None
    except Exception as cause:
        reason = f"{type(cause).__name__}: {cause}".splitlines()[0][:LONGEST_REASON]
    counts: dict[str, object] = dict(count.row()) if count is not None else {"flops": None}
    return {
        **counts,
        "frozen_elements": sum(value.numel() for value in spared.parameters),
        "frozen_flops": without,
        "padded": padded,
        "reason": reason,
        "autocast": casts[0] if casts else None,
        "rehearsed": rehearsed,
    }


def padding_share(tensors: Sequence[torch.Tensor]) -> float:
    """Return how much of the rows [batch, positions] of whole numbers on a CPU is padding: the most of any tensor.

    Padding is one number that fills the ends, or the begins, of nearly all rows that end or begin with a number twice.

    >>> padding_share([torch.tensor([[5, 3, 8, 2, 7, 9, 4, 6], [5, 2, 0, 0, 0, 0, 0, 0], [4, 4, 9, 0, 0, 0, 0, 0]])])
    0.458
    """
    shares = [0.0]
    for rows in tensors:
        if rows.device.type != "cpu" or rows.is_floating_point() or rows.dim() != 2 or min(rows.shape) < 2:
            continue
        for side in (rows, rows.flip(1)) if rows.shape[1] >= SHORTEST_ROW else ():
            last = side[:, -1:]
            length = (side == last).flip(1).cumprod(1).sum(1)  # of the run of equal numbers at the end of each row
            ends = last[length > 1]
            if not len(ends):
                continue
            filler = ends.mode(0).values
            if (ends == filler).float().mean() >= ALIKE:
                shares.append(float((length * (last == filler)[:, 0]).sum() / rows.numel()))
    return round(max(shares), 3)


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside torch.compile's wrapper and DistributedDataParallel."""
    inner = getattr(module, "_orig_mod", None)
    if type(module).__name__ == "DistributedDataParallel":
        inner = module.module
    return _unwrapped(inner) if isinstance(inner, torch.nn.Module) else module


def _objection(model: torch.nn.Module) -> str:
    """Return why shapes do not tell what this process computes; '' where they do."""
    name = type(model).__name__
    if any(type(child).__name__ in ("DataParallel", "FullyShardedDataParallel") for child in model.modules()):
        return f"{name} holds parts of parameters, or shares its work with other devices (DataParallel, FSDP1)"
    if any(isinstance(child, torch.jit.ScriptModule) for child in model.modules()):
        return f"{name} is TorchScript"
    meshes = [mesh for value in model.parameters() if (mesh := getattr(value, "device_mesh", None)) is not None]
    gathers = any("FSDPModule" in (base.__name__ for base in type(child).__mro__) for child in model.modules())
    if meshes and not (gathers and all(mesh.ndim == 1 for mesh in meshes)):
        return f"the parameters of {name} are split over ranks"
    devices = sorted({str(value.device) for value in model.parameters()})
    return f"the parameters of {name} lie on {' and '.join(devices)}" if len(devices) > 1 else ""


class Blanks:
    """Tensors without numbers in the place of others, one for each."""

    def __init__(self) -> None:
        self._of: dict[int, torch.Tensor] = {}
        self._kept: list[object] = []  # what is freed would be freed on its device

    def of(self, value: object) -> object:
        """Return the blank of a tensor, in float32 where it has floating-point numbers; other values as they are."""
        if not isinstance(value, torch.Tensor) or value.device.type == "meta":
            return value
        if id(value) not in self._of:
            dtype = _widened(value.dtype)
            plain = type(value) in (torch.Tensor, torch.nn.Parameter)
            stride = value.stride() if plain else torch.empty(value.shape, device=META).stride()
            blank = torch.empty_strided(value.shape, stride, dtype=dtype, device=META)
            learns = value.requires_grad
            if isinstance(value, torch.nn.Parameter):
                blank = torch.nn.Parameter(blank, requires_grad=learns)
            self._of[id(value)] = blank.requires_grad_(learns)
            self._kept.append(value)
        return self._of[id(value)]

    def empty(self, model: torch.nn.Module) -> None:
        """Put blanks in the place of all tensors of a model; take compilers and hooks of wrappers out of it."""
        for child in model.modules():
            self._kept.append(dict(vars(child)))
            for name, inner in child._modules.items():
                child._modules[name] = getattr(inner, "_orig_mod", inner)
            for hooks in (vars(child).get(name, {}) for name in HOOKS):
                for key in [key for key, hook in hooks.items() if _is_wrappers(hook)]:
                    del hooks[key]
            vars(child).pop("_compiled_call_impl", None)
            for name, value in list(vars(child).items()):  # parameters and buffers are two dicts among them
                if isinstance(value, (torch.Tensor, list, tuple, dict)) and name not in ("_modules", *HOOKS):
                    vars(child)[name] = tree_map(self.of, value)


def _is_wrappers(hook: Callable[..., object]) -> bool:
    """Whether a hook is one of torch's that would gather or reduce over ranks."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed")


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else dtype


def _call_plainly(casts: list[str]) -> None:
    """Have nothing compiled and nothing cast from here on; `casts` gets the dtypes that are asked for."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("force_eager")
    autocast: Any = torch.autocast

    def begin(
        _: object, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, **__: object
    ) -> None:
        if enabled:
            casts.append(str(dtype or torch.get_autocast_dtype(device_type)).rpartition(".")[2])

    autocast.__init__ = begin
    autocast.__enter__ = lambda self: self
    autocast.__exit__ = lambda *_: False


class FollowsMeta(TorchFunctionMode):
    """What a forward makes or moves is on meta and in float32, wherever and in whatever the script wants it."""

    def __init__(self, blanks: Blanks) -> None:
        super().__init__()
        self._blanks = blanks

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        """Call `func` of torch with other devices and dtypes."""
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if name in MOVES:
            return args[0]
        if name in CASTS:
            func = torch.Tensor.float
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if len({value.device for value in tensors} - {META}) and any(value.device.type != "cpu" for value in tensors):
            args, kwargs = tree_map(self._blanks.of, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = META
        if kwargs.get("generator") is not None:
            kwargs["generator"] = None
        if name == "to":
            args = (args[0], *(META if isinstance(value, (str, int)) and value is not True and value is not False
                               else value for value in args[1:]))  # fmt: skip
        args = tuple(_followed(value) for value in args)
        return func(*args, **{key: _followed(value) for key, value in kwargs.items()})


def _followed(value: object) -> object:
    if isinstance(value, torch.device):
        return META
    return _widened(value) if isinstance(value, torch.dtype) else value


class OffDevices(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch says no types
    """No operator reaches a device: one that would is an error."""

    def __torch_dispatch__(self, func: Function, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        """Call an operator on meta, or on the host."""
        for value in tree_leaves((args, kwargs)):
            device = value if isinstance(value, torch.device) else META
            device = value.device if isinstance(value, torch.Tensor) else device
            if device.type not in ("meta", "cpu") or "pin_memory" in str(func):
                raise RuntimeError(f"{func} would be called on {device}")
        return func(*args, **(kwargs or {}))
