"""Remedies around the outermost forward of a model that trains: autocast, channels last, torch.compile.

    model(x)  ->  inputs as the remedy wants them  ->  torch's own call  ->  outputs as the script knows them

A model's first call with gradients is the script's own: where it computes with an autograd function of the script's, of
which nobody knows whether it takes other types and layouts, nothing is changed. The call behind it is a trial: what
could have changed (generators, buffers) is copied, and where the changed call raises, the model is put back and called
as it was. Evaluation is never changed, and neither are parameters: their names, values, and how they lie in memory.

`compute.compile` judges itself: the first steps are the script's own; once no graph is made any more as many steps are
compared with them, and a model that did not become faster is given back, as is one that is compiled again and again.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import statistics
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, TypeGuard

import torch
from torch.utils._pytree import tree_map

from headway.compute.apply import LOOKED_AT, on_optimizer_steps
from headway.core.remedies import NoParameters
from headway.core.units import format_seconds
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy, on_scaled_loss
from headway.runtime.recorder.probes import NEVER, Args, CallFn, Kwargs
from headway.runtime.torch_state import RngStates

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
"""Classes that have taken note of the functions that they call."""

TRIAL = "compute.trial"
"""Key of `Context.shared` under which `headway try` says that it judges itself."""


class AroundForward:
    """A remedy that changes models at their first call in training; a subclass says how."""

    name = ""
    asks_functions = True
    """Whether autograd functions of the script's own may not bear the change."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.facts: dict[str, Any] = {"models": []}
        self.changed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """The models that were changed."""
        self._known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # no function of the script's own in them
        self._num_steps = 0

    def install(self) -> Applied:
        """Stand around the calls of models."""
        self.context.around_forward(self.around)
        self.context.undos.append(self.give_back)
        on_optimizer_steps(self.context, self.stepped)
        return Applied(self.name, self.facts)

    def objection(self, module: torch.nn.Module) -> str:
        """Return why a model cannot be changed; '' where it can."""
        raise NotImplementedError

    def change(self, module: torch.nn.Module) -> None:
        """Change a model for good."""
        raise NotImplementedError

    def restore(self, module: torch.nn.Module) -> None:
        """Make a model what it was before `change`."""

    def call(self, original: CallFn, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> object:
        """Call a model that was changed."""
        return original(module, args, kwargs)

    def around(self, original: CallFn) -> CallFn:
        """Wrap the outermost call of a module."""

        def forward(module: torch.nn.Module, args: Args, kwargs: Kwargs) -> object:
            if not (module.training and torch.is_grad_enabled()):
                return original(module, args, kwargs)
            if module in self.changed:
                return self.call(original, module, args, kwargs)
            return self._first_call(original, module, args, kwargs)

        return forward

    def _first_call(self, original: CallFn, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> object:
        """Change a model and call it; where it does not bear the change, call it as it was."""
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return original(module, args, kwargs)
        reason = self.objection(module)
        if reason:
            self.context.fail(self.name, reason)
            return original(module, args, kwargs)
        if self.asks_functions and module not in self._known:
            outputs = original(module, args, kwargs)
            if reason := _foreign_function(outputs):
                self.context.fail(self.name, reason)
            self._known.add(module)
            return outputs
        generators = RngStates().state_dict()
        buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        self.changed.add(module)
        self.change(module)
        try:
            outputs = self.call(original, module, args, kwargs)
        except Exception as error:  # the script's own errors come again in the plain call
            reason = f"{type(module).__name__} does not take it: {type(error).__name__}: {error}".splitlines()[0]
        if reason:
            RngStates().load_state_dict(generators)
            with torch.no_grad():
                for buffer, values in buffers:
                    buffer.copy_(values)
            self.context.fail(self.name, reason)
            return original(module, args, kwargs)
        self.facts["models"].append(type(module).__name__)
        self.context.note(Applied(self.name, self.facts))
        return outputs

    def stepped(self, optimizer: int) -> int:
        """Say after some steps that no model was called, where that is so; return when to look again, in steps."""
        del optimizer
        self._num_steps += 1
        if self._num_steps < LOOKED_AT:
            return 1
        if not self.facts["models"]:
            self.context.note(RefusedRemedy(self.name, "the script calls no module with trainable parameters"))
        return NEVER

    def give_back(self) -> None:
        """Give every model back as it was."""
        for module in list(self.changed):
            self.restore(module)
        self.changed.clear()


class Autocast(AroundForward):
    """'compute.autocast': products in bf16, sums and norms in float32, outputs in float32 again. Lossy."""

    name = "compute.autocast"

    def objection(self, module: torch.nn.Module) -> str:
        """Leave scripts alone that choose their precision themselves."""
        parameters = list(module.parameters())
        device_type = parameters[0].device.type
        if any(parameter.device.type != device_type for parameter in parameters):
            return "the model lies on devices of two types"
        if torch.is_autocast_enabled(device_type):
            return "the script uses autocast itself"
        if TRIAL in self.context.shared and device_type == "cpu" and not computes_bfloat16():
            return "this processor has no units for bfloat16"
        others = {str(parameter.dtype) for parameter in parameters} - {"torch.float32"}
        return (
            f"the model has parameters in {', '.join(sorted(others))}: it chooses precisions itself" if others else ""
        )

    def change(self, module: torch.nn.Module) -> None:
        """Note where the model lies: nothing of it changes."""
        self.facts |= {"device_type": next(module.parameters()).device.type, "dtype": "bfloat16"}

    def call(self, original: CallFn, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> object:
        """Call the model under autocast, and return its outputs in float32."""
        with torch.autocast(self.facts["device_type"], torch.bfloat16):
            outputs = original(module, args, kwargs)
        return _mapped(_in_float32, outputs)


class ChannelsLast(AroundForward):
    """'compute.channels_last': images come with their channels last, as the kernels of convolutions read them.

    A convolution takes the layout of its input, and hands it on. Its weights stay as they lie: it reads a copy of them,
    small beside images, because scripts make views of parameters and gradients, and save them as they lie.
    """

    name = "compute.channels_last"

    def objection(self, module: torch.nn.Module) -> str:
        """Leave models alone without convolutions, and those that lie so already."""
        weights = _convolutions(module)
        if not weights:
            return f"{type(module).__name__} has no 2-D convolution"
        return "" if all(weight.is_contiguous() for weight in weights) else "the script says how its convolutions lie"

    def change(self, module: torch.nn.Module) -> None:
        """Note how many convolutions there are: nothing of the model changes."""
        self.facts["convolutions"] = len(_convolutions(module))

    def call(self, original: CallFn, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> object:
        """Call the model with images that lie so; its outputs lie as the script knows them."""
        args, kwargs = tree_map(_last, (args, kwargs))
        return _mapped(_first, original(module, args, kwargs))


class Compile(AroundForward):
    """'compute.compile': `module.compile()`, taken back where it does not pay."""

    name = "compute.compile"
    asks_functions = False  # the compiler traces them, or leaves them as they are

    PLAIN_STEPS = 8
    """Steps of the script's own before a model is compiled, and those that are compared with them."""
    MOST_RECOMPILES = 8
    PATIENCE = 40
    """Steps after which a model that is still being compiled is given back."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.facts |= {"graphs": 0, "graph_breaks": 0, "recompiles": 0, "compile_s": 0.0}
        self._times: list[float] = []
        self._compiled_at = -1  # entry of `_times` at which the model was compiled
        self._warm_at = -1  # ... from which no graph was made any more
        self._graphs = 0
        self._mark = perf_counter()

    @property
    def _judges(self) -> bool:
        return TRIAL not in self.context.shared

    def around(self, original: CallFn) -> CallFn:
        """Wrap the outermost call; the first steps are the script's own."""
        changed = super().around(original)

        def forward(module: torch.nn.Module, args: Args, kwargs: Kwargs) -> object:
            if self._judges and len(self._times) < self.PLAIN_STEPS:
                return original(module, args, kwargs)
            if module in self.changed and not (module.training and torch.is_grad_enabled()):
                return _uncompiled(original, module, args, kwargs)
            return changed(module, args, kwargs)

        return forward

    def objection(self, module: torch.nn.Module) -> str:
        """Leave models alone that are compiled, or whose wrappers or hooks a compiler would meet."""
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            return "the script compiles the model itself"
        if any(child._compiled_call_impl is not None or hasattr(child, "_orig_mod") for child in module.modules()):
            return "the script compiles parts of the model itself"
        if type(module).__name__ in WRAPPERS:
            return f"{type(module).__name__} was made around a model that is not compiled"
        hooked = [child for child in module.modules() if child._forward_hooks or child._forward_pre_hooks]
        if hooked:
            return f"{type(hooked[0]).__name__} has forward hooks of the script's, and each would be a graph break"
        return no_compiler(next(module.parameters()).device.type)

    def change(self, module: torch.nn.Module) -> None:
        """Compile: names of the state dict stay, and what is drawn at random is drawn as before."""
        self._compiled_at, self._graphs = len(self._times), _num_graphs()
        call_module: Callable[..., object] = module._call_impl

        def call(*args: object, **kwargs: object) -> object:
            return call_module(*args, **kwargs)

        # The compiler knows functions by their names: one of two models would look like the other with other shapes.
        call.__code__ = call.__code__.replace(co_name=f"call_{type(module).__name__}_{next(_NUMBERS)}")
        # What `module.compile()` sets; that one compiles nothing of a model whose forward is torch's (Sequential).
        # Not for any shape at once: such a backward is compiled when it is called, and may fail there.
        module._compiled_call_impl = torch.compile(call, dynamic=False)

    def restore(self, module: torch.nn.Module) -> None:
        """Let torch call it without a compiler."""
        module._compiled_call_impl = None

    def call(self, original: CallFn, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> object:
        """Call the compiled model, with torch's own random numbers."""
        with _own_draws():
            return original(module, args, kwargs)

    def stepped(self, optimizer: int) -> int:
        """Note the step, and judge once there are enough."""
        moment = perf_counter()
        self._times.append(moment - self._mark)
        self._mark = moment
        if self._compiled_at >= 0:
            return self._compiled_step()
        return super().stepped(optimizer) if len(self._times) > self.PLAIN_STEPS else 1

    def _compiled_step(self) -> int:
        """Count graphs, and judge; return when to look again."""
        graphs = _num_graphs()
        made, self._graphs = graphs - self._graphs, graphs
        num_steps = len(self._times) - self._compiled_at
        self.facts["recompiles"] += made if num_steps > 1 else 0
        self.facts["graphs"] += made
        self.facts["graph_breaks"] = _num_breaks()
        if made:
            self.facts["compile_s"] += self._times[-1]
            self._warm_at = -1
        elif self._warm_at < 0:
            self._warm_at = len(self._times)
        if self.facts["recompiles"] > self.MOST_RECOMPILES:
            self.context.fail(self.name, f"the model was compiled {self.facts['recompiles']} times again")
            return NEVER
        if not self._judges:
            return 1
        if self._warm_at < 0 and num_steps > self.PATIENCE:
            self.context.fail(self.name, f"the model was still being compiled after {num_steps} steps")
            return NEVER
        warm = self._times[self._warm_at :] if self._warm_at >= 0 else []
        if len(warm) < self.PLAIN_STEPS:
            return 1
        plain_s, warm_s = statistics.median(self._times[1 : self.PLAIN_STEPS]), statistics.median(warm)
        self.facts |= {"plain_step_s": plain_s, "step_s": warm_s}
        if warm_s >= plain_s:
            slower = f"once warm a step took {format_seconds(warm_s)}, and {format_seconds(plain_s)} as it was"
            self.context.fail(self.name, slower)
        else:
            self.context.note(Applied(self.name, self.facts))
        return NEVER


def autocast(parameters: NoParameters, context: Context) -> Applied:
    """Install 'compute.autocast'; scripts that scale their loss choose their precision themselves."""
    del parameters
    on_scaled_loss(context, lambda: context.fail(Autocast.name, "the script scales its loss (GradScaler)"))
    return Autocast(context).install()


def channels_last(parameters: NoParameters, context: Context) -> Applied:
    """Install 'compute.channels_last'."""
    del parameters
    return ChannelsLast(context).install()


def compiled(parameters: NoParameters, context: Context) -> Applied | RefusedRemedy:
    """Install 'compute.compile'."""
    del parameters
    return Compile(context).install()


def no_compiler(device_type: str) -> str:
    """Return why torch.compile cannot work on this machine; '' where it can."""
    if device_type != "cpu":
        import importlib.util

        return "" if importlib.util.find_spec("triton") else "torch.compile needs triton, which is not installed"
    from torch._inductor import config

    names = [name for name in config.cpp.cxx if name] if isinstance(config.cpp.cxx, (list, tuple)) else []
    return "" if any(map(shutil.which, [*names, "g++", "clang++"])) else "torch.compile needs a C++ compiler on a CPU"


def computes_bfloat16() -> bool:
    """Whether this processor has instructions for products of bfloat16 numbers."""
    asked = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, name, bool)() for name in asked)


@contextmanager
def _own_draws() -> Iterator[None]:
    """Let compiled code draw random numbers as torch does without it, and leave what it cannot compile to torch."""
    import torch._dynamo
    import torch._inductor.config

    dynamo, inductor = torch._dynamo.config, torch._inductor.config
    before = dynamo.suppress_errors, inductor.fallback_random
    dynamo.suppress_errors, inductor.fallback_random = True, True
    try:
        yield
    finally:
        dynamo.suppress_errors, inductor.fallback_random = before


_NUMBERS = itertools.count()


def _uncompiled(original: CallFn, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> object:
    """Call a compiled model as it was: what it draws at random in evaluation, too, is the script's own."""
    compiled_call, module._compiled_call_impl = module._compiled_call_impl, None
    try:
        return original(module, args, kwargs)
    finally:
        module._compiled_call_impl = compiled_call


def _num_graphs() -> int:
    """Return the frames that were compiled so far."""
    from torch._dynamo.utils import counters

    return int(counters["frames"]["ok"])


def _num_breaks() -> int:
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


def _convolutions(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the weights of 2-D convolutions."""
    kinds = (torch.nn.Conv2d, torch.nn.ConvTranspose2d)
    return [child.weight for child in module.modules() if isinstance(child, kinds)]


def _is_image(value: object) -> TypeGuard[torch.Tensor]:
    return type(value) is torch.Tensor and value.dim() == 4 and value.is_floating_point()


def _last(value: object) -> object:
    return value.contiguous(memory_format=torch.channels_last) if _is_image(value) else value


def _first(value: object) -> object:
    return value.contiguous() if _is_image(value) else value


def _mapped(function: Callable[[object], object], outputs: object) -> object:
    """Return what a model returned with `function` of each tensor in it, also in classes with fields."""
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        for field in dataclasses.fields(outputs):
            object.__setattr__(outputs, field.name, _mapped(function, getattr(outputs, field.name)))
        return outputs
    return tree_map(function, outputs)


def _in_float32(value: object) -> object:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value


def _foreign_function(outputs: object) -> str:
    """Name an autograd function that is not torch's behind the outputs of a model; '' without one."""
    pending: list[torch.autograd.graph.Node | None] = []
    tree_map(lambda value: pending.append(getattr(value, "grad_fn", None)), outputs)
    visited = set()
    while pending:
        function = pending.pop()
        if function is None or function in visited:
            continue
        visited.add(function)
        written = getattr(function, "_forward_cls", None)
        if written is not None and written.__module__.partition(".")[0] not in ("torch", "headway"):
            return f"the model computes with {written.__qualname__}, an autograd function that is not torch's"
        pending += [follower for follower, _ in function.next_functions]
    return ""
