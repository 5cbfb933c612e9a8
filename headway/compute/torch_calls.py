"""The operations of a call that a recorded script has made: counted from its shapes, in a forked child of its process.

The child has a copy of the script's memory and ends behind the count, so the model itself is emptied: its parameters,
buffers and other tensors become tensors of the meta device, which have shapes and no numbers. What the forward makes
or moves then follows them, and nothing can reach a device, whose driver a forked process may not touch:

    model(x)  ->  FollowsMeta   devices and dtypes that the script names become meta and float32
              ->  torch         shapes, dtypes, what needs a gradient
              ->  OffDevices    an operator that asks for a device all the same ends the count

Precision is left out, because operations are counted alike in all: casts and autocast do nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from headway.compute.torch_flops import CallCount, counted
from headway.compute.torch_rehearsal import Spared, rehearse
from headway.runtime.script.batches import padding_share

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
        leaves = tree_leaves((args, dict(kwargs)))
        padded = padding_share(value for value in leaves if isinstance(value, torch.Tensor))
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
                count = _counted(model, args, kwargs)
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


def _counted(model: torch.nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> CallCount:
    """Count, with what stands for packages where that is enough."""
    try:
        return counted(model, args, kwargs)
    except (AttributeError, ImportError, NameError, TypeError):  # what code says that finds another thing there
        absent = [module for module in list(sys.modules.values()) if type(module) is _Unimported]
        if not absent:
            raise
    for module in absent:
        module.replaced()
    vars(torch)["_dynamo"] = sys.modules["torch._dynamo"]
    return counted(model, args, kwargs)


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


class _Unimported(ModuleType):
    """Stands for a package of which torch wants a name or two here, and whose import takes a second or more.

    Who wants another one has it imported after all.
    """

    def __init__(self, name: str, **names: object) -> None:
        super().__init__(name)
        vars(self).update(names)
        self.__path__ = [os.path.join(path, *name.split(".")) for path in sys.path]

    def __getattr__(self, name: str) -> object:
        """Import the package."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.replaced(), name)

    def replaced(self) -> ModuleType:
        """Return the package itself, imported."""
        name = self.__name__
        if sys.modules.get(name) is self:
            del sys.modules[name]
        return importlib.import_module(name)


def _are_equal(x: object, y: object) -> bool:
    return list(x) == list(y) if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)) else x == y


UNIMPORTED: dict[str, dict[str, object]] = {
    "torch._dynamo": {"disable": lambda function, *_, **__: function},
    "sympy": {"Basic": type("Basic", (), {})},
    "torch.fx.experimental.symbolic_shapes": {
        **dict.fromkeys(("guard_or_false", "guard_or_true", "guard_size_oblivious", "expect_true",
                         "statically_known_true"), bool),
        "has_guarding_hint": lambda _: True, "is_nested_int": lambda _: False,
        "guarding_hint_or_throw": lambda size: size, "free_unbacked_symbols": lambda _: frozenset(),
        "sym_and": lambda *values: all(values), "sym_or": lambda *values: any(values), "sym_eq": _are_equal,
    },
}  # fmt: skip
"""Module -> what torch's modes and meta kernels want of it: to be kept out of a compiler that compiles nothing, and to
compare sizes, among which are no symbols."""


def _call_plainly(casts: list[str]) -> None:
    """Have nothing compiled, cast, or checked by its numbers; `casts` gets the dtypes that are asked for."""
    transformer: Any = torch.nn.modules.transformer
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
    if "torch.distributions" in sys.modules:
        torch.distributions.Distribution.set_default_validate_args(False)
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("force_eager")
    for name, names in UNIMPORTED.items():
        if name not in sys.modules:
            sys.modules[name] = _Unimported(name, **names)
    vars(torch).setdefault("_dynamo", sys.modules["torch._dynamo"])
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
