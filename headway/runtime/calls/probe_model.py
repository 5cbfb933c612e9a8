"""Probes of modules: which model computes, with or without gradients, in which mode.

Only the outermost call is recorded, and only on the thread that trains. The function that stands in for
`Module.__call__` is run by every submodule too, so what it does for those is one flag: nothing is registered with a
module, because hooks are copied and pickled with it, and slow down all its calls.
"""

from __future__ import annotations

import _thread
import functools
import weakref
from collections.abc import Callable, Iterator
from time import thread_time_ns
from typing import TYPE_CHECKING, Any

from headway.runtime.recorder.probes import Args, Kwargs, Probes, now
from headway.runtime.recorder.rehearsals import MOST_MODELS, count
from headway.runtime.recorder.timers import hidden, out_of_compiler
from headway.runtime.script.compute_facts import model_facts, note, parameters_of, unseen
from headway.runtime.script.gradients import FORWARD as BY_FORWARD
from headway.trace.events.vocabulary import BEHIND_UPDATE, CLOSED, SPANS, WAIT_NS

if TYPE_CHECKING:
    from torch.nn import Module

FORWARD, MODE = SPANS["forward"].code, SPANS["mode"].code

KNOWN_CALL = ("_compiled_call_impl", "_call_impl")
"""Names that torch's `Module.__call__` uses: it chooses between these two, and does nothing else."""

LOOKS = 16
"""Calls for which a module without anything trainable is looked at again: a model may make its parameters late."""

Reference = Callable[[], Any]


class Models:
    """Numbers models, in order of first use: modules that share their first trainable parameter are one model."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        """`id` of a live module that was called -> its model, -1 when nothing in it is trainable."""
        self.parameters: list[Reference] = []
        """[models] The first trainable parameter of each, weakly referenced."""
        self._of_parameter: dict[int, int] = {}
        self._references: dict[int, Reference] = {}
        self._looks: dict[int, int] = {}

    def add(self, module: Any) -> int:
        """Return the model of a module that is not in `numbers`, and put it there."""
        key, model = id(module), self.of_parameter(first_trainable(module))
        if key not in self._references:
            self._references[key] = weakref.ref(module, lambda _: self._forget(key))
        looks = self._looks[key] = self._looks.get(key, 0) + 1
        if model >= 0 or looks >= LOOKS:
            self.numbers[key] = model
        return model

    def of_parameter(self, parameter: Any) -> int:
        """Return the model whose first trainable parameter this is; a new one gets the next number."""
        if parameter is None:
            return -1
        key = id(parameter)
        model = self._of_parameter.get(key, -1)
        if model < 0:
            model = self._of_parameter[key] = len(self.parameters)
            # A later parameter in the same memory is another one.
            self.parameters.append(weakref.ref(parameter, lambda _: self._of_parameter.pop(key, None)))
        return model

    def known(self, module: Any) -> int:
        """Return the model that `module` belongs to, -1 when it has never been called."""
        parameter = first_trainable(module)
        return -1 if parameter is None else self._of_parameter.get(id(parameter), -1)

    def modules(self) -> Iterator[tuple[int, Module]]:
        """Yield (model, module) of what was called and lives."""
        for key, model in list(self.numbers.items()):
            module = self._references[key]() if model >= 0 and key in self._references else None
            if module is not None:
                yield model, module

    def _forget(self, key: int) -> None:
        for table in (self.numbers, self._references, self._looks):
            table.pop(key, None)


@unseen
def first_trainable(module: Any) -> Any:
    """Return the first parameter of a module that takes gradients, None when there is none."""
    return next((parameter for parameter in parameters_of(module) if parameter.requires_grad), None)


class Firsts:
    """The first calls of each model, which describe it, and whose operations are counted.

    Calls with gradients before the first backward may be others than those that train: a layer alone, with zeros, as
    a constructor asks for shapes.
    """

    def __init__(self, probes: Probes) -> None:
        self.levels: dict[int, int] = {}
        """Model -> 0: it was called without gradients; 1: with them; 2: in training mode as well."""
        self._probes = probes
        self._rows: dict[int, dict[str, object]] = {}
        self._num_counted = 0

    def note(self, model: int, module: Module, args: Args, kwargs: Kwargs, *, learns: bool) -> None:
        """Note what a call says of its model, what acted once acts; with gradients, count its operations."""
        is_counted = self.levels.get(model, 0) > 0
        self.levels[model] = learns + (learns and module.training)
        row = self._rows.setdefault(model, {})
        acted = row.get("acts")
        note(self._probes.tables.setdefault("compute", {}), "models", functools.partial(model_facts, module, args), row)
        row["acts"] = acted or row.get("acts", False)
        if learns and (is_counted or self._num_counted < MOST_MODELS):
            self._num_counted += not is_counted
            count(self._probes, model, module, args, kwargs)


def module_call(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `Module.__call__`: how long the outermost call takes on the training thread, and what it is for."""
    import torch

    models = probes.models = probes.models or Models()
    emit, forwarding, fetching, changed = probes.emit, probes.forwarding, probes.fetching, probes.outer_call.current
    gradients, trainer, gap, last = probes.gradients, probes.trainer, probes.gap, probes.last_forward
    begun, uses, gap_open, gap_asks = gradients.begun, gradients.uses, gap.open, gap.asks_forward
    # When the newest forward ended, and the CPU time of its thread then, -1 where that was not read: it tells waiting
    # from computing between two forwards of a step. A system call, for scripts that were seen to have long times there.
    ended_ns, cpu_ended, asks_cpu = 0, -1, False
    numbers, parameters, direct, ident = models.numbers, models.parameters, calls_directly(original), _thread.get_ident
    firsts = Firsts(probes)
    levels = firsts.levels
    is_grad_enabled, traced, compiled = torch.is_grad_enabled, torch._C._get_tracing_state, torch.compiler.is_compiling
    probes.outer_call.plain = lambda module, args, kwargs: original(module, *args, **kwargs)
    probes.outer_call.compose()

    def outermost(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module and record how long that took."""
        nonlocal ended_ns, cpu_ended, asks_cpu
        # Transforms are modules, too (64 took 1.2 ms of a step), and a trace would hold the sizes that are read here.
        if fetching[0] == (caller := ident()) or (begun[0] and caller != trainer[0]) or traced() or compiled():
            return original(self, *args, **kwargs)
        opened, between, gap_open[0] = gap_open[0] == BEHIND_UPDATE, -1, CLOSED
        if opened:
            if gap_asks[0]:
                gap.note_forward()
            if probes.device_timers:
                probes.device_timers.begun()
        elif cpu_ended >= 0:
            between = thread_time_ns() - cpu_ended
        start = now()
        try:
            forwarding[0] = True
            if changed[0] is not None:
                result = changed[0](self, args, kwargs)
            elif direct:
                result = (self._compiled_call_impl or self._call_impl)(*args, **kwargs)
            else:
                result = original(self, *args, **kwargs)
        finally:
            forwarding[0] = False
        try:
            duration, learns = now() - start, is_grad_enabled()
            model = numbers.get(id(self), -2)
            if model == -2:
                model = models.add(self)
            before = last[0]
            last[0] = (start, duration, model, learns + 2 * self.training, between) if learns else None
            if before is not None:
                emit(FORWARD, *before)
            if not learns:
                emit(FORWARD, start, duration, model, 2 * self.training, between)
            if asks_cpu or (not opened and ended_ns and start - ended_ns >= WAIT_NS):
                asks_cpu, cpu_ended = True, thread_time_ns()
            ended_ns = start + duration
            if learns and model >= 0:
                gradients.parameter = parameters[model]
                if probes.device_timers:
                    probes.device_timers.computed()
            if uses.on[0]:
                uses.called(self, model, (*args, *kwargs.values()), duration, learns)
            if not begun[0] and gradients.inferred():
                trainer[0], gap_open[0] = ident(), BEHIND_UPDATE
                if gap.asks[0]:
                    gap.note_loop()
                probes.advance(BY_FORWARD)
            if model >= 0 and (begun[0] or not learns) and levels.get(model, -1) < learns + (learns and self.training):
                firsts.note(model, self, args, kwargs, learns=learns)
        except Exception as cause:
            probes.failed("forward", cause)
        return result

    hidden(outermost)
    for function in (outermost, models.add, gap.note_forward, gap.note_loop, probes.advance, gradients.inferred):
        out_of_compiler(function)
    out_of_compiler(Firsts.note, callees=True)  # what it reads of tensors would be graphs of its own
    return out_of_compiler(_entry(original, outermost, forwarding))


def calls_directly(original: Callable[..., Any]) -> bool:
    """Whether torch's `Module.__call__` is the one that is known: it then need not be called."""
    return getattr(getattr(original, "__code__", None), "co_names", None) == KNOWN_CALL


def _entry(original: Callable[..., Any], outermost: Callable[..., Any], forwarding: list[bool]) -> Callable[..., Any]:
    """Return what stands for `Module.__call__`: `outermost` where no module is being called, else nearly nothing."""
    import torch

    is_compiling = torch.compiler.is_dynamo_compiling

    if calls_directly(original):
        # One frame less for every submodule: what torch's function does is done here.
        @functools.wraps(original)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  # the name it has in torch
            """Call the module; the outermost call is recorded."""
            if is_compiling():
                return original(self, *args, **kwargs)
            if forwarding[0]:
                if self._compiled_call_impl is not None:
                    return self._compiled_call_impl(*args, **kwargs)
                return self._call_impl(*args, **kwargs)
            return outermost(self, args, kwargs)

    else:

        @functools.wraps(original)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  # the name it has in torch
            """Call the module; the outermost call is recorded."""
            if is_compiling() or forwarding[0]:
                return original(self, *args, **kwargs)
            return outermost(self, args, kwargs)

    return __call__


def module_train(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `Module.train`, which `eval()` calls too: when a model that has computed changes its mode."""
    import torch

    models = probes.models = probes.models or Models()
    emit, is_compiling = probes.emit, torch.compiler.is_dynamo_compiling
    changing = [False]

    @functools.wraps(original)
    def train(self: Any, mode: bool = True) -> Any:
        """Change the mode of the module and its submodules, which come here as well."""
        if changing[0] or is_compiling():
            return original(self, mode)
        try:
            changing[0] = True
            result = original(self, mode)
        finally:
            changing[0] = False
        try:
            model = models.known(self)
            if model >= 0:
                emit(MODE, now(), 0, model, int(mode))
        except Exception as cause:
            probes.failed("mode", cause)
        return result

    return train
